"""One scorer for every task: log-probabilities of tokens, and completions."""
