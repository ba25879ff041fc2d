"""Upcycling: a dense model becomes a sparse one whose experts are copies of its feed-forward parts."""
