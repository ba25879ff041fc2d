"""lm-evaluation-harness on a model in memory."""
