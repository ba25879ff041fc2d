"""A sandbox for generated programs. `sandbox.py` is its interface; the launcher and the files that it imports use the
standard library alone."""
