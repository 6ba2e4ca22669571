"""Checkpoints into other number formats. Start at `convert.py`."""
