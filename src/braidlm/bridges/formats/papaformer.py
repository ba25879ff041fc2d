"""A PaPaformer checkpoint: its structure shows in its tensors and, for what they do not show, in its configuration."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from braidlm.bridges.bridge import Bridge, OpenedCheckpoint, TensorMapping, bridges
from braidlm.bridges.checkpoint import Checkpoint, Shapes
from braidlm.bridges.model_info import ModelInfo
from braidlm.core.differences import bullet_list
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.reading import read_json
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.ranges import Count, Epsilon, Heads, Positive
from braidlm.model.config.strict import decode
from braidlm.model.paths.parallel import ParallelLayer, ParallelStage
from braidlm.model.paths.project import ProjectStage

SHARED, V1, V2 = "shared_linear", "gumbel_v1", "gumbel_v2"
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


@dataclass(frozen=True)
class Parallel:
    """The parallel layers; a path or a dense model has none."""

    layers: int
    paths: int
    width: int
    hidden: int
    join: str


@dataclass(frozen=True)
class PaPaformerConfig:
    """The authors' options. Only the numbers of heads are needed; sizes are checked, and the rest has defaults."""

    vocab_size: Count | None = None
    pad_id: int | None = None
    dim: Count | None = None
    n_heads: Heads | None = None
    n_layers: Count | None = None
    """Blocks of a path or dense model."""
    path_dim: Count | None = None
    path_heads: Heads | None = None
    parallel_layers: Count | None = None
    paths: Count | None = None
    ffn_multiplier: Positive | None = None
    rms_eps: Epsilon = 1e-5
    rope_theta: Positive = 10000.0
    rope_style: Literal["interleaved pairs"] = "interleaved pairs"
    attention_output_projection: bool = False

    def __post_init__(self) -> None:
        if self.attention_output_projection:
            raise BraidError("attention_output_projection is true; PaPaformer's attention has none")


class Structure:
    """The sizes of a model, all of which its tensors show; whether all of them are there is checked by the import."""

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self.vocab_size, self.width = self._matrix("embeddings.weight")
        self.hidden, _ = self._matrix("layers.0.block.feedforward.linear1.weight")
        """Inner size of the feed-forward."""
        self.blocks = self._count(r"layers\.(\d+)\.block\.")
        """Blocks of the full width."""
        self.parallel: Parallel | None = None
        if layers := self._count(r"layers\.(\d+)\.blocks\."):
            paths = self._count(r"layers\.\d+\.blocks\.(\d+)\.")
            hidden, width = self._matrix("layers.1.blocks.0.feedforward.linear1.weight")
            self.parallel = Parallel(layers, paths, width, hidden, self._join(paths, width))

    @property
    def description(self) -> str:
        """The model in words, for messages."""
        if self.parallel is None:
            return f"a path or dense model of {self.blocks} blocks of width {self.width}"
        layers, paths = self.parallel.layers, self.parallel.paths
        return f"a PaPaformer of {layers} parallel layers with {paths} paths, joined by {self.parallel.join}"

    def _count(self, pattern: str) -> int:
        return len({match[1] for name in self.shapes if (match := re.match(pattern, name))})

    def _matrix(self, name: str) -> tuple[int, int]:
        """The two sizes of a matrix that every checkpoint must have."""
        shape = self.shapes.get(name)
        if shape is None:
            some = ", ".join(list(self.shapes)[:5])
            raise BraidError(f"this is not a PaPaformer checkpoint: it has no {name}; its tensors are {some}, ...")
        if len(shape) != 2:
            raise BraidError(f"this is not a PaPaformer checkpoint: {name} is {list(shape)}, not a matrix")
        return shape[0], shape[1]

    def _join(self, paths: int, width: int) -> str:
        """Shared linear has one matrix; the two Gumbel joins differ in what their router reads."""
        if not any(".MoE." in name for name in self.shapes):
            return SHARED
        choices, read = self._matrix("layers.1.MoE.router.weight")
        if paths == 1:
            what = "with one path the tensors do not tell which Gumbel join this is; Braid imports two or more"
            raise BraidError(what)
        if read in (kinds := {width: V1, paths * width: V2}):
            return kinds[read]
        raise BraidError(
            f"layers.1.MoE.router.weight is {[choices, read]}: it reads neither the combination of the paths "
            f"({width} channels, Gumbel v1) nor all {paths} paths side by side ({paths * width}, Gumbel v2)"
        )

    def is_path_of(self, config: PaPaformerConfig) -> bool:
        """Whether the tensors are one path of the model that the configuration describes."""
        return self.parallel is None and config.path_dim == self.width and config.dim != self.width

    def contradictions(self, config: PaPaformerConfig) -> list[str]:
        """Where a configuration contradicts the tensors."""
        expected: dict[str, int | None] = {"vocab_size": self.vocab_size}
        feeds = [(self.width, self.hidden)]
        if (parallel := self.parallel) is not None:
            expected |= {"dim": self.width, "path_dim": parallel.width, "n_layers": None}
            expected |= {"parallel_layers": parallel.layers, "paths": parallel.paths}
            feeds.append((parallel.width, parallel.hidden))
        elif not self.is_path_of(config):
            expected |= {"dim": self.width, "path_dim": self.width, "parallel_layers": None, "paths": None}
        if parallel is None:
            expected["n_layers"] = self.blocks
        problems = []
        for name, size in expected.items():
            if (value := getattr(config, name)) not in (None, size):
                tensors = f"are those of {self.description}" if size is None else f"say {size}"
                problems.append(f"{name} is {value}, the tensors {tensors}")
        factor = config.ffn_multiplier
        problems += [
            f"ffn_multiplier is {factor:g}, the tensors have {hidden} channels inside for a width of {width}"
            for width, hidden in feeds
            if factor is not None and abs(factor * width - hidden) >= 1  # a fraction is rounded down
        ]
        if config.pad_id is not None and not 0 <= config.pad_id < self.vocab_size:
            problems.append(f"pad_id is {config.pad_id}, the embedding has {self.vocab_size} rows")
        return problems

    def heads(self, config: PaPaformerConfig) -> list[int]:
        """The number of heads of full blocks and, where there are parallel layers, of paths: no tensor shows it."""
        if self.parallel is None:
            widths = {self._heads_key(config): self.width}
        else:
            widths = {"n_heads": self.width, "path_heads": self.parallel.width}
        heads = {name: getattr(config, name) for name in widths}
        if missing := [name for name, number in heads.items() if number is None]:
            example = ", ".join(f'"{name}": 4' for name in heads)
            what = f"the tensors do not say how many heads attention has ({' and '.join(missing)})"
            todo = f"Say it in a JSON file, `--config`: {{{example}}}. In the paper a head has 32 channels."
            raise BraidError(what, todo=todo)
        for name, width in widths.items():
            if width % (2 * heads[name]):
                divided = f"a width of {width} does not divide into heads of an even size"
                raise BraidError(f"{name} is {heads[name]}: {divided}")
        return list(heads.values())

    def _heads_key(self, config: PaPaformerConfig) -> str:
        """The option that has the heads of a path or dense model: the one for its width, else the only one set."""
        if self.is_path_of(config) or (config.n_heads is None and config.path_heads is not None):
            return "path_heads"
        if config.path_heads not in (None, config.n_heads) and config.dim in (None, config.path_dim):
            raise BraidError("n_heads and path_heads differ, and no width says which of them is meant; give one")
        return "n_heads"

    def stages(self, heads: list[int]) -> list[Any]:
        """Our stages for the model."""
        if (parallel := self.parallel) is None:
            return [{"block": {"layers": self.blocks}}]
        options = {"layers": parallel.layers, "paths": parallel.paths, "join": parallel.join, "to": self.width}
        options |= {"attention": {"heads": heads[1]}, "feed": {"hidden": parallel.hidden}}
        # Their Gumbel models end in a matrix even where no width changes; our joins do not: it is a stage of its own.
        extra = parallel.join != SHARED and parallel.width == self.width
        grow = [{"project": {"to": self.width}}] if extra else []
        return ["block", {"project": {"to": parallel.width}}, {"parallel": options}, *grow, "block"]


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
        with errors_at(where):
            config: PaPaformerConfig = decode(PaPaformerConfig, read_json(config_file) if config_file else {})
        with errors_at(str(path)):
            structure = Structure(checkpoint.shapes)
        if problems := structure.contradictions(config):
            what = f"this configuration contradicts the tensors of {path.name}:{bullet_list(problems)}"
            raise BraidError(what, where, "Weights and configuration must come from the same model.")
        with errors_at(where):
            heads = structure.heads(config)
        architecture = {
            "width": structure.width,
            "context": CONTEXT,
            "positions": {"kind": "rope", "theta": config.rope_theta, "pairs": "interleaved"},
            "tie_embeddings": False,
            "block": {
                "norm": {"kind": "rms", "eps": config.rms_eps},
                "attention": {"kind": "softmax", "heads": heads[0], "out_projection": False},
                "feed": {"kind": "swiglu", "hidden": structure.hidden, "learned_beta": True},
            },
            "stages": structure.stages(heads),
        }
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
