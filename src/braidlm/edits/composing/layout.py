"""The architecture of a composed model: PaPaformer's layout, for any number of paths of any widths and depths."""

from collections.abc import Sequence
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.edits.composing.path_models import (
    APART,
    PathModel,
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


def lay_out(
    paths: Sequence[PathModel], join: Choice, layers: int | None, blocks: int
) -> tuple[dict[str, Any], list[str]]:
    """An architecture, and how choices were made that the models and options left open: full-width blocks, the paths in
    parallel layers between them, and projections between their widths. Models that are averaged have the paths alone,
    and a norm and a head for each."""
    if join.kind in averages:
        architecture, notes = lay_out(paths, APART, layers, blocks=0)
        how = averages[join.kind].how
        note = f"{join.kind}: the models stay as they are, and the probabilities that they give are {how}"
        return architecture | averaged_ends(paths, join), [note, *notes]
    width, widest = sum(path.width for path in paths), max(paths, key=lambda path: path.width)
    full_width, inner, notes = [], [], []
    if blocks:
        options, note = full_width_block(widest, width)
        full_width = [{"block": {**options, "layers": blocks}}]
        notes.append(f"full-width blocks are like those of '{widest.name}': {note}")
    for sections in aligned_sections(paths):
        here = min(len(section.blocks) for section in sections) if layers is None else layers
        stages, inner_notes = _parallel(paths, sections, join, here, width)
        inner += stages
    whole, parts = widest.architecture, [path.architecture for path in paths]
    contexts = {path.name: path.architecture.context for path in paths}
    context = min(contexts.values())
    tied = [path.name for path in paths if path.architecture.tie_embeddings]
    architecture = {
        "width": width,
        "context": context,
        "positions": encode(whole.positions),
        "norm": encode(whole.norm),
        "embedding": encode(composed_end(embeddings, [part.embedding for part in parts])),
        "head": encode(composed_end(heads, [part.head for part in parts])),
        "tie_embeddings": len(tied) == len(paths),
        "dropout": encode(whole.dropout),
        "initialisation": encode(whole.initialisation),
        "stages": [*full_width, *inner, *full_width],
    }
    notes += inner_notes
    if len(set(contexts.values())) > 1:
        each = ", ".join(f"'{name}' has {own}" for name, own in contexts.items())
        notes.append(f"the shorter context counts, {context} tokens: {each}")
    if sharing := ", ".join(path.name for path in paths if path.plain.copied_weights()):
        notes.append(f"layers of {sharing} share weights; here each has a copy of its own")
    if 0 < len(tied) < len(paths):
        notes.append(f"the head is not tied, since not every path's is; of {', '.join(tied)} it takes the embedding")
    return architecture, notes


def _parallel(
    paths: Sequence[PathModel], sections: Sequence[Section], join: Choice, layers: int, width: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The parallel stage of a section of each path, and the projections before and after it. Paths of one width read a
    stream of that width; otherwise, and where each reads its own part, it keeps its width."""
    experts = [section.options[part].get("experts") for section in sections for part in PARTS]
    stage: dict[str, Any] = {
        "layers": layers,
        "join": encode(join),
        "stacked": True if experts == [None] * len(experts) else "with_experts",
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


def full_width_block(path: PathModel, width: int) -> tuple[dict[str, Any], str]:
    """A path's block at another width, with more heads of the same size; and a description of it."""
    (section,) = path.sections
    options = {key: dict(value) for key, value in section.options.items()}
    attention, feed = options["attention"], options["feed"]
    remarks = []
    if "heads" in attention and "head_dim" in attention:
        before, size = attention["heads"], attention["head_dim"]
        heads = max(1, round(before * width / path.width))
        if not attention.get("out_projection", True):  # the sizes of the heads must add up to the width
            even = path.architecture.positions.kind == "rope"
            sizes = [each for each in _divisors(width) if not (even and each % 2)]
            if not sizes:
                what = f"a width of {width} does not divide into heads of an even size, which rotary positions need"
                raise BraidError(what, todo="Compose without full-width blocks: `--blocks 0`.")
            size = min(sizes, key=lambda each: (abs(each - attention["head_dim"]), -each))
            heads = width // size
        remarks.append(f"{heads} heads of {size}")
        if size != attention["head_dim"]:
            remarks.append(f"{width} does not divide into heads of {attention['head_dim']}, so they are of {size}")
        elif heads * path.width != before * width:
            remarks.append(f"which is nearest to {before * width / path.width:.1f}")
        if attention.get("kv_heads") is not None:
            shared = before // attention["kv_heads"]
            attention["kv_heads"] = min(_divisors(heads), key=lambda kv: (abs(kv - heads / shared), -kv))
        attention |= {"heads": heads, "head_dim": size}
    if feed.get("hidden") is not None:
        feed["hidden"] = max(1, round(feed["hidden"] * width / path.width))
        remarks.append(f"inner size {feed['hidden']}")
    return options, ", ".join(remarks) or "with the same options"


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
