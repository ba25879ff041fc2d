"""Heads, inner channels and whole blocks of a dense model: how much each adds to the stream, and a model of fewer.

Every block keeps equally many heads and channels, so that blocks stay of one shape, as other formats want them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.edits.account import SOURCE, Account, Part, Transform, from_source, planned
from braidlm.edits.modules import Layer, Measure, Usage, layers_of, stages_of, sums_over_tokens
from braidlm.model.attention.attention import Attention
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.feed.feeds import MLP, GatedFeed
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.braid import OpenedBraid

BLOCKS = "blocks"
"""Where the importance of blocks stands beside that of heads and channels, which stand at the address of their part."""


@dataclass(frozen=True)
class Units:
    """The heads or the channels of one part, which can be left out one by one."""

    kind: str
    """`heads` or `channels`."""
    address: str
    part: Any
    """The attention or feed-forward part, on the meta device."""
    count: int
    together: int = 1
    """How many query heads share keys and values: these stay or go together."""

    def kept(self, importance: Tensor, number: int) -> list[int]:
        """The groups with the most importance, in their order, of which `number` units are made."""
        if number % self.together:
            what = f"{self.together} query heads share each key head here, so that {number} cannot stay"
            raise BraidError(what, self.address, f"Keep a multiple of {self.together}.")
        return sorted(importance.topk(min(number, self.count) // self.together).indices.tolist())

    def change(self, options: dict[str, Any], kept: Sequence[int]) -> None:
        """Write the smaller part into the options of its block."""
        if self.kind == "channels":
            options["feed"]["hidden"] = len(kept)
            return
        own = options["attention"]
        own |= {"heads": len(kept) * self.together, "head_dim": self.part.head_dim}
        own["kv_heads"] = None if own["kv_heads"] is None else len(kept)

    def cut(self, tensor: str, kept: Sequence[int]) -> Transform | None:
        """What is left of a tensor of the model, if it has rows or columns of these units."""
        own = tensor.removeprefix(f"{self.address}.")
        rows = None
        if own in ("qkv.weight", "qkv.bias"):
            groups = self.count // self.together
            keys = [self.count + group for group in kept]
            rows = self._channels([*self._queries(kept), *keys, *(groups + key for key in keys)])
        elif own in ("up.weight", "up.bias", "beta"):
            rows = list(kept)
        elif own in ("gate_up.weight", "gate_up.bias"):
            rows = [*kept, *(self.count + channel for channel in kept)]
        elif own == "out.weight":
            columns = kept if self.kind == "channels" else self._channels(self._queries(kept))
            return Transform(lambda tensor: tensor[:, list(columns)], f"columns of {self._text(kept)}")
        return None if rows is None else Transform(lambda tensor: tensor[rows], f"rows of {self._text(kept)}")

    def _queries(self, kept: Sequence[int]) -> list[int]:
        return [group * self.together + i for group in kept for i in range(self.together)]

    def _channels(self, heads: Sequence[int]) -> list[int]:
        size = self.part.head_dim
        return [head * size + channel for head in heads for channel in range(size)]

    def _text(self, kept: Sequence[int]) -> str:
        if self.kind == "channels":
            return f"{len(kept)} of {self.count} channels"
        return f"heads {', '.join(map(str, self._queries(kept)))} of {self.count}"

    def measure(self, out: Any, inputs: tuple[Any, ...], output: Any) -> Tensor:
        """For each token the norm of what each channel, or group of heads, adds to the stream by the matrix `out`."""
        inner, weight = inputs[0].float(), out.weight.float()
        if self.kind == "channels":
            return inner.abs() * weight.norm(dim=0)
        groups = self.count // self.together
        return torch.stack(
            [(x @ w.T).norm(dim=-1) for x, w in zip(inner.chunk(groups, -1), weight.chunk(groups, 1), strict=True)], -1
        )


def turned(block: Any, inputs: tuple[Any, ...], output: Any) -> Tensor:
    """For each token how far a block turns the stream: the distance of both directions, 0 where it adds nothing."""
    before, after = (x.float() / x.float().norm(dim=-1, keepdim=True) for x in (inputs[0], output[0]))
    return (after - before).norm(dim=-1, keepdim=True)


def units_of(source: OpenedBraid, layer: Layer) -> list[Units]:
    """The heads and channels of a block; parts with experts or of other packages have none that could go."""
    if layer.kind != "block":
        return []
    block: Any = source.info.model.get_submodule(layer.address)
    found = []
    attention: Any = block.attention
    feed: Any = block.feed
    if isinstance(attention, Attention) and attention.out is not None:
        together = attention.heads // attention.kv_heads
        found.append(Units("heads", f"{layer.address}.attention", attention, attention.heads, together))
    if isinstance(feed, (MLP, GatedFeed)):
        found.append(Units("channels", f"{layer.address}.feed", feed, block.feed.out.in_features))
    return found


def measure_importance(source: OpenedBraid, texts: Sequence[Sequence[int]]) -> Usage:
    """How much each head and channel adds to the stream on a text, and how far each block turns it."""
    measures: dict[str, Measure] = {}
    for layer in (one for one in layers_of(source.info) if one.kind == "block"):
        measures[layer.address] = turned
        measures |= {f"{units.address}.out": units.measure for units in units_of(source, layer)}
    found = sums_over_tokens(source.load(dtype=torch.float32), measures, texts, "importance")
    blocks = [found[address] for address, measure in measures.items() if measure is turned]
    parts = {address.removesuffix(".out"): own for address, own in found.items() if address.endswith(".out")}
    return parts | ({BLOCKS: torch.cat(blocks)} if blocks else {})


@dataclass(frozen=True)
class Smaller:
    """A model with fewer heads, channels or blocks."""

    config: BraidConfig
    model: BraidForCausalLM
    account: Account
    details: list[str]
    changes_nothing: bool
    """Whether nothing that goes has added anything."""


def with_fewer(source: OpenedBraid, numbers: dict[str, int], importance: Usage) -> Smaller:
    """A model whose blocks keep so many `heads` and `channels`, and of whose blocks so many (`layers`) stay."""
    every = layers_of(source.info)
    blocks = [layer for layer in every if layer.kind == "block"]
    gone: list[Layer] = []
    lost, details = [], []  # the importance of what goes; lines for the plan
    if (number := numbers.get("layers", len(blocks))) < len(blocks):
        if source.config.decoded.gates is not None:
            raise BraidError("gates are of layers by their numbers, so that no layer can go", source.title, GATES)
        order = importance[BLOCKS].argsort(descending=True, stable=True).tolist()
        gone = [blocks[i] for i in sorted(order[number:])]
        lost += [importance[BLOCKS][i] for i in order[number:]]
        details.append(f"  {number} of {len(blocks)} blocks stay, without {', '.join(one.address for one in gone)}")
    layers = [layer for layer in every if layer not in gone]
    cuts: list[Callable[[str], Transform | None]] = []
    for layer in layers:
        for units in units_of(source, layer):
            if (number := numbers.get(units.kind, units.count)) >= units.count:
                continue
            kept, own = units.kept(importance[units.address], number), importance[units.address]
            cuts.append(lambda tensor, units=units, kept=kept: units.cut(tensor, kept))  # type: ignore[misc]
            units.change(layer.options, kept)
            lost += own[[i for i in range(len(own)) if i not in kept]]
            details.append(f"  {units.address}: {len(kept) * units.together} of {units.count} {units.kind} stay")
    if not details:
        has = "no block has more heads, channels or layers than shall stay"
        raise BraidError(has, source.title, "Keep fewer; `braid show MODEL` says how many there are.")
    stages, addresses = stages_of(layers)
    config = source.config_with(stages=stages)
    model, account = planned(config, addresses)
    for name, origin in account.derived.items():
        tensor = origin.parts[0].tensor
        if cut := next(filter(None, (cut(tensor) for cut in cuts)), None):
            account.origins[name] = from_source(tensor, cut)
    for layer in gone:
        own_tensors = (name for name in source.info.tensors if name.startswith(f"{layer.address}."))
        account.left_out |= {Part(SOURCE, name): "its block goes" for name in own_tensors}
    return Smaller(config, model, account, details, not any(lost))


GATES = "Take the gates away (`braid edit select --keep 0`), or prune the base before it gets gates."
