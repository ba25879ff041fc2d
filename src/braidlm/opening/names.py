"""One way to name a model, for every verb and for Python.

    FOLDER            a model folder: Braid's, one of transformers, or one of adapters that names its base
    RUN               a run folder: its newest checkpoint
    RUN/NAME          one of its checkpoints, or `best`: the one with the lowest validated bits per byte
    STUDY             a study's folder: all of its models
    STUDY/NAME        one of them, with the study's first seed; STUDY/seed-2/NAME is another's
    ORG/NAME          a model on the Hub, wherever a model is asked for

A name is a path, so that a shell completes it; parts of a folder that Braid arranges may be left out.
"""

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from braidlm.core.addresses import is_address
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.models.runs import (
    CHECKPOINTS,
    CONFIG,
    MODEL_CONFIGS,
    RECIPE,
    checkpoint_steps,
    is_model_folder,
    is_run,
    model_folders_in,
    newest_checkpoint,
    read_metrics,
)
from braidlm.core.reading import existing_folder, given_path
from braidlm.core.recipes import find_recipe, list_recipes

StrPath = str | Path
Names = StrPath | Sequence[StrPath] | Mapping[str, StrPath]
MANY, FEW = 200, 5
"""How many entries of a folder are looked at for models, and how many of these an error names."""
TOKENIZER_FILES = ("tokenizer*.json", "vocab.json", "merges.txt")
DOWNLOADED = [*MODEL_CONFIGS, "*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES, "README.md"]
MULTIPLIERS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}
_SEED = re.compile(r"seed-(\d+)")
_ON_THE_WAY = re.compile(r".+-(composed|\d+-[a-z]+)")


def check_names(*names: StrPath, bare: bool = False, any_folder: bool = False) -> None:
    """Refuse a name that stands for nothing: verbs look first, since what opens a model takes seconds to import."""
    for name in names:
        if not is_hub_name(name, bare):
            find_sources(name, any_folder)


def check_known(name: StrPath) -> None:
    """Refuse a name of no recipe, no folder and no address; what begins with a folder that exists was meant as one."""
    if is_address(name) or is_folder(name):
        return
    text = str(name)
    try:
        find_recipe(text)
    except BraidError as error:
        if Path(text).suffix in (".yaml", ".yml") or os.path.lexists(given_path(text)):
            raise
        if len(Path(text).parts) > 1 and Path(text).parent.is_dir():
            find_sources(text)  # an error that suggests the nearest name
        hint = did_you_mean(text, [known for known, _ in list_recipes()])
        todo = "`braid list recipes` shows the recipes that come with Braid; a recipe of your own is FILE.yaml."
        raise BraidError(f"there is no recipe and no folder '{text}'.{hint}", todo=todo) from error


def is_folder(name: StrPath) -> bool:
    """Whether a name is of something on this disk, such as one model of a study, and not of a recipe."""
    try:
        return given_path(name).is_dir() or bool(find_sources(name))
    except BraidError:
        return False


def find_model(name: StrPath) -> Path:
    """The one model folder that a name stands for."""
    sources = find_sources(name)
    if len(sources) > 1:
        # The first seed's, and those that were made of all seeds.
        homes = (sources[0].parent, sources[0].parent.parent)
        names = ", ".join(f"{name}/{source.name}" for source in sources if source.parent in homes)
        raise BraidError("this is a study of several models, and one is needed", str(name), f"Name one of {names}.")
    return model_folder(sources[0])


def find_sources(name: StrPath, any_folder: bool = False) -> list[Path]:
    """The model folders and run folders that a name stands for: one, or all models of a study.

    With `any_folder`, for those who want checkpoints, another folder stands for itself, such as one of checkpoints that
    are not a run's, and a study for its runs alone.
    """
    given = given_path(name)
    path = _with_parts_left_out(given)
    if path is None:
        todo = "A model is named by its folder, by its run, or by its study as STUDY/NAME."
        raise BraidError(f"there is no such folder{_nearest(given)}", str(given), todo)
    if path.is_file():
        todo = "A model is a folder. What was exported to one file is for other programs: name what it was made of."
        raise BraidError("a file stands where a folder is expected", str(path), todo)
    existing_folder(path)
    if is_model_folder(path) or is_run(path):
        return [path]
    if models := study_models(path):
        return [model for model in models if is_run(model)] if any_folder else models
    if any_folder:
        return [path]
    what = f"this is neither a model folder (no {CONFIG}) nor a run folder (no {RECIPE}) nor a study (no seed-1/NAME)"
    raise BraidError(what, str(path), names_inside(path))


def names_inside(folder: Path) -> str | None:
    """'Name one that is in it: ...', for a folder that is none itself and holds runs, models or studies, or text."""
    inside = [path for path in sorted(folder.iterdir())[:MANY] if path.is_dir()]
    found = [str(path) for path in inside if is_model_folder(path) or is_run(path) or study_models(path)]
    if not found:
        text = (folder / "train").is_dir()
        return f"It looks like text to train on, which a recipe reads: data.sets.NAME.folder={folder}" if text else None
    return f"Name one that is in it: {', '.join(found[:FEW])}{' ...' if len(found) > FEW else ''}."


def name_sources(names: Names, any_folder: bool = False) -> dict[str, tuple[Path, str | None]]:
    """The model and run folders that names stand for, under short names for tables, with their names on the Hub."""
    if not isinstance(names, Mapping):
        listed = [names] if isinstance(names, (str, Path)) else list(names)
        if not any(map(is_hub_name, listed)):
            sources = [source for name in listed for source in find_sources(name, any_folder)]
            return {short: (source, None) for short, source in short_names(sources).items()}
        names = {str(name): name for name in listed}
    found: dict[str, tuple[Path, str | None]] = {}
    for label, name in names.items():
        if is_hub_name(name):
            found[label] = find_or_fetch(name)
            continue
        sources = find_sources(name, any_folder)
        labels = [str(label)] if len(sources) == 1 else [f"{label}/{short}" for short in short_names(sources)]
        found |= {own: (source, None) for own, source in zip(labels, sources, strict=True)}
    return found


def model_folder(source: Path) -> Path:
    """The model folder of what `find_sources` found: itself, or the newest checkpoint of a run."""
    folder = source if is_model_folder(source) else newest_checkpoint(source)
    if folder is None:
        raise BraidError("this run has no checkpoint yet", str(source), "Let `braid train` go on to its first one.")
    return folder


def title_of(folder: Path) -> str:
    """A model folder's title: the run's name for a checkpoint of a run, else the folder's."""
    folder = folder.resolve()
    run = folder.parent.parent
    return run.name if folder.parent.name == CHECKPOINTS and is_run(run) else folder.name


def named(folder: Path, hub: str | None) -> str:
    """A model's title: its folder's, or the Hub's name with the revision."""
    return title_of(folder) if hub is None else f"{hub}@{folder.name}"


def study_models(folder: Path) -> list[Path]:
    """The runs of a study's folder and what was made of them, by seed and name; then what was made of all seeds. Empty
    if it is not a study's."""
    seeds = sorted((int(match[1]), path) for path in folder.glob("seed-*") if (match := _SEED.fullmatch(path.name)))
    found = [model for _, seed in seeds for model in sorted(seed.iterdir()) if is_run(model) or _is_made(model)]
    return [*found, *(model for model in sorted(folder.iterdir()) if _is_made(model))] if found else []


def _is_made(folder: Path) -> bool:
    """Whether a folder is an edited or averaged model, and not the beginning of a run or a step to another model."""
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


def words_in_name(name: str) -> int | None:
    """The words of training in the name of a checkpoint, as BabyLM writes it: 10 million in `chck_10M`."""
    match = re.fullmatch(r"chck_(\d+(?:\.\d+)?)([kKMB]?)", name)
    return round(float(match[1]) * MULTIPLIERS[match[2]]) if match else None


def is_hub_name(name: StrPath, bare: bool = False) -> bool:
    """Whether a name is looked up on the Hub: ORG/NAME where there is neither such a folder nor one called ORG. With
    `bare`, NAME alone may be one too, such as `gpt2`."""
    path, text = given_path(name), str(name)
    is_path = isinstance(name, Path) or path.is_absolute() or text.startswith((".", "~"))
    if is_path or text.count("/") > 1 or not (bare or "/" in text):
        return False
    return not (os.path.lexists(path) or (len(path.parts) > 1 and path.parent.is_dir()))


def find_or_fetch(name: StrPath, bare: bool = False) -> tuple[Path, str | None]:
    """The one model folder that a name stands for, and the name where it is the Hub's."""
    if is_hub_name(name, bare):
        return _fetch_from_hub(str(name)), str(name)
    if given_path(name).is_file():
        todo = "If it is a file of weights that needs no folder, say of which format with `--from`."
        raise BraidError("this is a file; give the folder that holds config.json and the weights", str(name), todo)
    return (folder := find_model(name)), _hub_name(folder)


def _hub_name(folder: Path) -> str | None:
    """The Hub's name, which others know, of a folder that the Hub's library has downloaded and gives for that name."""
    from huggingface_hub.constants import HF_HUB_CACHE

    snapshots = folder.resolve().parent
    match = re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", snapshots.parent.name)
    newest = snapshots.parent / "refs" / "main"
    if match is None or snapshots.parent.parent != Path(HF_HUB_CACHE).resolve() or not newest.is_file():
        return None
    return f"{match[1]}/{match[2]}" if newest.read_text() == folder.resolve().name else None


def _fetch_from_hub(name: str) -> Path:
    """The folder of a model of the Hub, which is downloaded once."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=DOWNLOADED, ignore_patterns=["*/*"]))
    except errors.GatedRepoError:
        todo = f"Accept them at https://huggingface.co/{name} and log in with `hf auth login`."
        raise BraidError(f"'{name}' on the Hub asks you to accept its terms first", todo=todo) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        what = f"there is no folder '{name}', and no model of that name on the Hub"
        raise BraidError(what, todo="Check the spelling; for a private model log in with `hf auth login`.") from None
    except (errors.LocalEntryNotFoundError, errors.HTTPError, OSError) as error:
        what = f"there is no folder '{name}', and the Hub cannot be reached ({type(error).__name__})"
        todo = "Check the path; or download the model where there is a connection and give its folder."
        raise BraidError(what, todo=todo) from None
    if not is_model_folder(folder):
        raise BraidError(f"'{name}' on the Hub has no config.json", todo="It is not a transformers model.")
    return folder


def _with_parts_left_out(path: Path) -> Path | None:
    """The path itself, or `RUN/checkpoints/NAME` or `STUDY/seed-1/NAME` for `RUN/NAME` and `STUDY/NAME`."""
    if os.path.lexists(path):
        return path
    parent = _with_parts_left_out(path.parent) if path.parent != path else None
    if parent is not None and path.name == "best" and is_run(parent):
        return best_checkpoint(parent)
    inner = None if parent is None else _arranged(parent)
    return inner / path.name if inner is not None and os.path.lexists(inner / path.name) else None


def _arranged(folder: Path) -> Path | None:
    """The folder inside a run or a study that may be left out of a name: its checkpoints, or its first seed."""
    if is_run(folder):
        return folder / CHECKPOINTS
    models = study_models(folder)
    return models[0].parent if models else None


def best_checkpoint(run: Path) -> Path:
    """The checkpoint with the lowest bits per byte among those that were validated when they were saved."""
    records = [(record.get("step"), record.get("bits_per_byte")) for record in read_metrics(run, "validation")]
    bits = {step: score for step, score in records if isinstance(step, int) and isinstance(score, (int, float))}
    steps = {folder: checkpoint_steps(folder) for folder in model_folders_in(run / CHECKPOINTS)}
    scores = {folder: bits[step] for folder, step in steps.items() if step in bits}
    if not scores:
        todo = "Name the run for its newest one. A recipe with `validation.every` as `checkpoints.every` validates all."
        raise BraidError("no checkpoint of this run was validated when it was saved", str(run), todo)
    return min(scores, key=lambda folder: scores[folder])


def _nearest(path: Path) -> str:
    """The question whether the nearest name was meant, for a name that stands for nothing."""
    try:
        parent = _with_parts_left_out(path.parent)
        parent = parent and (_arranged(parent) or parent)
        siblings = [one.name for one in parent.iterdir() if one.is_dir()] if parent and parent.is_dir() else []
    except OSError:
        siblings = []
    near = get_close_matches(path.name, siblings, n=1)
    return f". Did you mean '{path.parent / near[0]}'?" if near else ""
