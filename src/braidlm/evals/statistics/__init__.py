"""Statistics of scores: correlations, regressions, curve fits, the error of a difference."""
