"""Training features, found by scanning this folder: each declares its recipe keys and acts through the hooks of
`Feature` (`features/feature.py`). The loop and the step name none of them."""
