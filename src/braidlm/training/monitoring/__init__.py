"""What a run says of itself while it trains: progress and speed, metrics, held-out text and samples."""
