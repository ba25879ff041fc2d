"""`braid compare`: a study of one step, a training, with several recipes as its variants on identical batches."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from braidlm.core import console
from braidlm.core.devices import choose_device, device_name
from braidlm.core.differences import Differences, as_yaml, differences
from braidlm.core.errors import BraidError, check_folder_name, collecting
from braidlm.core.files import locked_folder
from braidlm.core.models.accounting import CountedModel, model_cost
from braidlm.core.models.runs import read_metrics
from braidlm.core.recipes import compose_recipe, is_study
from braidlm.core.report.page import notebook
from braidlm.core.report.rendering import write
from braidlm.core.report.report import Lines, Points, Report, Table, listed
from braidlm.core.report.verdicts import ranking
from braidlm.data.loading.config import CACHE_KEYS
from braidlm.data.loading.open_data import open_data
from braidlm.model.config.strict import encode
from braidlm.opening.names import StrPath
from braidlm.opening.open import open_model
from braidlm.studies.results import ModelResult, Point, read_run
from braidlm.studies.running import check_one_process, check_variants, train_to_end
from braidlm.studies.tables import add_differences, add_recipes, cells
from braidlm.training.monitoring.speed import TRAINING_FLOPS
from braidlm.training.recipe import LoadedRecipe, Recipe, decode_recipe
from braidlm.training.run_folder import identity
from braidlm.training.start_from import data_of
from braidlm.training.train import Run

OUT = "runs/compare"
PAGE, TABLE, RESULTS = "compare", "compare", "results"
"""The names of the files."""
COSTS = ("parameters", "active", "FLOPs per token", "tokens/s", "memory", "training")
SIZES = ("name", "parameters", "active_parameters", "flops_per_token", "tokens", "tokens_per_second", "memory")
FACTS = (*SIZES, "seconds", "bits_per_byte")
"""The columns of the CSV file before the columns of the data sets."""


@dataclass
class Comparison:
    """Models that were trained on the same batches."""

    folder: Path
    models: list[ModelResult]
    settings: dict[str, Any]
    """What they have in common, in words."""
    differences: Differences
    """By the key of a recipe, the value of each model."""

    def facts(self) -> dict[str, Any]:
        """Plain data, as `results.json` holds it."""
        models = []
        for model in self.models:
            points = {"losses": model.losses, "validations": model.curve}
            curves = {name: [[p.tokens, p.seconds, p.value] for p in each] for name, each in points.items()}
            models.append(model.facts(("folder", "run_folder", *FACTS, "bits")) | curves)
        return {"format": 1, **self.settings, "models": models, "differences": self.differences}

    def _repr_html_(self) -> str:
        return notebook(comparison_table(self))


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
    check_one_process("a comparison runs in one process", "Train its recipes one by one, then `braid eval`.")
    loaded = _load(recipes, overrides)
    check_same_batches(loaded)
    first, device = next(iter(loaded.values())).recipe, choose_device(device or "auto")
    runs_folder = Path(out) / f"seed-{first.seed}"
    contents = {name: one.as_dict() | {"name": name, "out": str(runs_folder / name)} for name, one in loaded.items()}
    check_variants(contents, fresh, "--out DIR chooses another folder, --fresh starts anew.", device)
    with locked_folder(Path(out), "compare", "--out"):
        open_data(data_of(first), first.validation.half)  # preparing it is no part of a run
        if device == "cpu" and (fresh or not all(read_metrics(runs_folder / name, "train") for name in contents)):
            _warm_up(contents[next(iter(contents))], device)  # on a GPU torch counts its tensors and nothing else
        runs: dict[str, Run] = {}
        for name, content in contents.items():
            console.say(f"\n{name}: {content['training']['budget']}")
            runs[name] = train_to_end(content, device, fresh)
        models = []
        for name, run in runs.items():
            cost = model_cost(CountedModel(open_model(run.model, "braid").config), first.data.length)
            models.append(replace(read_run(name, run.folder), folder=run.model, **vars(cost)))
        settings = {
            "data": ", ".join(first.data.sets),
            "budget": str(first.training.budget),
            "sequences per step": first.training.batch * first.training.accumulation,
            "length": first.data.length,
            "seed": first.seed,
            "device": f"{device_name(torch.device(device))}, torch {torch.__version__}",
        }
        differing = differences({name: identity(content, content) for name, content in contents.items()})
        comparison = Comparison(Path(out), models, settings, differing)
        write(comparison_report(comparison, contents), out, PAGE)
        return comparison


def _load(recipes: Sequence[str | dict[str, Any]], overrides: list[str] | None) -> dict[str, LoadedRecipe]:
    """The recipes by names that differ: their own, or else the names of their files."""
    if len(recipes) < 2:
        raise BraidError("a comparison needs at least two recipes", todo="`braid train` trains one.")
    if any(override.startswith("out=") for override in overrides or []):
        raise BraidError("each run has a folder of its own here", "out", "Name the folder of them all: --out DIR.")
    problems: list[str] = []
    loaded: list[LoadedRecipe] = []
    labels = [f"recipe {at}" if isinstance(one, dict) else str(one) for at, one in enumerate(recipes, 1)]
    for label, recipe in zip(labels, recipes, strict=True):
        with collecting(problems, f"{label}: "):
            if not isinstance(recipe, dict):
                data = compose_recipe(recipe, overrides)
                if is_study(data):
                    raise BraidError("this is a study, which compares its own models: `braid train` runs it")
                loaded.append(decode_recipe(data, recipe))
            elif overrides:
                raise BraidError("overrides change a recipe that is named; change the content itself")
            else:
                loaded.append(decode_recipe(recipe))
    if problems:
        raise BraidError("\n".join(problems), todo="Nothing was started.")
    names = [one.recipe.name for one in loaded]
    if len(set(names)) < len(names):
        names = [label.replace("/", "-").removesuffix(".yaml") for label in labels]
    for name in names:
        check_folder_name("name", name)
        if names.count(name) > 1:
            raise BraidError(f"two recipes are called '{name}'", todo="Give each a `name` of its own.")
    return dict(zip(names, loaded, strict=True))


def check_same_batches(recipes: Mapping[str, LoadedRecipe]) -> None:
    """Refuse recipes that would not be trained, step by step, on the same batches."""
    # A batch is cut where a checkpoint by words or tokens is due; those by steps cut nothing.
    cut = any(loaded.recipe.checkpoints.every.unit != "steps" for loaded in recipes.values())
    different = differences({name: _what_makes_batches(loaded.recipe, cut) for name, loaded in recipes.items()})
    if different:
        lines = [f"{path}: {_listed(values)}" for path, values in different.items()]
        todo = "Nothing was started. An override is for all recipes, so that `KEY=VALUE` makes them equal."
        raise BraidError("\n  ".join(["these recipes would not see the same batches:", *lines]), todo=todo)


def _what_makes_batches(recipe: Recipe, cut: bool) -> dict[str, Any]:
    """The values of a recipe that decide on its batches; `cut` says whether checkpoints may."""
    data = {key: value for key, value in encode(data_of(recipe)).items() if key not in CACHE_KEYS}
    training = {key: encode(getattr(recipe.training, key)) for key in ("batch", "accumulation", "lengths", "budget")}
    held_out = {"tokens": recipe.validation.tokens, "half": recipe.validation.half}
    same = {"seed": recipe.seed, "data": data, "training": training, "validation": held_out}
    return same | ({"checkpoints": {"every": encode(recipe.checkpoints.every)}} if cut else {})


def _listed(values: Mapping[str, Any]) -> str:
    """`16 in a and b, 8 in c`."""
    named: dict[str, list[str]] = {}
    for name, value in values.items():
        # A phrase such as `1M words to 10M, then 10M` is in quotes, since commas part values too.
        text = f"'{value}'" if isinstance(value, str) and ", " in value else as_yaml(value)
        named.setdefault("nothing" if value is None else text, []).append(name)
    return ", ".join(f"{value} in {' and '.join(names)}" for value, names in named.items())


def _warm_up(content: dict[str, Any], device: str) -> None:
    """Train one step elsewhere, so that the first run does not pay for what torch loads on demand."""
    short = {
        "training": content["training"] | {"budget": "1 steps"},
        "samples": content["samples"] | {"prompts": []},
        "validation": content["validation"] | {"tokens": 1},
    }
    with tempfile.TemporaryDirectory(prefix="braid-compare-") as scratch, console.silence():
        train_to_end(content | short | {"out": scratch}, device, fresh=False)


def comparison_report(comparison: Comparison, recipes: Mapping[str, dict[str, Any]]) -> Report:
    """The table, the charts, in what the recipes differ, and the recipes in full."""
    bits = {model.name: [] if model.bits_per_byte is None else [model.bits_per_byte] for model in comparison.models}
    report = Report("Comparison", f"{listed(list(bits))}, trained on the same batches")
    report.verdict = ranking(bits, f"models trained on the same batches ({comparison.settings['budget']})")
    report.data[RESULTS] = comparison.facts()
    report.facts(comparison.settings).heading("Cost, speed and quality").table(comparison_table(comparison))
    report.text(
        "FLOPs are those of a forward pass. Tokens per second are the median of the training's records after the "
        "first; memory is the most that a training took, weights and optimizer included. One seed each: small "
        "differences in bits per byte may be chance."
    )
    _add_charts(report, comparison)
    add_differences(report, comparison.differences)
    add_recipes(report, recipes)
    return report.links({"The table as CSV": f"{TABLE}.csv", "Everything for programs": f"{RESULTS}.json"})


def comparison_table(comparison: Comparison) -> Table:
    """A row for each model; the change is against the first. The file has every digit."""
    models, sets = comparison.models, list(comparison.models[0].bits)
    several = sets if len(sets) > 1 else []
    first, rows, facts = models[0].bits_per_byte, [], []
    for model in models:
        known, bits = model.facts(FACTS), model.bits_per_byte
        change = None if bits is None or first is None or model is models[0] else 100 * (bits / first - 1)
        of_sets = [f"{model.bits[name]:.4f}" for name in several]
        ends = *cells(known, ["bits per byte"]), None if change is None else f"{change:+.1f}%".replace("-", "−")
        rows.append([model.name, *ends, *of_sets, *cells(known, COSTS)])
        facts.append([*known.values(), *model.bits.values()])
    scores = {at: model.bits_per_byte for at, model in enumerate(models) if model.bits_per_byte is not None}
    return Table(
        ["model", "bits per byte", "change", *(f"bits per byte, {name}" for name in several), *COSTS],
        rows,
        name=TABLE,
        best=min(scores, key=scores.__getitem__, default=None),
        keep=1,
        data=Table([*FACTS, *sets], facts),
    )


def _add_charts(report: Report, comparison: Comparison) -> None:
    """The charts that have something to draw."""
    flops = {model.name: model.flops_per_token or 0 for model in comparison.models}

    def chart(points: dict[str, list[Point]], x: Callable[[str, Point], float], x_label: str, y_label: str) -> Lines:
        lines = {name: ([x(name, one) for one in own], [one.value for one in own]) for name, own in points.items()}
        return Lines(lines, x_label, y_label, log_y=True)

    if losses := {model.name: model.losses for model in comparison.models if model.losses}:
        loss = "training loss, nats per token"
        by_tokens = chart(losses, lambda _, point: point.tokens, "tokens seen", loss)
        by_time = chart(losses, lambda _, point: point.seconds, "seconds of training", loss)
        report.chart(by_tokens, "The training loss for the same tokens.", "loss-tokens")
        report.chart(by_time, "The same for the same time; validation and saving do not count.", "loss-time")
    if curves := {model.name: model.curve for model in comparison.models if model.curve}:
        x_label, y_label = "FLOPs of the training so far", "bits per byte, held-out text"
        by_flops = chart(curves, lambda name, one: TRAINING_FLOPS * flops[name] * one.tokens, x_label, y_label)
        caption = "Held-out text during the training; a backward pass counts as two forward passes."
        report.chart(by_flops, caption, "bits-flops")
        ends = {name: (float(flops[name]), curve[-1].value) for name, curve in curves.items()}
        caption = "What each model reaches at the end. Nearer to the lower left is better."
        report.chart(Points(ends, "FLOPs per token", "bits per byte"), caption, "bits-cost")
