"""Errors that a user can cause. The class is in `model`, because a model folder must work without braidlm."""

from braidlm.model.errors import BraidError, did_you_mean

__all__ = ["BraidError", "did_you_mean"]
