"""Positions: a table that is added to the embedding, or a rotation of queries and keys."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from braidlm.kernels.context import Rotation
from braidlm.kernels.lowerings.lowering import Lowering, first, lowering_of, lowers, refusal, unless
from braidlm.model.attention.positions import LearnedPositions, NoPositions, RotaryPositions


@lowers(NoPositions)
class PositionsLowering(Lowering):
    """Positions that attention takes no notice of."""

    rotates: ClassVar[bool] = False
    """Whether attention rotates its queries and keys."""

    def table(self, positions: Any) -> Tensor | None:
        """[position, width], added to the embedded tokens."""
        return None

    def rotations(
        self, positions: Any, head_dims: Iterable[int], time: int, device: torch.device
    ) -> tuple[dict[int, Rotation | None], bool]:
        """The rotation for each size of heads, and whether neighbouring channels are rotated together."""
        return dict.fromkeys(head_dims), False


@lowers(LearnedPositions)
class LearnedPositionsLowering(PositionsLowering):
    def table(self, positions: LearnedPositions) -> Tensor:
        return positions.weight


@lowers(RotaryPositions)
class RotaryPositionsLowering(PositionsLowering):
    honours = {"theta", "pairs", "scaling"}
    rotates = True

    def rotations(
        self, positions: RotaryPositions, head_dims: Iterable[int], time: int, device: torch.device
    ) -> tuple[dict[int, Rotation | None], bool]:
        rotations: dict[int, Rotation | None] = {}
        for dim in head_dims:
            cos, sin = positions.tables(dim, torch.arange(time, device=device)[None])
            rotations[dim] = (cos[0], sin[0], None)
        return rotations, positions.config.pairs == "interleaved"


def positions_of(body: Any) -> PositionsLowering:
    """The lowering of a model's positions; parts that need positions without one are refused."""
    return lowering_of(body.positions) or PositionsLowering()


def positions_refusal(body: Any) -> str | None:
    """Why kernels do not serve parts that read the model's positions."""
    reason = refusal(body.positions, body)
    return reason and f"positions: {reason}"


def rotation_refusal(body: Any, reason: str) -> str | None:
    """`reason`, where positions rotate queries and keys; or why kernels do not know the positions."""
    return first(positions_refusal(body), unless(not positions_of(body).rotates, reason))
