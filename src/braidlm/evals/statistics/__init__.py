"""Statistics of scores: standard errors, influences, significance, regressions and curve fits."""
