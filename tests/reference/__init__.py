"""Weights, inputs and outputs of the papers' public code on tiny random models: README.md says what must agree."""

from pathlib import Path

REFERENCE = Path(__file__).parent
