"""Floor 5: looking inside a model: which path or expert each token takes, and what gates do."""
