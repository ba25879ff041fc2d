"""Floor 1: the model's functions, faster. Each kernel has a reference; the model never names this floor."""
