"""Pure helpers, independent of the model."""
