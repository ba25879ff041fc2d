"""Products of sorted rows with a matrix for each expert: forward, backward, and the gradients of the matrices."""
