"""One way to name a model, for every verb and for Python.

    FOLDER            a model folder: Braid's, one of transformers, or one of adapters that names its base
    RUN               a run folder: its newest checkpoint
    RUN/NAME          one of its checkpoints, or `best`: the one with the lowest validated bits per byte
    STUDY             a study's folder: all of its models
    STUDY/NAME        one of them, with the study's first seed; STUDY/seed-2/NAME is another's
    ORG/NAME          a model on the Hub, for `braid eval`, `generate` and `edit`, and for recipes

A name is a path, so that a shell completes it; parts of a folder that Braid arranges may be left out.
"""

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.models.runs import (
    CHECKPOINTS,
    CONFIG,
    RECIPE,
    checkpoint_steps,
    is_model_folder,
    is_run,
    model_folders_in,
    newest_checkpoint,
    read_metrics,
)
from braidlm.core.reading import existing_folder

StrPath = str | Path
BEST = "best"
MANY, FEW = 200, 5
"""How many entries of a folder are looked at for models, and how many of these an error names."""
_SEED = re.compile(r"seed-(\d+)")
_ON_THE_WAY = re.compile(r".+-(composed|\d+-[a-z]+)")


def find_model(name: StrPath) -> Path:
    """The one model folder that a name stands for."""
    sources = find_sources(name)
    if len(sources) > 1:
        names = ", ".join(f"{name}/{source.name}" for source in _one_seed(sources))
        raise BraidError("this is a study of several models, and one is needed", str(name), f"Name one of {names}.")
    return model_folder(sources[0])


def find_sources(name: StrPath, any_folder: bool = False) -> list[Path]:
    """The model folders and run folders that a name stands for: one, or all models of a study.

    With `any_folder`, for those who want checkpoints, another folder stands for itself, such as one of checkpoints that
    are not a run's, and a study for its runs alone.
    """
    path = _with_parts_left_out(Path(os.path.expanduser(name)))
    if path is None:
        raise _missing(Path(os.path.expanduser(name)))
    existing_folder(path)
    if is_model_folder(path) or is_run(path):
        return [path]
    if models := study_models(path):
        return [model for model in models if is_run(model)] if any_folder else models
    if any_folder:
        return [path]
    raise BraidError(
        f"this is neither a model folder (no {CONFIG}) nor a run folder (no {RECIPE}) nor a study (no seed-1/NAME)",
        str(path),
        names_inside(path),
    )


def names_inside(folder: Path) -> str | None:
    """'Name one that is in it: ...', for a folder that is none itself and holds runs, models or studies, or text."""
    inside = [path for path in sorted(folder.iterdir())[:MANY] if path.is_dir()]
    found = [str(path) for path in inside if is_model_folder(path) or is_run(path) or study_models(path)]
    if not found:
        text = (folder / "train").is_dir()
        return f"It looks like text to train on, which a recipe reads: data.sets.NAME.folder={folder}" if text else None
    return f"Name one that is in it: {', '.join(found[:FEW])}{' ...' if len(found) > FEW else ''}."


def name_sources(
    names: StrPath | Sequence[StrPath] | Mapping[str, StrPath], any_folder: bool = False
) -> dict[str, Path]:
    """What several names stand for, under short names for tables; a mapping gives these itself."""
    if isinstance(names, Mapping):
        named: dict[str, Path] = {}
        for label, name in names.items():
            sources = find_sources(name, any_folder)
            labels = [str(label)] if len(sources) == 1 else [f"{label}/{short}" for short in short_names(sources)]
            named |= dict(zip(labels, sources, strict=True))
        return named
    listed = [names] if isinstance(names, (str, Path)) else list(names)
    return short_names([source for name in listed for source in find_sources(name, any_folder)])


def model_folder(source: Path) -> Path:
    """The model folder of what `find_sources` found: itself, or the newest checkpoint of a run."""
    if is_model_folder(source):
        return source
    newest = newest_checkpoint(source)
    if newest is None:
        raise BraidError("this run has no checkpoint yet", str(source), "Let `braid train` go on to its first one.")
    return newest


def title_of(folder: Path) -> str:
    """A model folder's title: the run's name for a checkpoint of a run, else the folder's."""
    folder = folder.resolve()
    run = folder.parent.parent
    return run.name if folder.parent.name == CHECKPOINTS and is_run(run) else folder.name


def study_models(folder: Path) -> list[Path]:
    """The runs of a study's folder and what was made of them, by seed and name; then what was made of all seeds.

    None if it is not a study's.
    """
    seeds = sorted((int(match[1]), path) for path in folder.glob("seed-*") if (match := _SEED.fullmatch(path.name)))
    found = [model for _, seed in seeds for model in sorted(seed.iterdir()) if is_run(model) or _is_made(model)]
    return [*found, *(model for model in sorted(folder.iterdir()) if _is_made(model))] if found else []


def _is_made(folder: Path) -> bool:
    """Whether it is an edited or averaged model, and not the beginning of a run or a step on the way to another."""
    return is_model_folder(folder) and not folder.name.startswith(".") and not _ON_THE_WAY.fullmatch(folder.name)


def short_names(paths: Sequence[Path]) -> dict[str, Path]:
    """Short unique names of models: as many of each path's last parts as needed."""
    parts = [[part for part in path.resolve().parts if part != CHECKPOINTS] for path in paths]
    for number, words in enumerate(parts):
        if words in parts[:number]:
            raise BraidError("this model is given twice", str(paths[number]))
    # The name of a checkpoint includes its run, since many runs have a `step-001000`.
    lengths = [1 + (path.resolve().parent.name == CHECKPOINTS) for path in paths]
    while True:
        names = ["/".join(words[-length:]) for words, length in zip(parts, lengths, strict=True)]
        ambiguous = [names.count(name) > 1 for name in names]
        if not any(ambiguous):
            return dict(zip(names, paths, strict=True))
        lengths = [length + more for length, more in zip(lengths, ambiguous, strict=True)]


def _with_parts_left_out(path: Path) -> Path | None:
    """The path itself, or `RUN/checkpoints/NAME` or `STUDY/seed-1/NAME` for `RUN/NAME` and `STUDY/NAME`."""
    if os.path.lexists(path):
        return path
    parent = _with_parts_left_out(path.parent) if path.parent != path else None
    if parent is None:
        return None
    if is_run(parent):
        return best_checkpoint(parent) if path.name == BEST else _existing(parent / CHECKPOINTS / path.name)
    first_seed = next((model.parent for model in study_models(parent)), None)
    return None if first_seed is None else _existing(first_seed / path.name)


def best_checkpoint(run: Path) -> Path:
    """The checkpoint with the lowest bits per byte among those that were validated when they were saved."""
    bits = {
        record["step"]: record["bits_per_byte"]
        for record in read_metrics(run, "validation")
        if isinstance(record.get("bits_per_byte"), (int, float)) and isinstance(record.get("step"), int)
    }
    scores = {
        folder: bits[steps]
        for folder in model_folders_in(run / CHECKPOINTS)
        if (steps := checkpoint_steps(folder)) in bits
    }
    if not scores:
        raise BraidError(
            "no checkpoint of this run was validated when it was saved",
            str(run),
            "Name the run for its newest one. A recipe with `validation.every` as `checkpoints.every` validates all.",
        )
    return min(scores, key=lambda folder: scores[folder])


def _existing(path: Path) -> Path | None:
    return path if os.path.lexists(path) else None


def _missing(path: Path) -> BraidError:
    """The error for a name that stands for nothing, with the nearest name beside it."""
    try:
        parent = _with_parts_left_out(path.parent)
        folders = [parent] if parent is not None and parent.is_dir() else []
        if parent is not None and is_run(parent):
            folders = [parent / CHECKPOINTS]
        elif parent is not None and (models := study_models(parent)):
            folders = [models[0].parent]
        siblings = [one.name for folder in folders if folder.is_dir() for one in folder.iterdir() if one.is_dir()]
    except OSError:
        siblings = []
    near = get_close_matches(path.name, siblings, n=1)
    hint = f". Did you mean '{path.parent / near[0]}'?" if near else ""
    return BraidError(
        f"there is no such folder{hint}",
        str(path),
        "A model is named by its folder, by its run, or by its study as STUDY/NAME.",
    )


def _one_seed(models: Sequence[Path]) -> list[Path]:
    """The first seed's of a study's models, and those of all seeds."""
    return [model for model in models if model.parent in (models[0].parent, models[0].parent.parent)]
