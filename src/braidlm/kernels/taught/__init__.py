"""A head that learns from teachers beside its labels, by kernels."""
