"""Fine-tuning a model on labelled texts: GLUE, SuperGLUE and data sets of their form."""
