"""PaPaformer as its authors' code saves it: whole models, and the paths and dense models that they are made of."""

import re
from collections.abc import Iterator
from typing import Any

from braidlm.bridges.bridge import Bridge, Link, Opened, bridges, listed
from braidlm.bridges.checkpoint import Checkpoint
from braidlm.bridges.formats.papaformer.form import (
    SHARED,
    Form,
    Options,
    Parallel,
    contradictions,
    read_form,
    read_heads,
)
from braidlm.bridges.locate import Found
from braidlm.bridges.plain import PlainModel
from braidlm.core.errors import BraidError
from braidlm.core.files import read_json
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.strict import decode
from braidlm.model.paths.parallel import ParallelLayer, ParallelStage
from braidlm.model.paths.project import ProjectStage

CONTEXT = 256
"""The paper's; no file says it, and rotary positions have no limit of their own."""
WRAPPERS = r"^(module\.|_orig_mod\.)+"
"""What data parallel training and torch.compile put before every name."""
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
    """A state dict of the authors' names, and a JSON file with their options."""

    title = "PaPaformer"
    in_one_file = True

    def open(self, found: Found) -> Opened:
        checkpoint = Checkpoint(found.place)
        checkpoint.rename(lambda name: re.sub(WRAPPERS, "", name))
        where = str(found.config or found.place)
        options = _read_options(found)
        try:
            form = read_form(checkpoint.shapes)
        except BraidError as error:
            raise BraidError(error.what, str(found.place)) from error
        if problems := contradictions(options, form):
            raise BraidError(
                f"this configuration contradicts the tensors of {found.name}:{listed(problems)}",
                where,
                "Weights and configuration must come from the same model.",
            )
        try:
            heads = read_heads(options, form)
        except BraidError as error:
            raise BraidError(error.what, where, error.todo) from error
        architecture = _architecture(options, form, heads)
        config = BraidConfig(architecture, vocab_size=form.vocab_size, pad_token_id=options.pad_id)
        notes = [f"the files do not say how long texts may be; {CONTEXT} tokens, the paper's length, are written"]
        return Opened(checkpoint, config, form.subject, notes)

    def links(self, plain: PlainModel) -> Iterator[Link]:
        yield Link("model.embedding.weight", ("embeddings.weight",))
        number, joined = 0, False  # the number of their layer, and whether the one before is a parallel one
        for index, stage in enumerate(plain.model.model.stages):
            ours = f"model.stages.{index}"
            if isinstance(stage, ProjectStage):  # to them the end of the layer before
                theirs = JOIN["out"] if joined else JOIN["linear"]
                yield Link(f"{ours}.linear.weight", (f"layers.{number - 1}.{theirs}.weight",))
                continue
            joined = isinstance(stage, ParallelStage)
            for position, layer in enumerate(stage.layers):
                if joined:
                    yield from _parallel_links(layer, f"{ours}.layers.{position}", f"layers.{number}")
                else:
                    yield from _block_links(layer, f"{ours}.layers.{position}", [f"layers.{number}.block"])
                number += 1
        yield Link("model.norm.weight", ("norm.weight",))
        yield Link("head.weight", ("Linear.linear.weight",))


def _read_options(found: Found) -> Options:
    if found.config is None:
        return Options()
    try:
        return decode(Options, read_json(found.config))
    except BraidError as error:
        raise error if error.where else BraidError(error.what, str(found.config)) from error


def _architecture(options: Options, form: Form, heads: list[int]) -> dict[str, Any]:
    stages: list[Any] = [{"block": {"layers": form.blocks}}]
    if form.parallel is not None:
        stages = ["block", {"project": {"to": form.parallel.width}}, *_parallel_stages(form, form.parallel, heads[1])]
        stages += ["block"]
    return {
        "width": form.width,
        "context": CONTEXT,
        "positions": {"kind": "rope", "theta": options.rope_theta, "pairs": "interleaved"},
        "tie_embeddings": False,
        "block": {
            "norm": {"kind": "rms", "eps": options.rms_eps},
            "attention": {"kind": "softmax", "heads": heads[0], "out_projection": False},
            "feed": {"kind": "swiglu", "hidden": form.hidden, "learned_beta": True},
        },
        "stages": stages,
    }


def _parallel_stages(form: Form, parallel: Parallel, heads: int) -> list[Any]:
    options = {
        "layers": parallel.layers,
        "paths": parallel.paths,
        "attention": {"heads": heads},
        "feed": {"hidden": parallel.hidden},
        "join": parallel.join,
        "to": form.width,
    }
    # Their Gumbel models end in a matrix even where no width changes; our joins do not, so it stands alone.
    level = parallel.join != SHARED and parallel.width == form.width
    return [{"parallel": options}, *([{"project": {"to": form.width}}] if level else [])]


def _parallel_links(layer: ParallelLayer, ours: str, theirs: str) -> Iterator[Link]:
    paths = {name: f"{theirs}.blocks.{number}" for number, name in enumerate(layer.names)}
    if layer.stack is not None:
        yield from _block_links(layer.stack[0], f"{ours}.stack.0", list(paths.values()), members=len(paths))
    else:
        for name, path in paths.items():
            yield from _block_links(next(layer.blocks(name)), f"{ours}.paths.{name}.0", [path])
    for our_name, their_name in JOIN.items():
        for kind in ("weight", "bias"):
            yield Link(f"{ours}.join.{our_name}.{kind}", (f"{theirs}.{their_name}.{kind}",))


def _block_links(block: Any, ours: str, theirs: list[str], members: int | None = None) -> Iterator[Link]:
    """Of one block, or of a stack of them with the addresses of theirs in its order."""
    width, hidden = block.attention.heads * block.attention.head_dim, block.feed.beta.shape[-1]
    sizes = {"attention.qkv.weight": (width,) * 3, "feed.gate_up.weight": (hidden,) * 2}
    for our_name, their_names in BLOCK.items():
        foreign = tuple(f"{block_of_theirs}.{name}" for block_of_theirs in theirs for name in their_names)
        as_row = our_name == "feed.beta"
        yield Link(f"{ours}.{our_name}", foreign, sizes.get(our_name, ()), members=members, as_row=as_row)
