"""Floor 1: errors, files, recipes, console and model folders; everything above stands on it."""
