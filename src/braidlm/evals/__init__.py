"""Floor 5: scoring a model folder: baselines, tasks, fine-tuning and reports."""
