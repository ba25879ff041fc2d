"""Embeddings of tokens, and heads that compute logits and the loss."""
