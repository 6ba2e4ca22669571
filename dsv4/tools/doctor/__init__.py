"""Finds the wrong operation, on this machine or in this checkpoint. Start at `examine.py`."""
