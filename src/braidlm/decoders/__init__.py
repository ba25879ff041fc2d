"""Decoders of transformers as they are: their parts by structure, gates around their layers, and gate adapters."""
