"""Kernels for routed tokens: placement, grouped products, attention of routed queries, weighted sums."""
