"""Attention by kernels: causal attention of all tokens or of routed ones, and stick-breaking."""
