"""Scoring: requests, prefix trees, log-probabilities, completions, and the n-gram baselines."""
