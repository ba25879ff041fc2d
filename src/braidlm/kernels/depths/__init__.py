"""Mixture of depths: which tokens enter a block, their rows, and the stream that they return to."""
