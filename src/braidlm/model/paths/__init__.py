"""Parallel paths: the stages and joins that run several blocks side by side, and projections between widths."""
