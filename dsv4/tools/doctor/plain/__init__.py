"""The model without the engine: weights from the files, the expected result of each op.

The formulas are those of `dsv4/tools/formulas.py`. Nothing here shares code with what it checks.
"""
