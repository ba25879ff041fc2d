"""Parallel paths and their joins, projections between widths, and switches for active paths."""
