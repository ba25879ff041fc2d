"""What a block does to each token on its own."""
