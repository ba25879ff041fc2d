"""Where a token becomes a vector, and a vector becomes scores of tokens and their loss."""
