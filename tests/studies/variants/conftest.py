"""What the tests of sweeps and comparisons share with those of training."""

from tests.training.conftest import Answer, braid, maths, stories

__all__ = ["Answer", "braid", "maths", "stories"]
