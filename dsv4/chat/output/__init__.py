"""Parsing of model output: `parse.py` is the entry point, `block.py` reads tool calls."""
