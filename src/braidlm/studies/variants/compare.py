"""`braid compare`: several recipes trained on identical batches, each in a run folder of its own."""

import contextlib
import ctypes
import gc
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from braidlm.core import console
from braidlm.core.devices import choose_device, device_name
from braidlm.core.differences import as_yaml, differences
from braidlm.core.errors import BraidError, check_folder_name, collecting
from braidlm.core.files import write_json
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.memory import check_training_fits
from braidlm.core.models.runs import read_metrics
from braidlm.core.reading import read_json
from braidlm.core.recipes import compose_recipe
from braidlm.core.report.write import check_drawing, write
from braidlm.data.loading.open_data import open_data
from braidlm.data.packing.tokenizer_choice import DEFAULT_VOCAB_SIZE
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.strict import encode
from braidlm.opening.names import StrPath
from braidlm.studies.decoding import is_study
from braidlm.studies.variants.comparison import PAGE, Comparison, comparison_report, measured
from braidlm.training.recipe import LoadedRecipe, Recipe, decode_recipe
from braidlm.training.run_folder import check_folder, identity
from braidlm.training.start_from import data_of
from braidlm.training.train import Run, train

OUT = "runs/compare"
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What Linux takes for: the peak is what is in memory now."""
MEMORY = "memory.json"
"""In the folder of the runs: the peak of each run's memory, which only the process that trained it knows."""


def compare(
    recipes: Sequence[str | dict[str, Any]],
    overrides: list[str] | None = None,
    out: StrPath = OUT,
    device: str | None = None,
    fresh: bool = False,
) -> Comparison:
    """Train recipes (names, files, or their contents) on the same batches and write one table and a page into `out`.

    `overrides` are for all of them. The same call again goes on where it was stopped, or writes the page of what is
    there; `fresh` starts over.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BraidError("a comparison runs in one process", todo="Train its recipes one by one, then `braid eval`.")
    check_drawing()
    loaded = _load(recipes, overrides)
    check_same_batches(loaded)
    first = next(iter(loaded.values())).recipe
    place, runs_folder = torch.device(choose_device(device or "auto")), Path(out) / f"seed-{first.seed}"
    contents = {name: one.as_dict() | {"name": name, "out": str(runs_folder / name)} for name, one in loaded.items()}
    _check(loaded, contents, place, fresh)
    open_data(data_of(first), first.validation.half)  # preparing it is no part of a run
    if place.type == "cpu" and (fresh or not contents.keys() <= _peaks(runs_folder).keys()):
        _warm_up(contents[next(iter(contents))], place)  # on a GPU torch counts its tensors and nothing else
    runs = {name: _train(name, content, place, fresh) for name, content in contents.items()}
    peaks = _peaks(runs_folder)
    models = [measured(name, run, peaks.get(name), first.data.length) for name, run in runs.items()]
    kept = {name: identity(content, content) for name, content in contents.items()}
    comparison = Comparison(Path(out), models, _settings(first, place), differences(kept))
    write(comparison_report(comparison, contents), out, PAGE)
    return comparison


def _load(recipes: Sequence[str | dict[str, Any]], overrides: list[str] | None) -> dict[str, LoadedRecipe]:
    """The recipes by names that differ: their own, or else the names of their files."""
    if len(recipes) < 2:
        raise BraidError("a comparison needs at least two recipes", todo="`braid train` trains one.")
    if any(override.startswith("out=") for override in overrides or []):
        raise BraidError("each run has a folder of its own here", "out", "Name the folder of them all: --out DIR.")
    problems: list[str] = []
    loaded: list[tuple[str, LoadedRecipe]] = []
    for number, recipe in enumerate(recipes, 1):
        label = f"recipe {number}" if isinstance(recipe, dict) else str(recipe)
        try:
            loaded.append((label, _load_one(recipe, overrides)))
        except BraidError as error:
            problems += [f"{label}: {line}" for line in error.what.split("\n")]
    if problems:
        raise BraidError("\n".join(problems), todo="Nothing was started.")
    own = [one.recipe.name for _, one in loaded]
    names = own if len(set(own)) == len(own) else [label.replace("/", "-").removesuffix(".yaml") for label, _ in loaded]
    for name in names:
        check_folder_name("name", name)
        if names.count(name) > 1:
            raise BraidError(f"two recipes are called '{name}'", todo="Give each a `name` of its own.")
    return dict(zip(names, (one for _, one in loaded), strict=True))


def _load_one(recipe: str | dict[str, Any], overrides: list[str] | None) -> LoadedRecipe:
    if isinstance(recipe, dict):
        if overrides:
            raise BraidError("overrides change a recipe that is named; change the content itself")
        return decode_recipe(recipe)
    data = compose_recipe(recipe, overrides)
    if is_study(data):
        raise BraidError("this is a study, which compares its own models: `braid train` runs it")
    return decode_recipe(data, recipe)


def _check(
    loaded: Mapping[str, LoadedRecipe], contents: Mapping[str, dict[str, Any]], device: torch.device, fresh: bool
) -> None:
    """Find what would stop a run before the first one begins."""
    problems: list[str] = []
    for name, one in loaded.items():
        own: list[str] = []
        with collecting(own):
            check_folder(Path(contents[name]["out"]), contents[name], fresh)
        if one.architecture is not None and one.recipe.start_from is None:
            with collecting(own):
                config = BraidConfig(one.architecture, one.vocab_size or DEFAULT_VOCAB_SIZE)
                check_training_fits(skeleton(config), device)
        problems += [f"{name}: {problem}" for problem in own]
    if problems:
        raise BraidError(
            "\n".join(problems), todo="Nothing was started. --out DIR chooses another folder, --fresh starts anew."
        )


def _warm_up(content: dict[str, Any], device: torch.device) -> None:
    """Train one step elsewhere, so that the first run does not pay for what torch loads on demand."""
    short = {
        "training": content["training"] | {"budget": "1 steps"},
        "samples": content["samples"] | {"prompts": []},
        "validation": content["validation"] | {"tokens": 1},
    }
    with tempfile.TemporaryDirectory(prefix="braid-compare-") as scratch, console.silence():
        _stop_with(train(content | short | {"out": scratch}, device=str(device)))


def _stop_with(run: Run) -> None:
    """If the user stopped a run, which has saved, the comparison stops too."""
    if run.stopped_by is not None:
        raise run.stopped_by


def _train(name: str, content: dict[str, Any], device: torch.device, fresh: bool) -> Run:
    """Train one recipe, or what is left of it, and keep the peak of its memory."""
    run_folder = Path(content["out"])
    before = 0 if fresh else len(read_metrics(run_folder, "train"))
    console.say(f"\n{name}: {content['training']['budget']}")
    with PeakMemory(device) as memory:
        run = train(content, device=str(device), fresh=fresh)
    if memory.bytes is not None and len(read_metrics(run_folder, "train")) > before:
        peaks = _peaks(run_folder.parent)
        earlier = peaks.get(name, 0) if before else 0
        write_json(run_folder.parent / MEMORY, peaks | {name: max(memory.bytes, earlier)})
    _stop_with(run)
    return run


def _peaks(folder: Path) -> dict[str, int]:
    path = folder / MEMORY
    return read_json(path) if path.is_file() else {}


def _settings(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    return {
        "data": ", ".join(recipe.data.sets),
        "budget": str(recipe.training.budget),
        "sequences per step": recipe.training.batch * recipe.training.accumulation,
        "length": recipe.data.length,
        "seed": recipe.seed,
        "device": f"{device_name(device)}, torch {torch.__version__}",
    }


def check_same_batches(recipes: Mapping[str, LoadedRecipe]) -> None:
    """Refuse recipes that would not be trained, step by step, on the same batches."""
    # A batch is cut where a checkpoint by words or tokens is due; those by steps cut nothing.
    cut = any(loaded.recipe.checkpoints.every.unit != "steps" for loaded in recipes.values())
    different = differences({name: _what_makes_batches(loaded, cut) for name, loaded in recipes.items()})
    if different:
        lines = [f"{path}: {_listed(values)}" for path, values in different.items()]
        raise BraidError(
            "\n  ".join(["these recipes would not see the same batches:", *lines]),
            todo="Nothing was started. An override is for all recipes, so that `KEY=VALUE` makes them equal.",
        )


def _what_makes_batches(loaded: LoadedRecipe, cut: bool) -> dict[str, Any]:
    """The values of a recipe that decide on its batches; `cut` says whether checkpoints may."""
    recipe = loaded.recipe
    data = {key: value for key, value in encode(data_of(recipe)).items() if key != "cache"}
    training = {key: encode(getattr(recipe.training, key)) for key in ("batch", "accumulation", "lengths", "budget")}
    held_out = {"tokens": recipe.validation.tokens, "half": recipe.validation.half}
    same = {"seed": recipe.seed, "data": data, "training": training, "validation": held_out}
    return same | ({"checkpoints": {"every": encode(recipe.checkpoints.every)}} if cut else {})


def _listed(values: Mapping[str, Any]) -> str:
    """`16 in a and b, 8 in c`."""
    named: dict[str, list[str]] = {}
    for name, value in values.items():
        named.setdefault("nothing" if value is None else _quoted(value), []).append(name)
    return ", ".join(f"{value} in {' and '.join(names)}" for value, names in named.items())


def _quoted(value: Any) -> str:
    """As a recipe has it; a phrase such as `1M words to 10M, then 10M` in quotes, since commas part values too."""
    return f"'{value}'" if isinstance(value, str) and ", " in value else as_yaml(value)


class PeakMemory:
    """How many bytes more were in memory, at most, than before the block."""

    def __init__(self, device: torch.device):
        self.device = device
        self.bytes: int | None = None
        """None where the system does not tell."""
        self._before: int | None = None

    def __enter__(self) -> Self:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            with contextlib.suppress(OSError, AttributeError):
                # What the work before left in the allocator would hide what this one takes.
                ctypes.CDLL(None).malloc_trim(0)
            with contextlib.suppress(OSError):
                CLEAR.write_text(RESET_PEAK)
                self._before = _status("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            cuda = self.device.type == "cuda"
            peak = torch.cuda.max_memory_allocated(self.device) if cuda else _status("VmHWM")
            self.bytes = None if peak is None else max(0, peak - self._before)


def _status(key: str) -> int | None:
    """A size of this process in bytes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = STATUS.read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)
    return None
