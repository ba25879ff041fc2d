"""Curves of quality against remaining parameters."""
