"""PaPaformer as its authors' code saves it: whole models, and the paths and dense models that they are made of."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from braidlm.bridges.bridge import Bridge, OpenedCheckpoint, TensorMapping, bridges, bullet_list
from braidlm.bridges.checkpoint import Checkpoint
from braidlm.bridges.formats.papaformer.structure import (
    SHARED,
    PaPaformerConfig,
    Parallel,
    Structure,
    contradictions,
    read_heads,
    read_structure,
)
from braidlm.bridges.model_info import ModelInfo
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.reading import read_json
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.strict import decode
from braidlm.model.paths.parallel import ParallelLayer, ParallelStage
from braidlm.model.paths.project import ProjectStage

CONTEXT = 256
"""The paper's context; no file states it, and rotary positions have no limit."""
WRAPPERS = r"^(module\.|_orig_mod\.)+"
"""Prefixes that data parallel training and torch.compile add to every name."""
BLOCK = {
    "attention_norm.weight": ("norm_1.weight",),
    "attention.qkv.weight": tuple(f"attention.{letter}.linear.weight" for letter in "QKV"),
    "feed_norm.weight": ("norm_2.weight",),
    "feed.gate_up.weight": ("feedforward.linear1.weight", "feedforward.linear2.weight"),
    "feed.beta": ("feedforward.beta",),
    "feed.out.weight": ("feedforward.linear3.weight",),
}
"""Tensors of our block and of theirs."""
JOIN = {"linear": "Share.linear", "combine": "MoE.share_linear", "router": "MoE.router", "out": "out_linear.linear"}
"""Matrices of our joins and of their connection blocks."""


@bridges.register("papaformer")
class PaPaformerBridge(Bridge):
    """A state dict with the authors' names, and a JSON file with their options."""

    title = "PaPaformer"
    single_file = True
    folder = False

    def open(self, path: Path, config_file: Path | None = None) -> OpenedCheckpoint:
        checkpoint = Checkpoint(path)
        checkpoint.rename(lambda name: re.sub(WRAPPERS, "", name))
        where = str(config_file or path)
        config = _read_config(config_file)
        with errors_at(str(path)):
            structure = read_structure(checkpoint.shapes)
        if problems := contradictions(config, structure):
            raise BraidError(
                f"this configuration contradicts the tensors of {path.name}:{bullet_list(problems)}",
                where,
                "Weights and configuration must come from the same model.",
            )
        with errors_at(where):
            heads = read_heads(config, structure)
        architecture = _architecture(config, structure, heads)
        ours = BraidConfig(architecture, vocab_size=structure.vocab_size, pad_token_id=config.pad_id)
        notes = [f"the files do not say how long texts may be; {CONTEXT} tokens, the paper's length, are written"]
        return OpenedCheckpoint(checkpoint, ours, structure.description, notes)

    def mappings(self, info: ModelInfo) -> Iterator[TensorMapping]:
        yield TensorMapping("model.embedding.weight", ("embeddings.weight",))
        number, parallel = 0, False  # the index of their layer, and whether the last blocks were parallel ones
        for index, stage in enumerate(info.model.model.stages):
            ours = f"model.stages.{index}"
            if isinstance(stage, ProjectStage):  # in their models a part of the layer before
                theirs = JOIN["out"] if parallel else JOIN["linear"]
                yield TensorMapping(f"{ours}.linear.weight", (f"layers.{number - 1}.{theirs}.weight",))
                continue
            parallel = isinstance(stage, ParallelStage)
            for position, layer in enumerate(stage.layers):
                if parallel:
                    yield from _parallel_mappings(layer, f"{ours}.layers.{position}", f"layers.{number}")
                else:
                    yield from _block_mappings(layer, f"{ours}.layers.{position}", [f"layers.{number}.block"])
                number += 1
        yield TensorMapping("model.norm.weight", ("norm.weight",))
        yield TensorMapping("head.weight", ("Linear.linear.weight",))


def _read_config(config_file: Path | None) -> PaPaformerConfig:
    if config_file is None:
        return PaPaformerConfig()
    try:
        return decode(PaPaformerConfig, read_json(config_file))
    except BraidError as error:
        raise error if error.where else BraidError(error.what, str(config_file)) from error


def _architecture(config: PaPaformerConfig, structure: Structure, heads: list[int]) -> dict[str, Any]:
    stages: list[Any] = [{"block": {"layers": structure.blocks}}]
    if structure.parallel is not None:
        stages = [
            "block",
            {"project": {"to": structure.parallel.width}},
            *_parallel_stages(structure, structure.parallel, heads[1]),
        ]
        stages += ["block"]
    return {
        "width": structure.width,
        "context": CONTEXT,
        "positions": {"kind": "rope", "theta": config.rope_theta, "pairs": "interleaved"},
        "tie_embeddings": False,
        "block": {
            "norm": {"kind": "rms", "eps": config.rms_eps},
            "attention": {"kind": "softmax", "heads": heads[0], "out_projection": False},
            "feed": {"kind": "swiglu", "hidden": structure.hidden, "learned_beta": True},
        },
        "stages": stages,
    }


def _parallel_stages(structure: Structure, parallel: Parallel, heads: int) -> list[Any]:
    options = {
        "layers": parallel.layers,
        "paths": parallel.paths,
        "attention": {"heads": heads},
        "feed": {"hidden": parallel.hidden},
        "join": parallel.join,
        "to": structure.width,
    }
    # Their Gumbel models end in a matrix even where no width changes; our joins do not, so it is a stage of its own.
    extra = parallel.join != SHARED and parallel.width == structure.width
    return [{"parallel": options}, *([{"project": {"to": structure.width}}] if extra else [])]


def _parallel_mappings(layer: ParallelLayer, ours: str, theirs: str) -> Iterator[TensorMapping]:
    paths = {name: f"{theirs}.blocks.{number}" for number, name in enumerate(layer.names)}
    if layer.stack is not None:
        yield from _block_mappings(layer.stack[0], f"{ours}.stack.0", list(paths.values()), stacked=len(paths))
    else:
        for name, path in paths.items():
            yield from _block_mappings(next(layer.blocks(name)), f"{ours}.paths.{name}.0", [path])
    for our_name, their_name in JOIN.items():
        for kind in ("weight", "bias"):
            yield TensorMapping(f"{ours}.join.{our_name}.{kind}", (f"{theirs}.{their_name}.{kind}",))


def _block_mappings(block: Any, ours: str, theirs: list[str], stacked: int | None = None) -> Iterator[TensorMapping]:
    """The mappings of one block, or of a stack of blocks given by their names in its order."""
    width, hidden = block.attention.heads * block.attention.head_dim, block.feed.beta.shape[-1]
    sizes = {"attention.qkv.weight": (width,) * 3, "feed.gate_up.weight": (hidden,) * 2}
    for our_name, their_names in BLOCK.items():
        foreign = tuple(f"{block_name}.{name}" for block_name in theirs for name in their_names)
        as_row = our_name == "feed.beta"
        yield TensorMapping(f"{ours}.{our_name}", foreign, sizes.get(our_name, ()), stacked=stacked, as_row=as_row)
