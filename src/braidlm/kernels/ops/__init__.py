"""Kernels for dense parts, one operation per file with its reference beside it."""
