"""The structure of a PaPaformer checkpoint, from its tensors and, for what they do not show, its configuration."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from braidlm.bridges.bridge import Bridge, OpenedCheckpoint, TensorMapping, bridges, bullet_list
from braidlm.bridges.checkpoint import Checkpoint, Shapes
from braidlm.bridges.model_info import ModelInfo
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.reading import read_json
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.ranges import Count, Epsilon, Heads, Positive
from braidlm.model.config.strict import decode
from braidlm.model.paths.parallel import ParallelLayer, ParallelStage
from braidlm.model.paths.project import ProjectStage

SHARED, V1, V2 = "shared_linear", "gumbel_v1", "gumbel_v2"


@dataclass(frozen=True)
class Parallel:
    """The parallel layers; a path or a dense model has none."""

    layers: int
    paths: int
    width: int
    hidden: int
    join: str


@dataclass(frozen=True)
class Structure:
    """The sizes of a model, all of which its tensors show."""

    vocab_size: int
    width: int
    hidden: int
    """Inner size of the feed-forward."""
    blocks: int
    """Blocks of the full width."""
    parallel: Parallel | None

    @property
    def description(self) -> str:
        """The model in words, for messages."""
        if self.parallel is None:
            return f"a path or dense model of {self.blocks} blocks of width {self.width}"
        layers, paths = self.parallel.layers, self.parallel.paths
        return f"a PaPaformer of {layers} parallel layers with {paths} paths, joined by {self.parallel.join}"


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


def read_structure(shapes: Shapes) -> Structure:
    """The structure that a model's tensors show; whether all of them are there is not checked here."""
    vocab_size, width = _matrix(shapes, "embeddings.weight")
    hidden, _ = _matrix(shapes, "layers.0.block.feedforward.linear1.weight")
    blocks = len(_numbers(shapes, r"layers\.(\d+)\.block\."))
    return Structure(vocab_size, width, hidden, blocks, _read_parallel(shapes))


def _read_parallel(shapes: Shapes) -> Parallel | None:
    layers = _numbers(shapes, r"layers\.(\d+)\.blocks\.")
    if not layers:
        return None
    paths = len(_numbers(shapes, r"layers\.\d+\.blocks\.(\d+)\."))
    hidden, width = _matrix(shapes, "layers.1.blocks.0.feedforward.linear1.weight")
    return Parallel(len(layers), paths, width, hidden, _read_join(shapes, paths, width))


def _read_join(shapes: Shapes, paths: int, width: int) -> str:
    """Shared linear has one matrix; the two Gumbel joins differ in what their router reads."""
    if not any(".MoE." in name for name in shapes):
        return SHARED
    choices, read = _matrix(shapes, "layers.1.MoE.router.weight")
    if paths == 1:
        raise BraidError("with one path the tensors do not tell which Gumbel join this is; Braid imports two or more")
    kinds = {width: V1, paths * width: V2}
    if read not in kinds:
        raise BraidError(
            f"layers.1.MoE.router.weight is {[choices, read]}: it reads neither the combination of the paths ({width} "
            f"channels, Gumbel v1) nor all {paths} paths side by side ({paths * width}, Gumbel v2)"
        )
    return kinds[read]


def contradictions(config: PaPaformerConfig, structure: Structure) -> list[str]:
    """Where a configuration contradicts the tensors."""
    expected: dict[str, int | None] = {"vocab_size": structure.vocab_size}
    parallel = structure.parallel
    if parallel is not None:
        expected |= {"dim": structure.width, "path_dim": parallel.width, "n_layers": None}
        expected |= {"parallel_layers": parallel.layers, "paths": parallel.paths}
    elif not is_path(config, structure):
        expected |= {"dim": structure.width, "path_dim": structure.width, "parallel_layers": None, "paths": None}
    if parallel is None:
        expected["n_layers"] = structure.blocks
    problems = []
    for name, size in expected.items():
        value = getattr(config, name)
        if value is not None and value != size:
            tensors = f"are those of {structure.description}" if size is None else f"say {size}"
            problems.append(f"{name} is {value}, the tensors {tensors}")
    problems += _feed_problems(config, structure.width, structure.hidden)
    if parallel is not None:
        problems += _feed_problems(config, parallel.width, parallel.hidden)
    if config.pad_id is not None and not 0 <= config.pad_id < structure.vocab_size:
        problems.append(f"pad_id is {config.pad_id}, the embedding has {structure.vocab_size} rows")
    return problems


def is_path(config: PaPaformerConfig, structure: Structure) -> bool:
    """Whether the tensors are one path of the model that the configuration describes."""
    return structure.parallel is None and config.path_dim == structure.width and config.dim != structure.width


def read_heads(config: PaPaformerConfig, structure: Structure) -> list[int]:
    """The number of heads of full blocks and, where there are parallel layers, of paths: no tensor shows it."""
    if structure.parallel is None:
        widths = {_heads_key(config, structure): structure.width}
    else:
        widths = {"n_heads": structure.width, "path_heads": structure.parallel.width}
    heads = {name: getattr(config, name) for name in widths}
    if missing := [name for name, number in heads.items() if number is None]:
        example = ", ".join(f'"{name}": 4' for name in heads)
        raise BraidError(
            f"the tensors do not say how many heads attention has ({' and '.join(missing)})",
            todo=f"Give a JSON file that says it with `--config`: {{{example}}}. In the paper a head has 32 channels.",
        )
    for name, width in widths.items():
        if width % (2 * heads[name]):
            raise BraidError(f"{name} is {heads[name]}: a width of {width} does not divide into heads of an even size")
    return list(heads.values())


def _heads_key(config: PaPaformerConfig, structure: Structure) -> str:
    """The option that has the heads of a path or dense model: the one for its width, else the only one that is set."""
    if is_path(config, structure):
        return "path_heads"
    if config.n_heads is None and config.path_heads is not None:
        return "path_heads"
    widths_tell = config.dim is not None and config.dim != config.path_dim
    if config.path_heads not in (None, config.n_heads) and not widths_tell:
        raise BraidError("n_heads and path_heads differ, and no width says which of them is meant; give one")
    return "n_heads"


def _feed_problems(config: PaPaformerConfig, width: int, hidden: int) -> list[str]:
    factor = config.ffn_multiplier
    if factor is None or abs(factor * width - hidden) < 1:  # a fraction is rounded down
        return []
    return [f"ffn_multiplier is {factor:g}, the tensors have {hidden} channels inside for a width of {width}"]


def _numbers(shapes: Shapes, pattern: str) -> set[int]:
    return {int(match[1]) for name in shapes if (match := re.match(pattern, name))}


def _matrix(shapes: Shapes, name: str) -> tuple[int, int]:
    """The two sizes of a matrix that every checkpoint must have."""
    shape = shapes.get(name)
    if shape is None:
        some = ", ".join(list(shapes)[:5])
        raise BraidError(f"this is not a PaPaformer checkpoint: it has no {name}; its tensors are {some}, ...")
    if len(shape) != 2:
        raise BraidError(f"this is not a PaPaformer checkpoint: {name} is {list(shape)}, not a matrix")
    return shape[0], shape[1]


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
