"""Extra losses of a training, one per file: see `braidlm.training.step.extra_losses`."""
