"""A few pure helpers that know nothing of the model."""
