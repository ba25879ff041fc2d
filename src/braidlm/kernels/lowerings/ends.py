"""The ends of a model: positions, the embedding that they are added to, and the linear head."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.kernels.context import Rotation
from braidlm.kernels.lowerings.lowering import Lowering, lowering_of, lowers, refusal
from braidlm.kernels.ops.ends import Embed, HeadLoss
from braidlm.kernels.ops.soft_head_loss import SoftTargets, taught_head_loss
from braidlm.kernels.side_stream import DeferredGradient
from braidlm.model.attention.positions import LearnedPositions, NoPositions, RotaryPositions
from braidlm.model.heads.ends import LinearHead, TokenEmbedding
from braidlm.model.heads.losses import IGNORED

Rotations = tuple[dict[int, Rotation | None], bool]
"""The rotation for each size of heads, and whether neighbouring channels are rotated together."""


@lowers(NoPositions)
class PositionsLowering(Lowering):
    """Positions that attention takes no notice of."""

    rotates: ClassVar[bool] = False
    """Whether attention rotates its queries and keys."""

    def table(self, positions: Any) -> Tensor | None:
        """[position, width], added to the embedded tokens."""
        return None

    def rotations(self, positions: Any, head_dims: Iterable[int], time: int, device: torch.device) -> Rotations:
        return dict.fromkeys(head_dims), False


@lowers(LearnedPositions)
class LearnedPositionsLowering(PositionsLowering):
    def table(self, positions: LearnedPositions) -> Tensor:
        return positions.weight


@lowers(RotaryPositions)
class RotaryPositionsLowering(PositionsLowering):
    honours = {"theta", "pairs", "scaling"}
    rotates = True

    def rotations(self, positions: Any, head_dims: Iterable[int], time: int, device: torch.device) -> Rotations:
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
    return positions_refusal(body) or (reason if positions_of(body).rotates else None)


@lowers(TokenEmbedding)
class TokenEmbeddingLowering(Lowering):
    """An embedding with the positions that are added to it."""

    def reject(self, part: Any, body: Any) -> str | None:
        return positions_refusal(body)

    def embed(self, ids: Tensor, body: Any, dtype: torch.dtype, tied: DeferredGradient | None) -> Tensor:
        """The stream [batch * time, width] before the first layer; with `tied`, the embedding adds its gradient to that
        of the head, which shares its matrix."""
        table = positions_of(body).table(body.positions)
        return Embed.apply(ids.contiguous(), body.embedding.weight, table, dtype, tied)


@lowers(LinearHead)
class LinearHeadLowering(Lowering):
    """A head: its losses and its logits."""

    def reads_late(self, head: LinearHead) -> list[Tensor]:
        """The matrices that the loss reads in a cast copy, after all layers."""
        return [head.weight.detach()]

    def is_tied(self, head: LinearHead, embedding: Any) -> bool:
        """Whether the head shares the matrix of an embedding that kernels serve, and its gradient is wanted."""
        return head.weight is embedding.weight and head.weight.requires_grad

    def loss(
        self,
        head: LinearHead,
        hidden: Tensor,
        casts: list[Tensor],
        targets: Tensor,
        total: Tensor,
        tied: DeferredGradient | None,
        soft: SoftTargets | None,
    ) -> Any:
        """The summed loss of targets [rows] over `total` for rows [rows, width]; with soft targets, `TaughtLosses`."""
        inputs = (hidden, head.weight, casts[0] if casts else None, targets, total, IGNORED, tied)
        return HeadLoss.apply(*inputs) if soft is None else taught_head_loss(soft, *inputs)

    def logits(self, head: LinearHead, hidden: Tensor) -> Tensor:
        """The logits of a stream, without gradients."""
        # The product is far slower where its rows do not begin at multiples of 16 bytes.
        vocabulary = len(head.weight)
        weight = F.pad(head.weight.to(hidden.dtype), (0, 0, 0, -vocabulary % 16))
        return F.linear(hidden, weight)[..., :vocabulary]
