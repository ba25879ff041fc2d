"""One recipe with several values, or several recipes: sweeps, comparisons, and the table of any runs."""
