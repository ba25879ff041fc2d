"""Floor 7: several runs and compositions that belong together, run in order, with one report."""
