"""From packed data sets to batches: chunking, mixing, order, held-out text."""
