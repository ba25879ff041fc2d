"""Tokenizers: one class over all of them, where they come from, words per token."""
