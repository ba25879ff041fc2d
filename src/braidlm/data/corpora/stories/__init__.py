"""The `stories` corpus."""
