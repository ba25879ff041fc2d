"""Floor 0: the self-contained model in plain torch: it imports torch, transformers and, relatively, its own files.

Saving a model bundles these files into one, which the model folder carries (see bundle.py).
"""
