"""Floor 2: a finished model at work."""
