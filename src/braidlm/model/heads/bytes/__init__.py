"""Embeddings and heads that read and write tokens as their bytes (super tiny language models)."""
