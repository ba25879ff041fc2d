"""By what modules are pruned, and the points of a curve of pruned models; the command line shows both without torch."""

from dataclasses import dataclass
from typing import Literal

from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Count, Probability, Share
from braidlm.model.config.strict import decode

Criterion = Literal["frequency", "output_norm"]
"""How often a module is chosen (ModuleFormer's), or its weight times the norm of its output."""
Normalisation = Literal["max", "sum"]
"""A module's use is divided by that of the layer's most used one (ModuleFormer's), or by the layer's sum."""
THRESHOLDS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class PruningOptions:
    """The points of the curves; each model, criterion and normalisation is a curve of its own."""

    text: str
    """Draw quality against remaining parameters: the models are pruned by the use of their modules on this text."""
    thresholds: tuple[Share, ...] = ()
    """Points: modules below this share of their layer's most used one go; by default 0 0.01 0.02 0.05 0.1 0.2 0.5."""
    keep: tuple[Probability, ...] = ()
    """Points: this share of the parameters stays at most."""
    criterion: tuple[Criterion, ...] = ("frequency",)
    """How use is measured, one curve for each: as `braid edit prune` has it."""
    normalise: tuple[Normalisation, ...] = ("max",)
    """By what use is divided, one curve for each: as `braid edit prune` has it."""
    tokens: Count = 100_000
    """How many tokens of the text are read."""
    beside: tuple[str, ...] = ()
    """Curves of models that are scored as they are, such as those tuned after pruning: NAME=FOLDER,FOLDER."""

    def __post_init__(self) -> None:
        decode(PruningOptions, self)
        if not self.criterion or not self.normalise:
            raise BraidError("a curve needs a criterion and a normalisation")

    @property
    def points(self) -> list[dict[str, float]]:
        """The options of each pruning."""
        thresholds = self.thresholds or (() if self.keep else THRESHOLDS)
        shares = sorted(set(self.keep), reverse=True)
        return [{"threshold": value} for value in sorted(set(thresholds))] + [{"keep": value} for value in shares]

    def series(self) -> dict[str, list[str]]:
        """The folders of the curves beside, by the curves' names."""
        named = {}
        for item in self.beside:
            name, equals, folders = item.partition("=")
            if not (name and equals and folders) or name in named:
                raise BraidError(f"expected another NAME=FOLDER,FOLDER, got '{item}'", "beside")
            named[name] = [folder for folder in folders.split(",") if folder]
        return named
