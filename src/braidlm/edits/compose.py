"""The verb `compose`: models that were trained apart become the paths of one, in PaPaformer's layout, for any number of
paths of any widths and depths."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from braidlm.bridges.model_info import ModelInfo
from braidlm.core import console
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.files import check_new_folder
from braidlm.edits.composing.composition import STARTS, fresh_parts, plan_composition, shows_routes
from braidlm.edits.composing.decoders import are_decoders, compose_decoders
from braidlm.edits.composing.path_models import (
    APART,
    MODULES,
    PathModel,
    Section,
    after_averaging,
    aligned_sections,
    averaged_ends,
    averages,
    check_alone,
    check_no_layout,
    check_together,
    check_tokenizers,
    composed_end,
    composing_joins,
    name_paths,
)
from braidlm.edits.composing.side_by_side import plan_modules
from braidlm.edits.edit import EditPlan, carry_out
from braidlm.edits.modules import PARTS
from braidlm.model.config.braid_config import Architecture, BraidConfig, read_architecture
from braidlm.model.config.ranges import Layers, LayersOrZero, Seed
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import PartOf, decode, encode
from braidlm.model.heads.ends import embeddings, heads
from braidlm.model.paths.joins import joins
from braidlm.model.paths.parallel import ParallelStage
from braidlm.model.paths.switches import FREEZABLE
from braidlm.opening.names import find_sources, is_hub_name
from braidlm.opening.open import open_model

JoinChoice = Annotated[Choice, PartOf(composing_joins, "shared_linear")]


def compose(
    sources: Sequence[str | Path],
    out: str | Path | None,
    *,
    names: Sequence[str] | None = None,
    join: str | dict[str, Any] = "shared_linear",
    layers: int | None = None,
    blocks: int | None = None,
    freeze: Sequence[str] = (),
    seed: int = 1,
    dry_run: bool = False,
    start: str | None = None,
) -> Path | None:
    """Make one model of several: their blocks side by side in parallel layers, their embeddings and heads side by side.

    A source is a model folder, a run (its newest checkpoint), a study (all its models), one model of it, or a folder
    of a format that Braid reads, such as Llama's; all have one tokenizer. `names` are the paths' permanent names, by
    default the runs' or folders'. `join` is a kind or a mapping with options. `layers` is how often the paths are
    joined, by default as often as the shallowest has blocks; `blocks` of full width, by default 1, come before and
    after. `freeze` names what later training leaves as it is: `paths` for all that came from the sources. Projections
    and joins `start` as the `mean` of the paths, the default, which works better, or `random`, as PaPaformer's do. The
    joins `average`, `mixture` and `posterior` leave the models as they are and average their probabilities; decoders of
    transformers become members of one. `modules` is for models with modules that were inserted into one base (`braid
    edit insert`): these are put side by side, and `names` are what they are called, NAME_1, NAME_2 and so on, by
    default as they were. Returns the folder written, None for a dry run.
    """
    join_choice: Choice = decode(JoinChoice, join, "join")
    averaged, of_modules = join_choice.kind in averages, join_choice.kind == MODULES
    if averaged or of_modules:
        check_no_layout(layers=layers, blocks=blocks, start=start)
    blocks = (0 if averaged or of_modules else 1) if blocks is None else blocks
    start = start or "mean"
    for key, hint, value in (("layers", Layers | None, layers), ("blocks", LayersOrZero, blocks), ("seed", Seed, seed)):
        decode(hint, value, key)
    for part in freeze:
        if part not in FREEZABLE:
            raise BraidError(f"'{part}' cannot be frozen.{did_you_mean(part, FREEZABLE)}")
    if start not in STARTS:
        raise BraidError(f"there is no start '{start}'.{did_you_mean(start, STARTS)}")
    if out is not None or not dry_run:
        check_new_folder(out)
    folders = [one for source in sources for one in ([source] if is_hub_name(source) else find_sources(source))]
    if len(folders) < 2:
        raise BraidError("composing takes at least two models", todo="`braid compose A B --out M`")
    decoders = [open_model(folder, "own") for folder in folders] if averaged else []
    if averaged and are_decoders(decoders):
        check_no_layout(freeze=list(freeze) or None)
        options = {"join": encode(join_choice), "seed": seed}
        named = dict(zip(name_paths(decoders, names), decoders, strict=True))
        record = {"made_by": "braid compose", "options": options}
        return compose_decoders(named, join_choice, out, record, dry_run)  # type: ignore[arg-type]
    models = [open_model(folder, "braid") for folder in folders]
    path_names = name_paths(models, names)
    check_tokenizers(models, path_names)
    for model in models:
        model.check_editable()
    by_name = dict(zip(path_names, models, strict=True))
    paths = [PathModel(name, one.info, one) for name, one in by_name.items()]
    options = {"join": encode(join_choice), "layers": 0, "blocks": blocks, "freeze": list(freeze)}
    options |= {"start": start, "seed": seed}
    if of_modules:
        plan = plan_modules(by_name, names is not None, freeze)
    else:
        for path, model in zip(paths, models, strict=True):
            check_alone(path, str(model.folder), averaged)
        check_together(paths)
        architecture, notes = lay_out(paths, join_choice, layers, blocks)
        plan = plan_composition(paths, join_choice, architecture, notes, _frozen(freeze, paths), start)
        parallel = (stage for stage in plan.model.model.stages if isinstance(stage, ParallelStage))
        options["layers"] = sum(len(stage.layers) for stage in parallel)
    record = {"made_by": "braid compose", "options": options}
    folder = carry_out(plan, by_name, models[0].tokenizer, out, record, dry_run)
    if folder is not None:
        console.say(_what_next(plan, join_choice.kind, paths, folder))
    return folder


def composed_architecture(
    architectures: Sequence[Architecture],
    names: Sequence[str],
    join: str | dict[str, Any] | Choice = "shared_linear",
    layers: int | None = None,
    blocks: int = 1,
) -> Architecture:
    """The architecture that composing models of these architectures would give; needs no weights."""
    plain: list[ModelInfo] = []
    for architecture in architectures:  # models of one architecture are built once
        same = next((one for one in plain if one.architecture == architecture), None)
        plain.append(same or ModelInfo(BraidConfig(architecture)))
    paths = [PathModel(name, one) for name, one in zip(names, plain, strict=True)]
    choice: Choice = decode(JoinChoice, join, "join")
    for path in paths:
        check_alone(path, path.name, choice.kind in averages)
    check_together(paths)
    return read_architecture(lay_out(paths, choice, layers, blocks)[0])


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
        if (settle := getattr(join.options, "settle", None)) is not None:
            note += f"; after {settle} tokens of a text the one with the largest share goes on alone"
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


def _frozen(freeze: Sequence[str], paths: Sequence[PathModel]) -> list[str]:
    """The parts to freeze: `paths` includes the embedding and the head, which came from the paths too."""
    parts = set(freeze) | ({"embedding", "head"} if "paths" in freeze else set())
    if all(path.architecture.tie_embeddings for path in paths) and parts & {"embedding", "head"}:
        parts |= {"embedding", "head"}  # one matrix
    return [part for part in FREEZABLE if part in parts]


def _what_next(plan: EditPlan, join: str, paths: Sequence[PathModel], folder: Path) -> str:
    if join == MODULES:
        return (
            f"`braid eval` measures it, `--without 'NAME*'` switches an owner's modules off, and `braid edit withdraw "
            f"{folder} --modules 'NAME*'` takes them out for good. `braid train RECIPE start_from={folder}` trains its "
            "routers on text of every kind."
        )
    fresh, train = ", ".join(fresh_parts(plan.account)), f"`braid train RECIPE start_from={folder}`"
    if join in averages:
        return after_averaging(averages[join].how, folder, f": {train}" if fresh else "")
    routed = shows_routes(plan.model, paths)
    shown = "`braid routes RUN` shows who goes where" if routed else "`braid eval RUN` measures it"
    return (
        f"The fresh parts ({fresh}) are not trained yet: train them with {train} on text of every path's kind. "
        f"Then {shown}."
    )
