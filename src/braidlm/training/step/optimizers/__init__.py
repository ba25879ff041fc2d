"""The optimizers that a recipe may choose; each is one file, found by scanning."""
