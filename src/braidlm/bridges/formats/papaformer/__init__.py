"""PaPaformer checkpoints as the authors' code writes them."""
