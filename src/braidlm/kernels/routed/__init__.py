"""Kernels for routed tokens: permutation, grouped products, attention of routed queries, weighted sums."""
