"""One file for each family of parts that kernels serve."""
