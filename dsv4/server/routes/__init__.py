"""One file per protocol; each defines a `router` that `app.py` includes."""
