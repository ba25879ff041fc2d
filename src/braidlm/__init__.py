"""Braid: small language models as parts."""

__version__ = "0.1.0"
