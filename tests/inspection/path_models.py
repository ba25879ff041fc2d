"""Models whose routing is known because it was set by hand."""

from pathlib import Path
from typing import Any

import torch

from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.joins import Join
from tests.tiny_models import tiny_model

TOKENIZER = bytes_tokenizer()
PATHS = ("stories", "maths")


def path_model(join: Any = "gumbel_v1", paths: Any = PATHS, layers: int = 2, **options: Any) -> BraidForCausalLM:
    """A block, `layers` of parallel paths and a block, with weights that make everything matter."""
    paths = list(paths) if isinstance(paths, tuple) else paths
    parallel = {"layers": layers, "paths": paths, "join": join, **options}
    stages = ["block", {"parallel": parallel}, "block"]
    return tiny_model(vocab_size=TOKENIZER.vocab_size, stages=stages, context=64, tie_embeddings=False)


def joins(model: BraidForCausalLM) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Join)]


@torch.no_grad()
def always(model: BraidForCausalLM, *choices: str) -> BraidForCausalLM:
    """Every token takes one choice, for each layer its own."""
    for join, choice in zip(joins(model), choices, strict=True):
        join.router.weight.zero_()
        join.router.bias.zero_()
        join.router.bias[join.choices.index(choice)] = 5.0
    return model


@torch.no_grad()
def by_character(model: BraidForCausalLM) -> BraidForCausalLM:
    """Letters take 'stories', digits 'maths', everything else the combination: each path is a copy of the stream, and
    the router (Gumbel v2) reads the character out of it."""
    for name, parameter in model.named_parameters():
        if name.endswith((".attention.out.weight", ".feed.out.weight")):
            parameter.zero_()
    rows = model.model.embedding.weight
    rows.zero_()
    for token in range(256):
        kind = 0 if chr(token).isascii() and chr(token).isalpha() else 1 if chr(token) in "0123456789" else 2
        rows[token, kind] = 1.0
    for join in joins(model):
        join.router.bias.zero_()
        join.router.weight.zero_()
        join.router.weight[torch.arange(3), torch.arange(3)] = 9.0
        join.combine.weight.zero_()
        join.combine.weight[:, : rows.shape[1]] = torch.eye(rows.shape[1])
        join.combine.bias.zero_()
    return model


@torch.no_grad()
def passing(model: BraidForCausalLM, *paths: str) -> BraidForCausalLM:
    """Shared linear joins that pass one path through, for each layer its own."""
    for join, path in zip(joins(model), paths, strict=True):
        width = join.linear.weight.shape[0]
        join.linear.weight.zero_()
        begin = width * join.names.index(path)
        join.linear.weight[:, begin : begin + width] = torch.eye(width)
    return model


def saved(model: BraidForCausalLM, folder: Path) -> Path:
    return save_model(model, folder, TOKENIZER, {"made_by": "a test"})
