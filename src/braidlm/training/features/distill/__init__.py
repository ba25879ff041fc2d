"""Knowledge distillation: teachers, what they give to learn from, and the loss of learning it."""
