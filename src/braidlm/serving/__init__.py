"""Floor 5: a finished model at work."""
