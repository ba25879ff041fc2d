"""Banks of experts that several processes share: each has some of the experts, and rows are sent to where theirs are.

A bank is called with rows sorted by expert; those of one process's experts follow one another, so that two exchanges
(all-to-all) around the plain bank are all there is. Every process computes the rows of all that share the bank.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from braidlm.core.errors import BraidError
from braidlm.model.attention.experts import RoutedAttention
from braidlm.model.feed.feeds import RoutedFeed
from braidlm.model.routing.dispatch import Groups
from braidlm.model.routing.router import RoutedExperts
from braidlm.model.routing.stacked import StackedLinear


class SpreadBank:
    """Mixed into a bank's class, before it."""

    mesh: DeviceMesh

    def forward(self, rows: Tensor, groups: Groups | None = None, *others: Any) -> Any:
        assert groups is not None  # a part whose bank is shared computes the chosen experts alone
        group = self.mesh.get_group("expert")
        sent_PE = groups.counts_E.view(self.mesh["expert"].size(), -1)
        arrived_PE = wait_tensor(all_to_all_single(sent_PE.flatten(), None, None, group)).view_as(sent_PE)
        sent, arrived = sent_PE.sum(1).tolist(), arrived_PE.sum(1).tolist()
        own = all_to_all_single_autograd(rows.contiguous(), arrived, sent, group)
        # Rows arrive by process and within it by expert, and the bank reads them by expert.
        experts = torch.arange(arrived_PE.shape[1], device=rows.device).repeat(len(arrived_PE))
        order = torch.repeat_interleave(experts, arrived_PE.flatten(), output_size=len(own)).argsort(stable=True)
        outputs = super().forward(own.index_select(0, order), Groups(arrived_PE.sum(0)), *others)  # type: ignore[misc]
        made, rest = (outputs[0], outputs[1:]) if isinstance(outputs, tuple) else (outputs, None)
        back = torch.zeros_like(made).index_copy(0, order, made)
        result = all_to_all_single_autograd(back, sent, arrived, group)
        return result if rest is None else (result, *rest)


def expert_banks(model: nn.Module) -> Iterator[tuple[str, RoutedExperts, nn.Module]]:
    """The banks that can be shared: the address, the part that routes, and what it calls with rows sorted by expert.
    Attention experts with keys of their own attend to all tokens, and stay where their tokens are."""
    for name, part in model.named_modules():
        if isinstance(part, RoutedFeed):
            yield name, part, part.bank
        elif isinstance(part, RoutedExperts) and not isinstance(part, RoutedAttention):
            yield from ((name, part, bank) for bank in part.children() if isinstance(bank, StackedLinear))  # type: ignore[attr-defined]


def check_banks(model: nn.Module, processes: int) -> None:
    """Refuse a model whose experts so many processes cannot share."""
    banks, where = list(expert_banks(model)), "training.parallel.experts"
    if not banks:
        raise BraidError("this model has no bank of experts that processes could share", where, "Leave it out.")
    uses: dict[nn.Parameter, int] = {}
    for name, _, bank in banks:
        layers = [layer for layer in bank.modules() if isinstance(layer, StackedLinear)]
        if problem := next((layer.stack for layer in layers if layer.stack % processes), None):
            what = f"{processes} processes cannot share {problem} experts ({name})"
            raise BraidError(what, where, f"Give a number that divides {problem}.")
        if any(getattr(layer, "trained_rows", None) is not None for layer in bank.modules()):
            what = f"of this bank only inserted experts are trained, and some processes would have none ({name})"
            raise BraidError(what, where, "Leave it out.")
        for parameter in bank.parameters():
            uses[parameter] = uses.get(parameter, 0) + 1
    if any(count > 1 for count in uses.values()):
        raise BraidError("layers share these experts, which then cannot be spread", where, "Leave it out.")


def spread_banks(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Leave each process its own experts, in the modules that are there; gives the banks."""
    processes, index = mesh["expert"].size(), mesh.get_local_rank("expert")
    banks = list(expert_banks(model))
    for _, part, bank in banks:
        part.compute = "sparse"
        for layer in bank.modules():
            for name, parameter in list(layer.named_parameters(recurse=False)):
                own = parameter.detach().chunk(processes)[index].clone()
                setattr(layer, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
            if isinstance(stack := getattr(layer, "stack", None), int):
                layer.stack = stack // processes  # type: ignore[assignment]
        kind = type(bank)
        bank.__class__ = type(f"Spread{kind.__name__}", (SpreadBank, kind), {})
        bank.mesh = mesh  # type: ignore[assignment]
    return [bank for _, _, bank in banks]
