"""Feed-forward parts and banks of them."""
