"""Floor 4: one opened model, whatever a name stands for, with two backends: Braid's and transformers'."""
