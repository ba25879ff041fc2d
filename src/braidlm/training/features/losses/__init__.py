"""Extra losses of a training, one per file: see `braidlm.training.features.extra_losses`."""
