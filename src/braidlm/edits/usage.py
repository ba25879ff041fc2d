"""How much each module is used on a text: how often it is chosen, or how much it adds to the stream."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from braidlm.core import console
from braidlm.edits.modules import Modules
from braidlm.model.modeling_braid import BraidForCausalLM

Criterion = Literal["frequency", "output_norm"]
Usage = dict[str, Tensor]
"""By a routed part's address, a number for each of its modules."""


@torch.no_grad()
def measure_usage(
    model: BraidForCausalLM,
    modules: Sequence[Modules],
    texts: Sequence[Sequence[int]],
    criterion: Criterion,
    batch: int = 8,
) -> Usage:
    """The sum over all tokens of how often a module was chosen, or of its weight times the norm of its output."""
    usage = {one.address: torch.zeros(len(one.names), dtype=torch.float64) for one in modules}
    size = model.config.max_position_embeddings
    windows = sorted((text[at : at + size] for text in texts for at in range(0, len(text), size)), key=len)
    recorded = _recorded(model, modules, usage, criterion)
    with recorded as real, console.progress("use of modules", len(windows), "texts") as advance:
        for begin in range(0, len(windows), batch):
            rows = windows[begin : begin + batch]
            length = max(map(len, rows))
            ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
            real[:] = [torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])]
            model.model(ids, attention_mask=real[0], use_cache=False)
            advance(min(begin + batch, len(windows)), "")
    return usage


@contextmanager
def _recorded(
    model: nn.Module, modules: Sequence[Modules], usage: Usage, criterion: Criterion
) -> Iterator[list[Tensor]]:
    """Let each routed part add to the usage when it runs; the list holds the mask of real tokens."""
    real: list[Tensor] = []
    handles = []
    for one in modules:
        part: Any = model.get_submodule(one.address)

        def add(part: Any, inputs: tuple[Any, ...], output: Any, address: str = one.address) -> None:
            routing = output[1][0]
            if criterion == "frequency":
                used = torch.zeros_like(routing.probabilities_BTN).scatter(-1, routing.chosen_BTK, 1.0)
            else:
                used = routing.weights_BTN * part.expert_outputs(*inputs).float().norm(dim=-1).permute(1, 2, 0)
            usage[address] += (used * real[0][..., None]).sum((0, 1)).double()

        handles.append(part.register_forward_hook(add))
    try:
        yield real
    finally:
        for handle in handles:
            handle.remove()
