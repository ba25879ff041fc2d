"""Comparisons: several recipes trained on identical batches, one table and a page."""
