"""The model without the engine: formulas, weights from the files, and what each op should give."""
