"""Matrices in a smaller form: products of narrow ones, or whole numbers of few bits."""
