"""One file for each part that kernels serve."""
