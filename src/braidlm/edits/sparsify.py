"""`braid edit sparsify`: the smallest weights of each matrix become zero (magnitude pruning)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.edits.account import Derived, Transform, from_source, planned
from braidlm.edits.edit import Edit, EditPlan, edits
from braidlm.edits.matrices import Matrix, matrices_of, measure_beside, notes_of, shared_once
from braidlm.model.config.ranges import Count, Rate
from braidlm.opening.braid import OpenedBraid

PATTERN = (2, 4)
"""How many of how many inputs in a row keep their weights, in the pattern that GPUs multiply faster."""


@edits.register("sparsify")
@dataclass(frozen=True)
class Sparsify(Edit):
    """Which weights become zero."""

    about: ClassVar[str] = "set the smallest weights of each matrix to zero (magnitude pruning)"

    share: Rate | None = None
    """The share of each matrix's weights that becomes zero, wherever they are."""
    pattern: Literal["2:4"] | None = None
    """Instead of a share: of every 4 inputs in a row of an output, the 2 largest weights stay."""
    modules: tuple[str, ...] = ("stages.*",)
    """Addresses of linear layers or patterns of them: stages.*.feed.* takes those of feed-forward parts."""
    text: str | None = None
    """Held-out text, a file, folder or packed data: its bits per byte before and after are shown."""
    tokens: Count = 100_000
    """How many tokens of the text are read."""

    def __post_init__(self) -> None:
        if (self.share is None) == (self.pattern is None):
            raise BraidError("give either a share of the weights or a pattern", todo="`--share 0.5` or `--pattern 2:4`")

    def plan(self, source: OpenedBraid) -> EditPlan:
        measure = measure_beside(source, self.text, self.tokens)
        matrices = shared_once(matrices_of(source, self.modules))
        chosen = [m for m in matrices if self.pattern is None or m.inputs % PATTERN[1] == 0]
        if not chosen:
            raise BraidError(f"no matrix has a number of inputs that is a multiple of {PATTERN[1]}", source.title)
        model, account = planned(source.config)
        account.origins |= {matrix.tensor: self._derived(matrix) for matrix in chosen}
        total, numbers = source.info.parameters, sum((m.members or 1) * m.inputs * m.outputs for m in chosen)
        zeros = round(numbers * (1 - PATTERN[0] / PATTERN[1] if self.share is None else self.share))
        notes = notes_of(source)
        if len(chosen) < len(matrices):
            notes.append(f"{len(matrices) - len(chosen)} matrices stay: {PATTERN[1]} does not divide their inputs")
        become = f"about {zeros:,} of {total:,} parameters become zero ({zeros / total:.1%})"
        title = f"Sparsify {source.title}: {len(chosen)} matrices, {become}"
        return EditPlan(title, model, account, notes, measure=measure)

    def _derived(self, matrix: Matrix) -> Derived:
        def compute(tensor: Tensor) -> Tensor:
            rows = matrix.rows(tensor)
            return matrix.rows(two_of_four(rows) if self.share is None else without_smallest(rows, self.share))

        text = "2 of 4 inputs stay" if self.share is None else f"the smallest {self.share:.1%} become zero"
        return from_source(matrix.tensor, Transform(compute, text))


def without_smallest(rows: Tensor, share: float) -> Tensor:
    """Matrices [..., outputs, inputs], of each of which this share, the smallest in size, is zero."""
    flat = rows.flatten(-2)
    smallest = flat.abs().topk(math.floor(share * flat.shape[-1]), dim=-1, largest=False).indices
    return flat.scatter(-1, smallest, 0.0).unflatten(-1, rows.shape[-2:])


def two_of_four(rows: Tensor) -> Tensor:
    """Matrices [..., outputs, inputs] with two zeros, the smaller weights, in every four inputs in a row."""
    kept, of = PATTERN
    groups = rows.unflatten(-1, (-1, of))
    return groups.scatter(-1, groups.abs().topk(of - kept, dim=-1, largest=False).indices, 0.0).flatten(-2)
