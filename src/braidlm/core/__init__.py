"""Floor 1: errors, files, recipes, console, model folders, decoding and reports."""
