"""Drafts on the side of the runner: their rows in a step, and blocks of the model that draft."""
