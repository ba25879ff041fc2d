"""The architecture of a composed model: PaPaformer's layout, for any number of paths of any widths and depths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.edits.composing.path_models import (
    APART,
    PathShape,
    Section,
    aligned_sections,
    averaged_ends,
    averages,
    composed_end,
)
from braidlm.edits.modules import PARTS
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import encode
from braidlm.model.heads.ends import embeddings, heads
from braidlm.model.paths.joins import joins


@dataclass(frozen=True)
class Layout:
    """The architecture of the composed model."""

    architecture: dict[str, Any]
    layers: int
    notes: list[str]
    """How choices were made that the models and options left open."""


def lay_out(paths: Sequence[PathShape], join: Choice, layers: int | None, blocks: int) -> Layout:
    """Full-width blocks, the paths in parallel layers between them, and projections between their widths.

    Models that are averaged have the paths alone, and a norm and a head for each.
    """
    if join.kind in averages:
        apart = lay_out(paths, APART, layers, blocks=0)
        how = averages[join.kind].how
        note = f"{join.kind}: the models stay as they are, and the probabilities that they give are {how}"
        return replace(apart, architecture=apart.architecture | averaged_ends(paths, join), notes=[note, *apart.notes])
    width, widest = sum(path.width for path in paths), max(paths, key=lambda path: path.width)
    notes: list[str] = []
    full_width = []
    if blocks:
        options, note = full_width_block(widest, width)
        full_width = [{"block": {**options, "layers": blocks}}]
        notes.append(f"full-width blocks are like those of '{widest.name}': {note}")
    inner: list[dict[str, Any]] = []
    for sections in aligned_sections(paths):
        depth = min(len(section.blocks) for section in sections) if layers is None else layers
        stages, inner_notes = _parallel(paths, sections, join, depth, width)
        inner += stages
    whole, parts = widest.architecture, [path.architecture for path in paths]
    architecture = {
        "width": width,
        "context": min(part.context for part in parts),
        "positions": encode(whole.positions),
        "norm": encode(whole.norm),
        "embedding": encode(composed_end(embeddings, [part.embedding for part in parts])),
        "head": encode(composed_end(heads, [part.head for part in parts])),
        "tie_embeddings": all(part.tie_embeddings for part in parts),
        "dropout": encode(whole.dropout),
        "initialisation": encode(whole.initialisation),
        "stages": [*full_width, *inner, *full_width],
    }
    depth = sum(stage["parallel"]["layers"] for stage in inner if "parallel" in stage)
    return Layout(architecture, depth, notes + inner_notes + _notes(paths, architecture))


def _parallel(
    paths: Sequence[PathShape], sections: Sequence[Section], join: Choice, layers: int, width: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The parallel stage of a section of each path, and the projections before and after it.

    Paths of one width read a stream of that width; otherwise, and where each reads its own part, it keeps its width.
    """
    stage: dict[str, Any] = {
        "layers": layers,
        "join": encode(join),
        "stacked": "with_experts" if any(map(_has_experts, sections)) else True,
        "paths": [
            {"name": path.name, "width": path.width, "depth": len(section.blocks), **section.options}
            for path, section in zip(paths, sections, strict=True)
        ],
    }
    narrow = paths[0].width
    if joins[join.kind].keeps_paths_separate:
        return [{"parallel": stage}], [f"{join.kind}: each path reads and writes its own part of the stream"]
    if any(path.width != narrow for path in paths):
        note = f"the paths have different widths: each reads the stream of {width} through a projection of its own"
        return [{"parallel": stage}], [note]
    project = {"project": {"to": narrow}}
    if join.options.residual:  # a residual needs one width, so the last layer cannot widen the stream
        note = f"the join has a residual, so that a projection after the last layer grows the stream to {width}"
        return [project, {"parallel": stage}, {"project": {"to": width}}], [note]
    return [project, {"parallel": {**stage, "to": width}}], []


def _has_experts(section: Section) -> bool:
    return any(section.options[part].get("experts") is not None for part in PARTS)  # dropout has a rate of that name


def full_width_block(path: PathShape, width: int) -> tuple[dict[str, Any], str]:
    """A path's block at another width, with more heads of the same size; and a description of it."""
    options = {key: dict(value) for key, value in path.options.items()}
    attention, feed = options["attention"], options["feed"]
    remarks = []
    if "heads" in attention and "head_dim" in attention:
        rotary = path.architecture.positions.kind == "rope"
        heads, size = _heads(attention, path.width, width, even=rotary)
        if size != attention["head_dim"]:
            remarks.append(f"{width} does not divide into heads of {attention['head_dim']}, so they are of {size}")
        elif heads * path.width != attention["heads"] * width:
            remarks.append(f"which is nearest to {attention['heads'] * width / path.width:.1f}")
        if attention.get("kv_heads") is not None:
            shared = attention["heads"] // attention["kv_heads"]
            attention["kv_heads"] = min(_divisors(heads), key=lambda kv: (abs(kv - heads / shared), -kv))
        attention |= {"heads": heads, "head_dim": size}
        remarks.insert(0, f"{heads} heads of {size}")
    if feed.get("hidden") is not None:
        feed["hidden"] = max(1, round(feed["hidden"] * width / path.width))
        remarks.append(f"inner size {feed['hidden']}")
    return options, ", ".join(remarks) or "with the same options"


def _heads(attention: dict[str, Any], before: int, width: int, even: bool) -> tuple[int, int]:
    """The number of heads, scaled with the width, and their size.

    Without an output projection the sizes of the heads must add up to the width.
    """
    size = attention["head_dim"]
    if attention.get("out_projection", True):
        return max(1, round(attention["heads"] * width / before)), size
    sizes = [each for each in _divisors(width) if not (even and each % 2)]
    if not sizes:
        raise BraidError(
            f"a width of {width} does not divide into heads of an even size, which rotary positions need",
            todo="Compose without full-width blocks: `--blocks 0`.",
        )
    nearest = min(sizes, key=lambda each: (abs(each - size), -each))
    return width // nearest, nearest


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _notes(paths: Sequence[PathShape], architecture: dict[str, Any]) -> list[str]:
    notes = []
    contexts = {path.name: path.architecture.context for path in paths}
    if len(set(contexts.values())) > 1:
        each = ", ".join(f"'{name}' has {context}" for name, context in contexts.items())
        notes.append(f"the shorter context counts, {architecture['context']} tokens: {each}")
    sharing = [path.name for path in paths if path.plain.copied_weights()]
    if sharing:
        notes.append(f"layers of {', '.join(sharing)} share weights; here each has a copy of its own")
    tied = [path.name for path in paths if path.architecture.tie_embeddings]
    if tied and not architecture["tie_embeddings"]:
        notes.append(f"the head is not tied, since not every path's is; of {', '.join(tied)} it takes the embedding")
    return notes
