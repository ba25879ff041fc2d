"""What a checkpoint of the PaPaformer authors is: what its tensors say, and what only a configuration can say."""

import re
from dataclasses import dataclass
from typing import Literal

from braidlm.bridges.checkpoint import Shapes
from braidlm.core.errors import BraidError

SHARED, V1, V2 = "shared_linear", "gumbel_v1", "gumbel_v2"


@dataclass(frozen=True)
class Parallel:
    """The parallel layers, which a path or a dense model does not have."""

    layers: int
    paths: int
    width: int
    hidden: int
    join: str


@dataclass(frozen=True)
class Form:
    """The sizes of a model, all of which its tensors show."""

    vocab_size: int
    width: int
    hidden: int
    """Inner size of the feed-forward."""
    blocks: int
    """Blocks of the full width."""
    parallel: Parallel | None

    @property
    def subject(self) -> str:
        """The model in words."""
        if self.parallel is None:
            return f"a path or dense model of {self.blocks} blocks of width {self.width}"
        layers, paths = self.parallel.layers, self.parallel.paths
        return f"a PaPaformer of {layers} parallel layers with {paths} paths, joined by {self.parallel.join}"


@dataclass(frozen=True)
class Options:
    """The authors' options, all of which may be left out but the numbers of heads; the rest is checked or usual."""

    vocab_size: int | None = None
    pad_id: int | None = None
    dim: int | None = None
    n_heads: int | None = None
    n_layers: int | None = None
    """Blocks of a path or dense model."""
    path_dim: int | None = None
    path_heads: int | None = None
    parallel_layers: int | None = None
    paths: int | None = None
    ffn_multiplier: float | None = None
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_style: Literal["interleaved pairs"] = "interleaved pairs"
    attention_output_projection: bool = False

    def __post_init__(self) -> None:
        for name in ("n_heads", "path_heads", "rms_eps", "rope_theta"):  # other sizes are compared with the tensors
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise BraidError(f"{name} must be above 0, got {value:g}")
        if self.attention_output_projection:
            raise BraidError("attention_output_projection is true; PaPaformer's attention has none")


def read_form(shapes: Shapes) -> Form:
    """The form that a model's tensors have; whether all of them are there is not checked here."""
    vocab_size, width = _matrix(shapes, "embeddings.weight")
    hidden, _ = _matrix(shapes, "layers.0.block.feedforward.linear1.weight")
    blocks = len(_numbers(shapes, r"layers\.(\d+)\.block\."))
    return Form(vocab_size, width, hidden, blocks, _read_parallel(shapes))


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


def contradictions(options: Options, form: Form) -> list[str]:
    """Where a configuration says something else than the tensors."""
    said: dict[str, int | None] = {"vocab_size": form.vocab_size}
    parallel = form.parallel
    if parallel is not None:
        said |= {"dim": form.width, "path_dim": parallel.width, "n_layers": None}
        said |= {"parallel_layers": parallel.layers, "paths": parallel.paths}
    elif not is_path(options, form):
        said |= {"dim": form.width, "path_dim": form.width, "parallel_layers": None, "paths": None}
    if parallel is None:
        said["n_layers"] = form.blocks
    problems = []
    for name, size in said.items():
        given = getattr(options, name)
        if given is not None and given != size:
            tensors = f"are those of {form.subject}" if size is None else f"say {size}"
            problems.append(f"{name} is {given}, the tensors {tensors}")
    problems += _feed_problems(options, form.width, form.hidden)
    if parallel is not None:
        problems += _feed_problems(options, parallel.width, parallel.hidden)
    if options.pad_id is not None and not 0 <= options.pad_id < form.vocab_size:
        problems.append(f"pad_id is {options.pad_id}, the embedding has {form.vocab_size} rows")
    return problems


def is_path(options: Options, form: Form) -> bool:
    """Whether the tensors are one path of the model that the configuration describes."""
    return form.parallel is None and options.path_dim == form.width and options.dim != form.width


def read_heads(options: Options, form: Form) -> list[int]:
    """How many heads full blocks and, where there are parallel layers, paths have: no tensor shows it."""
    if form.parallel is None:
        asked = {_name_of_heads(options, form): form.width}
    else:
        asked = {"n_heads": form.width, "path_heads": form.parallel.width}
    heads = {name: getattr(options, name) for name in asked}
    if missing := [name for name, number in heads.items() if number is None]:
        example = ", ".join(f'"{name}": 4' for name in heads)
        raise BraidError(
            f"the tensors do not say how many heads attention has ({' and '.join(missing)})",
            todo=f"Give a JSON file that says it with `--config`: {{{example}}}. In the paper a head has 32 channels.",
        )
    for name, width in asked.items():
        if width % (2 * heads[name]):
            raise BraidError(f"{name} is {heads[name]}: a width of {width} does not divide into heads of an even size")
    return list(heads.values())


def _name_of_heads(options: Options, form: Form) -> str:
    """Which option says the heads of a path or dense model: that of the width it has, else the only one given."""
    if is_path(options, form):
        return "path_heads"
    if options.n_heads is None and options.path_heads is not None:
        return "path_heads"
    widths_tell = options.dim is not None and options.dim != options.path_dim
    if options.path_heads not in (None, options.n_heads) and not widths_tell:
        raise BraidError("n_heads and path_heads differ, and no width says which of them is meant; give one")
    return "n_heads"


def _feed_problems(options: Options, width: int, hidden: int) -> list[str]:
    factor = options.ffn_multiplier
    if factor is None or abs(factor * width - hidden) < 1:  # a fraction is cut to a whole size
        return []
    return [f"ffn_multiplier is {factor:g}, the tensors have {hidden} channels inside for a width of {width}"]


def _numbers(shapes: Shapes, pattern: str) -> set[int]:
    return {int(found[1]) for name in shapes if (found := re.match(pattern, name))}


def _matrix(shapes: Shapes, name: str) -> tuple[int, int]:
    """The two sizes of a tensor without which nothing can be said about a checkpoint."""
    shape = shapes.get(name)
    if shape is None:
        some = ", ".join(list(shapes)[:5])
        raise BraidError(f"this is not a PaPaformer checkpoint: it has no {name}; its tensors are {some}, ...")
    if len(shape) != 2:
        raise BraidError(f"this is not a PaPaformer checkpoint: {name} is {list(shape)}, not a matrix")
    return shape[0], shape[1]
