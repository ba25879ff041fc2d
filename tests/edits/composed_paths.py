"""Tiny models to compose, and joins that are set to pass one path through."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.core.models.folders import load_model, save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.joins import GumbelJoin, SameWidthJoin, SharedLinear
from braidlm.model.paths.parallel import ParallelLayer, ParallelStage
from braidlm.model.routing.stacked import StackedLinear
from tests.tiny_models import tiny_model

TOKENIZER = bytes_tokenizer()
VOCABULARY = TOKENIZER.vocab_size
JOINS = ("shared_linear", "concat", "add", "gumbel_v1", "gumbel_v2")
GPT2 = {
    "positions": "learned",
    "tie_embeddings": True,
    "block": {
        "norm": "layer",
        "attention": {"heads": 4, "bias": True},
        "feed": {"kind": "mlp", "hidden": 40, "bias": True, "activation": "gelu_new"},
    },
}
PAPAFORMER = {
    "positions": {"kind": "rope", "pairs": "interleaved"},
    "tie_embeddings": False,
    "block": {
        "attention": {"heads": 4, "out_projection": False},
        "feed": {"kind": "swiglu", "hidden": 40, "learned_beta": True},
    },
}
EXPERTS = {
    "block": {
        "feed": {
            "kind": "swiglu",
            "hidden": 8,
            "experts": {"names": 3, "shared": 8, "router": {"losses": {"switch": 0.1}}},
        }
    }
}
ATTENTION_EXPERTS = {"block": {"attention": {"heads": 2, "experts": 3}}}
MODULES = {"block": {"attention": {"heads": 2, "experts": {"names": 3, "keys": "shared"}}, **EXPERTS["block"]}}

RECIPE: dict[str, Any] = {
    "seed": 3,
    "model": {
        "width": 16,
        "context": 32,
        "block": {"attention": {"heads": 2}, "feed": {"kind": "swiglu", "hidden": 24}},
        "stages": [{"block": {"layers": 2}}],
    },
    "training": {"budget": "6 steps", "batch": 4, "optimizer": {"lr": 1e-2}},
    "checkpoints": {"every": "2 steps"},
    "validation": {"every": "6 steps", "tokens": 500},
    "log": {"every": 2},
}
"""Of a path; a run takes a second."""


def blocks(count: int) -> dict[str, Any]:
    """So many blocks."""
    return {"stages": [{"block": {"layers": count}}]}


def saved_path(folder: Path, seed: int = 0, **architecture: Any) -> Path:
    """A random model of blocks as a folder, with a lineage as training leaves it."""
    model = tiny_model(seed=seed, **{"vocab_size": VOCABULARY, **architecture})
    lineage = {
        "made_by": "braid train",
        "recipe_sha256": f"hash-{seed}",
        "training": {"steps": seed + 1},
        "sources": [{"data": folder.name}],
    }
    return save_model(model, folder, TOKENIZER, lineage)


def double(folder: Path) -> BraidForCausalLM:
    """A model in double precision, so that what is left of a difference is rounding."""
    return load_model(folder).double()


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(3))


def parallel_stage(model: BraidForCausalLM) -> ParallelStage:
    return next(stage for stage in model.model.stages if isinstance(stage, ParallelStage))


@torch.no_grad()
def embedded(model: BraidForCausalLM) -> Tensor:
    """What the first stage reads."""
    hidden = model.model.embedding(ids())
    return model.model.positions.embed(hidden, model.model.span(hidden).positions)


@torch.no_grad()
def block_outputs(model: BraidForCausalLM) -> list[Tensor]:
    """What the first block reads, and what each block makes of it."""
    found = [embedded(model)]
    span = model.model.span(found[0])
    for stage in model.model.stages:
        for block in stage.layers:
            found.append(block(found[-1], span)[0])
    return found


def own_part(layer: ParallelLayer, name: str) -> slice:
    """Where a path stands among all side by side."""
    index = layer.names.index(name)
    before = sum(layer.widths[:index])
    return slice(before, before + layer.widths[index])


def seen(hidden: Tensor, layer: ParallelLayer, name: str) -> Tensor:
    """A path's share of a stream that is as wide as it, or as all of them."""
    width = layer.widths[layer.names.index(name)]
    return hidden if hidden.shape[-1] == width else hidden[..., own_part(layer, name)]


@torch.no_grad()
def pass_through(layer: ParallelLayer, name: str) -> None:
    """Set projections and join of a layer so that one path reads its part of the stream and is all that comes out."""
    own, index = own_part(layer, name), layer.names.index(name)
    identity = torch.eye(layer.widths[index], dtype=torch.float64)
    if isinstance(layer.enter, StackedLinear):
        layer.enter.weight[index].zero_()[own] = identity
    elif layer.enter is not None and name in layer.enter:
        layer.enter[name].weight.zero_()[:, own] = identity
    join = layer.join
    if isinstance(join, SharedLinear):
        _select(join.linear, own, own)
    if isinstance(join, SameWidthJoin):
        if name in join.leave:
            _select(join.leave[name], own, slice(None))
        if join.out is not None:
            _select(join.out, own, slice(None))
    if isinstance(join, GumbelJoin):
        join.router.weight.zero_()
        join.router.bias.zero_()[index] = 100.0


def _select(linear: nn.Linear, rows: slice, columns: slice) -> None:
    """Zero but for an identity in these columns, in these rows where there are more rows than the identity has."""
    size = rows.stop - rows.start
    wide = linear.weight.shape[0] > size
    linear.weight.zero_()[rows if wide else slice(None), columns] = torch.eye(size, dtype=torch.float64)
