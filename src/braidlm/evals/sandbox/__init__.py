"""Programs that a model wrote, run where they can do no harm. `box.py` is the door; what the launcher imports, and that
is all beside it, uses the standard library alone."""
