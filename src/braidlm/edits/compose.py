"""The verb `compose`: models that were trained apart become the paths of one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from braidlm.bridges.model_info import ModelInfo
from braidlm.core import console
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.files import check_new_folder
from braidlm.edits.composing.composition import STARTS, fresh_parts, plan_composition, shows_routes
from braidlm.edits.composing.layout import lay_out
from braidlm.edits.composing.path_models import (
    PathModel,
    averages,
    check_alone,
    check_no_layout,
    check_together,
    check_tokenizers,
    composing_joins,
    name_paths,
)
from braidlm.edits.edit import EditPlan, carry_out
from braidlm.model.config.braid_config import Architecture, BraidConfig, read_architecture
from braidlm.model.config.ranges import Layers, LayersOrZero, Seed
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import PartOf, decode, encode
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
    joins `average` and `mixture` leave the models as they are and average their probabilities. Returns the folder
    written, None for a dry run.
    """
    join_choice: Choice = decode(JoinChoice, join, "join")
    averaged = join_choice.kind in averages
    if averaged:
        check_no_layout(layers=layers, blocks=blocks, start=start)
    blocks = (0 if averaged else 1) if blocks is None else blocks
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
    models = [open_model(folder, "braid") for folder in folders]
    if len(models) < 2:
        raise BraidError("composing takes at least two models", todo="`braid compose A B --out M`")
    path_names = name_paths(models, names)
    check_tokenizers(models, path_names)
    paths = [PathModel(name, one.info, one) for name, one in zip(path_names, models, strict=True)]
    for path, model in zip(paths, models, strict=True):
        model.check_editable()
        check_alone(path, str(model.folder), averaged)
    check_together(paths)
    plan = plan_composition(paths, join_choice, layers, blocks, _frozen(freeze, paths), start)
    depth = sum(len(stage.layers) for stage in plan.model.model.stages if isinstance(stage, ParallelStage))
    options = {"join": encode(join_choice), "layers": depth, "blocks": blocks, "freeze": list(freeze)}
    options |= {"start": start, "seed": seed}
    record = {"made_by": "braid compose", "options": options}
    by_name = dict(zip(path_names, models, strict=True))
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


def _frozen(freeze: Sequence[str], paths: Sequence[PathModel]) -> list[str]:
    """The parts to freeze: `paths` includes the embedding and the head, which came from the paths too."""
    parts = set(freeze) | ({"embedding", "head"} if "paths" in freeze else set())
    if all(path.architecture.tie_embeddings for path in paths) and parts & {"embedding", "head"}:
        parts |= {"embedding", "head"}  # one matrix
    return [part for part in FREEZABLE if part in parts]


def _what_next(plan: EditPlan, join: str, paths: Sequence[PathModel], folder: Path) -> str:
    fresh, train = ", ".join(fresh_parts(plan.account)), f"`braid train RECIPE start_from={folder}`"
    if join in averages:
        return (
            f"Its probabilities are the models', {averages[join].how}{f': {train}' if fresh else ''}. "
            f"`braid eval` measures it beside them, and `training.distill={{teachers: [{folder}]}}` makes a model of "
            "one's size of it."
        )
    routed = shows_routes(plan.model, paths)
    shown = "`braid routes RUN` shows who goes where" if routed else "`braid eval RUN` measures it"
    return (
        f"The fresh parts ({fresh}) are not trained yet: train them with {train} on text of every path's kind. "
        f"Then {shown}."
    )
