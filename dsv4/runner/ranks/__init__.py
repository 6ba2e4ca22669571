"""A model over several ranks: rank 0 starts the others and tells each step; they follow."""
