"""Fine-tuning a model on labelled texts, and how well it then answers: GLUE, SuperGLUE and whatever has their form."""
