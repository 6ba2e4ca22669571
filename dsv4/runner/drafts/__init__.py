"""Drafts in the runner: their rows in a step, and the model's draft blocks."""
