"""Studies: several runs and compositions that belong together, run in order and told in one report."""
