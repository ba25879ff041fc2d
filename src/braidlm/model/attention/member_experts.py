"""Attention experts of the members of a stack."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..config.registry import Choice
from ..routing.routing import Routings
from ..span import Span
from .attention import AttentionExpertsConfig
from .routed import attention_bank, attention_stacks


@attention_stacks.register("with_experts")
class MemberAttentionExperts(nn.ModuleDict):
    """A bank with its router for each member, by its name: [member, batch, time, width] in and out.

    Keys and caches are each member's own, so that the banks are computed one after another.
    """

    def __init__(
        self, choice: Choice, experts: AttentionExpertsConfig, width: int, dropout: float, members: Sequence[str]
    ):
        super().__init__({member: attention_bank(choice, experts, width, dropout) for member in members})

    def forward(self, normed: Tensor, span: Span) -> tuple[Tensor, Routings]:
        outputs: list[Tensor] = []
        routings: Routings = ()
        for bank, own in zip(self.values(), normed, strict=True):
            output, bank_routings = bank(own, span)
            outputs.append(output)
            routings += bank_routings
        return torch.stack(outputs), routings
