"""The model without the engine: formulas, weights from the files, expected result of each op."""
