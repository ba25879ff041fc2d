"""By what modules are pruned: the names of criteria and normalisations, which the command line shows without torch."""

from typing import Literal

Criterion = Literal["frequency", "output_norm"]
"""How often a module is chosen (ModuleFormer's), or its weight times the norm of its output."""
Normalisation = Literal["max", "sum"]
"""A module's use is divided by that of the layer's most used one (ModuleFormer's), or by the layer's sum."""
