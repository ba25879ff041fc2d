"""MoEP checkpoints, whatever the version of the authors' code that wrote them."""
