"""One file per protocol; each offers a `router` that `app.py` includes."""
