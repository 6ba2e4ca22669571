"""Which operation is wrong, on this machine or in this checkpoint. Start at `examine.py`."""
