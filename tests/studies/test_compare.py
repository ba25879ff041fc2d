"""`braid compare`: identical batches, one table, what differs, and going on after a stop."""

import csv
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import braidlm
from braidlm.cli.main import main
from braidlm.core.differences import differences
from braidlm.core.errors import BraidError
from braidlm.core.files import LockedError, locked_folder
from braidlm.core.models.runs import read_metrics
from braidlm.core.report.report import cell_text
from braidlm.opening.names import find_sources
from braidlm.studies.compare import Comparison, check_same_batches, compare, comparison_table
from braidlm.training.loop import Trainer
from braidlm.training.step.step import Stepper
from tests.report_pages import charts_of

RECIPE: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "model": {"width": 16, "context": 32, "block": {"attention": {"heads": 2}}, "stages": ["block"]},
    "data": {
        "length": 32,
        "tokenizer": "bytes",
        "sets": {
            "stories": {"source": "stories", "documents": 30, "holdout": 0.1},
            "maths": {"source": "maths", "documents": 30, "holdout": 0.1},
        },
    },
    "training": {"budget": "8 steps", "batch": 2, "threads": 1},
    "validation": {"every": "4 steps", "tokens": 200},
    "log": {"every": 2},
}


def recipe(cache: Path, name: str, **changes: Any) -> dict[str, Any]:
    data = {**RECIPE["data"], "cache": str(cache), **changes.pop("data", {})}
    training = {**RECIPE["training"], **changes.pop("training", {})}
    return {**RECIPE, "name": name, "data": data, "training": training, **changes}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def pair(cache: Path) -> list[dict[str, Any]]:
    wide = {**RECIPE["model"], "width": 32, "dropout": 0.1}
    return [recipe(cache, "small"), recipe(cache, "wide", model=wide, training={"optimizer": {"lr": 3e-3}})]


@pytest.fixture(scope="module")
def compared(pair: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Any]:
    """A comparison, and the batches that each model saw."""
    batches: dict[str, list[np.ndarray]] = {}
    step = Trainer._step

    def watched(self: Trainer) -> None:
        draw = self.loader.next_batch

        def next_batch(*args: Any) -> Any:
            batch = draw(*args)
            batches.setdefault(self.recipe.folder, []).append(np.stack([batch.inputs, batch.labels]))
            return batch

        self.loader.next_batch = next_batch  # type: ignore[method-assign]
        step(self)
        self.loader.next_batch = draw  # type: ignore[method-assign]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", watched)
        comparison = compare(pair, out=tmp_path_factory.mktemp("compared") / "out", device="cpu")
    return comparison, batches


def test_every_model_sees_the_same_batches(compared: tuple[Comparison, Any]) -> None:
    comparison, batches = compared
    small, wide = (batches[str(model.run_folder)] for model in comparison.models)
    assert len(small) == 8
    assert all(np.array_equal(a, b) for a, b in zip(small, wide, strict=True))


def test_what_is_measured(compared: tuple[Comparison, Any]) -> None:
    small, wide = compared[0].models
    assert (small.name, wide.name) == ("small", "wide")
    assert small.parameters < wide.parameters
    assert small.flops_per_token < wide.flops_per_token
    assert small.tokens == wide.tokens == 8 * 2 * 32
    for model in (small, wide):
        assert model.tokens_per_second is not None
        assert model.tokens_per_second > 0
        assert len(model.losses) == 4
        assert [point.tokens for point in model.curve] == [256, 512]
        assert model.bits_per_byte == model.curve[-1].value
        assert set(model.bits) == {"stories", "maths"}
        assert [p.seconds for p in model.losses] == sorted(p.seconds for p in model.losses)
        assert model.seconds == model.losses[-1].seconds
        told = [record.get("memory") for record in read_metrics(model.run_folder, "train")]
        assert model.memory == (None if None in told else max(told)), "the run's own records keep it, whoever is killed"


def test_the_first_record_is_a_warm_up(compared: tuple[Comparison, Any]) -> None:
    model = compared[0].models[0]
    lines = [json.loads(line) for line in (model.run_folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    assert model.tokens_per_second == np.median(speeds[1:])


def test_the_table_and_the_files(compared: tuple[Comparison, Any]) -> None:
    comparison = compared[0]
    rows = [list(map(cell_text, row)) for row in comparison_table(comparison).rows]
    assert [row[0] for row in rows] == ["small", "wide"]
    assert (rows[0][2], rows[1][2][-1]) == ("–", "%")
    table = list(csv.DictReader((comparison.folder / "compare.csv").open()))
    assert [int(row["parameters"]) for row in table] == [model.parameters for model in comparison.models]
    facts = json.loads((comparison.folder / "results.json").read_text())
    assert facts["models"][1]["bits_per_byte"] == comparison.models[1].bits_per_byte
    page = (comparison.folder / "compare.html").read_text()
    assert page.count('<figure class="picture">') == 4
    assert "training.optimizer.lr" in page
    charts = charts_of(comparison.folder / "compare.html")
    assert list(charts) == ["loss-tokens", "loss-time", "bits-flops", "bits-cost"]
    assert set(charts["bits-cost"]["points"]) == {model.name for model in comparison.models}
    assert "bits per byte" in comparison._repr_html_()


def test_what_differs_is_named_and_nothing_else(compared: tuple[Comparison, Any]) -> None:
    different = compared[0].differences
    assert different["model.width"] == {"small": 16, "wide": 32}
    assert different["training.optimizer.lr"] == {"small": 1e-3, "wide": 3e-3}
    assert not [key for key in different if key.startswith(("data", "seed", "name", "out"))]


def test_its_folder_names_its_models(compared: tuple[Comparison, Any]) -> None:
    assert [path.name for path in find_sources(compared[0].folder)] == ["small", "wide"]


def test_the_same_call_again_trains_nothing(
    pair: list[dict[str, Any]], compared: tuple[Comparison, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stepper, "step", None)
    again = compare(pair, out=compared[0].folder, device="cpu")
    assert again.models == compared[0].models


def test_a_comparison_that_was_stopped_goes_on(
    pair: list[dict[str, Any]], compared: tuple[Comparison, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer._step

    def stopped(self: Trainer) -> None:
        step(self)
        if self.recipe.name == "wide" and self.progress.steps == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stopped)
        with pytest.raises(KeyboardInterrupt):
            compare(pair, out=tmp_path / "out", device="cpu")
    assert not (tmp_path / "out" / "compare.html").exists()
    whole, resumed = compared[0], compare(pair, out=tmp_path / "out", device="cpu")
    assert [m.bits_per_byte for m in resumed.models] == [m.bits_per_byte for m in whole.models]


def test_two_comparisons_do_not_share_a_folder(pair: list[dict[str, Any]], tmp_path: Path) -> None:
    at_work = pytest.raises(LockedError, match="another `braid compare` is at work here")
    with locked_folder(tmp_path), at_work:
        compare(pair, out=tmp_path, device="cpu")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seed": 4}, "seed: 3 in small, 4 in other"),
        ({"training": {"batch": 4}}, "training.batch: 2 in small, 4 in other"),
        ({"training": {"accumulation": 2}}, "training.accumulation: 1 in small, 2 in other"),
        (
            {"training": {"lengths": [{"until": 0.5, "length": 8}]}},
            "training.lengths: [] in small, [{until: 0.5, length: 8}]",
        ),
        ({"training": {"budget": "9 steps"}}, "training.budget: 8 steps in small, 9 steps in other"),
        ({"data": {"length": 16}}, "data.length: 32 in small, 16 in other"),
        ({"data": {"order": "length"}}, "data.order.kind: shuffled in small, length in other"),
        ({"data": {"tokenizer": {"kind": "bpe", "vocab_size": 300}}}, "data.tokenizer.kind: bytes in small, bpe in"),
        (
            {"data": {"sets": {"stories": RECIPE["data"]["sets"]["stories"]}}},
            "data.sets.maths: {source: maths, documents: 30, ",
        ),
        ({"checkpoints": {"every": "100 tokens"}}, "checkpoints.every: 500 steps in small, 100 tokens in other"),
        (
            {"checkpoints": {"every": "1M words to 10M, then 10M"}},
            "checkpoints.every: 500 steps in small, '1M words to 10M, then 10M' in other",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_batches_are_refused(changes: dict[str, Any], problem: str, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(BraidError) as caught:
        compare([recipe(cache, "small"), recipe(cache, "other", **changes)], out=tmp_path / "out", device="cpu")
    assert "these recipes would not see the same batches" in str(caught.value)
    assert problem in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_what_makes_no_batch_may_differ(cache: Path) -> None:
    """Steps of checkpoints cut nothing, and the cache is only a place."""
    from braidlm.training.recipe import decode_recipe

    other = recipe(cache / "elsewhere", "b", checkpoints={"every": "3 steps"}, training={"dropout": "early"})
    check_same_batches({"a": decode_recipe(recipe(cache, "a")), "b": decode_recipe(other)})


def written(folder: Path, content: dict[str, Any], name: str) -> str:
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return str(folder / f"{name}.yaml")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (lambda a, b: [a], "a comparison needs at least two recipes"),
        (lambda a, b: [a, a], "two recipes are called"),
        (lambda a, b: [a, b, "out=x"], "Name the folder of them all: --out DIR."),
        (lambda a, b: [a, "papers/papaformer/phase1"], "papers/papaformer/phase1: this is a study"),
        (lambda a, b: [a, b, "training.bach=3"], "unknown key 'bach'. Did you mean 'batch'?"),
        (lambda a, b: [a, "nothing"], "there is no recipe 'nothing'"),
        (lambda a, b: [a, b, "model.block.attention.heads=3"], "heads"),
    ],
)
def test_mistakes(
    arguments: Callable[..., list[str]],
    problem: str,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [written(tmp_path, recipe(cache, name), name) for name in ("one", "two")]
    assert main(["compare", *arguments(*files), "--device", "cpu"]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_another_comparison(pair: list[dict[str, Any]], compared: tuple[Comparison, Any]) -> None:
    changed = [one | {"seed": 3, "training": one["training"] | {"batch": 3}} for one in pair]
    with pytest.raises(BraidError, match=r"training.batch: 2 -> 3(.|\n)*--out DIR"):
        compare(changed, out=compared[0].folder, device="cpu")


def test_the_verb(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recipes of one name are named by their files, and an override, or a key that is taken away, is for both."""
    files = [written(tmp_path, recipe(cache, "same"), name) for name in ("one", "two")]
    names = [os.path.relpath(file).replace("/", "-").removesuffix(".yaml") for file in files]
    arguments = [*map(os.path.relpath, files), "training.budget=2 steps", "validation.every=2 steps", "~log"]
    assert main(["compare", *arguments, "--out", str(tmp_path / "out"), "--device", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in facts["models"]] == names
    assert facts["models"][0]["bits_per_byte"] == facts["models"][1]["bits_per_byte"]
    assert facts["budget"] == "2 steps"
    assert facts["differences"] == {}


def test_the_function_has_the_name_of_the_verb() -> None:
    assert braidlm.compare is compare


def test_differences_of_trees() -> None:
    trees = {"a": {"x": 1, "y": {"z": [1, 2]}, "e": {}}, "b": {"x": 1.0, "y": {"z": [1]}, "e": {}}}
    assert differences(trees) == {"x": {"a": 1, "b": 1.0}, "y.z": {"a": [1, 2], "b": [1]}}
    deep = {"a": {"l": [{"k": 1}, 2]}, "b": {"l": [{"k": 3}, 2], "m": {"n": 1}}}
    assert differences(deep) == {"l[0].k": {"a": 1, "b": 3}, "m": {"a": None, "b": {"n": 1}}}
