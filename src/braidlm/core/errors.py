"""Errors that a user can cause. The class lives on floor 0, because the model folder must stand alone."""

from braidlm.model.errors import BraidError, did_you_mean

__all__ = ["BraidError", "did_you_mean"]
