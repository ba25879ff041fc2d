"""Model and run folders, presets, costs."""
