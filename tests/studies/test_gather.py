"""The table of runs: what it reads of each folder, and in which columns runs differ."""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.runs import read_metrics
from braidlm.core.report.report import Facts, Picture, Quote, Table
from braidlm.studies.gather import gather_runs, run_report, run_table
from braidlm.studies.results import read_runs
from braidlm.studies.run_page import run_page
from braidlm.training.train import train
from tests.training.tiny_runs import records, tiny_recipe


@pytest.fixture(scope="module")
def trained(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs trained apart, in different folders."""
    folder = tmp_path_factory.mktemp("gathered") / "runs"
    short: dict[str, Any] = {"training": {"budget": "4 steps"}, "validation": {"every": "2 steps"}}
    train(tiny_recipe({"stories": stories}, folder / "a", **short), device="cpu")
    other = tiny_recipe({"stories": stories}, folder / "deep/b", seed=8, **short)
    other["training"]["batch"] = 2
    train(other, device="cpu")
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def test_a_run(runs: Path) -> None:
    (run,) = read_runs([runs / "a"])
    scores = {record["step"]: record["bits_per_byte"] for record in records(runs / "a", "validation")}
    assert (run.name, run.seed, run.state, run.steps) == ("a", 3, "done", 4)
    assert run.bits_per_byte == scores[4]
    assert run.best.step == min(scores, key=scores.__getitem__)
    assert run.best.value == min(scores.values())
    assert run.words == records(runs / "a", "train")[-1]["words"]
    assert run.wall_seconds > run.seconds > 0
    steps = [{"tokens": 0}, *read_metrics(runs / "a", "train")]
    took = [(now["tokens"] - before["tokens"]) / now["tokens_per_second"] for before, now in pairwise(steps)]
    assert run.seconds == pytest.approx(sum(took))
    assert run.hardware is not None
    assert "cores" in run.hardware
    assert run.parameters is not None
    assert run.flops_per_token is not None


def test_the_best_may_not_be_the_last(runs: Path) -> None:
    metrics = runs / "a/metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "validation":
            line["bits_per_byte"] = float(line["step"])
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = read_runs([runs / "a"])
    assert (run.bits_per_byte, run.best.value, run.best.step) == (4.0, 2.0, 2)


def test_the_files(runs: Path, tmp_path: Path) -> None:
    gathered = gather_runs([runs / "deep", runs / "a", runs / "a"], tmp_path / "table")
    assert [run.name for run in gathered] == ["a", "deep/b"]
    rows = list(csv.DictReader((tmp_path / "table/runs.csv").read_text().splitlines()))
    assert [row["training.batch"] for row in rows] == ["4", "2"]
    assert [row["seed"] for row in rows] == ["3", "8"]
    assert float(rows[0]["bits_per_byte"]) == gathered[0].bits_per_byte
    assert "training.optimizer.lr" not in rows[0]  # in which they do not differ
    text = (tmp_path / "table/runs.md").read_text()
    assert text.startswith("# 2 runs\n\n| run | bits per byte | best | best at step | seed | training.batch |")
    page = (tmp_path / "table/runs.html").read_text()
    assert "The recipe of deep/b" in page


def test_runs_that_differ_in_their_seeds_are_one_recipe_without_a_seed_in_its_name(runs: Path) -> None:
    (run, _) = read_runs([runs])
    seeds = [replace(run, name=f"lr=1,seed={seed}", recipe=run.recipe | {"seed": seed}) for seed in (1, 2)]
    report = run_report(seeds, "sweep")
    assert report.verdict.startswith("lr=1 has ")
    (chart,) = [part.chart for part in report.parts if isinstance(part, Picture)]
    assert list(chart.values) == ["lr=1"]


def test_half(runs: Path) -> None:
    gathered = read_runs([runs])
    halved = [replace(run, recipe=run.recipe | {"validation": {"half": "choose"}}) for run in gathered]
    assert "bits per byte, choose half" in run_table(halved).columns
    assert "bits per byte" in run_table([gathered[0], halved[1]]).columns


def test_a_failure_is_told_until_the_run_goes_on(stories: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe({"stories": stories}, tmp_path / "run")
    recipe["training"] |= {"optimizer": {"lr": 1e9}, "warmup": 0}
    with pytest.raises(BraidError, match="became infinite"):
        train(recipe, device="cpu")
    (run,) = read_runs([tmp_path])
    assert run.state.startswith("failed: the loss became infinite or not a number at step")
    with open(tmp_path / "run/history.jsonl", "a") as file:
        file.write(json.dumps({"kind": "start", "time": "2026", "device": "other", "processes": 2}) + "\n")
    (run,) = read_runs([tmp_path])
    assert run.state == "unfinished"
    assert run.hardware is not None
    assert run.hardware.endswith(", then 2 x other")


def test_a_folder_without_runs(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match="there is no run in it"):
        gather_runs([tmp_path], tmp_path / "table")


def test_the_verb(runs: Path, tmp_path: Path, braid: Callable[..., Any]) -> None:
    answer = braid("compare", runs, "--out", tmp_path / "table")
    assert answer.code == 0, answer.err
    assert "deep/b" in answer.out
    assert f"{tmp_path}/table/runs.html" in answer.out
    for wrong in ([runs, "tiny/llama"], [runs, "seed=2"], [runs, "--fresh"]):
        answer = braid("compare", *wrong, "--out", tmp_path / "table")
        assert answer.code == 2
        assert "folders of runs are gathered as they are" in answer.err


def test_the_page_of_a_run(runs: Path) -> None:
    record = {"kind": "sample", "prompt": "Once", "seconds": 0}
    with open(runs / "a/metrics.jsonl", "a") as file:
        for step, text in ((2, "upon"), (3, "nothing"), (4, "a <script>")):
            file.write(json.dumps(record | {"step": step, "text": text}) + "\n")
    (run,) = read_runs([runs / "a"])
    report = run_page(run)
    assert f"`a` has {run.bits_per_byte:.4f} bits per byte on held-out text after 4 steps" in report.verdict
    drawn = {part.name: part.chart.series for part in report.parts if isinstance(part, Picture)}
    assert drawn["bits-per-byte"] == {"stories": ([p.tokens for p in run.curve], [p.value for p in run.curve])}
    assert [(part.prompt, part.text) for part in report.parts if isinstance(part, Quote)] == [
        ("Once", "upon"),
        ("Once", "a <script>"),
    ]
    (costs,) = [part.values for part in report.parts if isinstance(part, Facts)]
    assert costs["parameters"] == run.parameters
    worse = replace(run, curve=[run.curve[0], run.curve[1]._replace(value=9.0)])
    assert "It was better before" in run_page(worse).verdict
    assert "no held-out text" in run_page(replace(run, curve=[])).verdict


def test_the_verb_leaves_the_page_and_fresh_removes_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(runs / "a/recipe.yaml"), f"out={runs / 'a'}"]) == 0
    assert "Report: " in capsys.readouterr().out
    page = runs / "a/report.html"
    assert "What it cost" in page.read_text()
    page.write_text("old")
    assert main(["train", str(runs / "a/recipe.yaml"), f"out={runs / 'a'}", "--fresh"]) == 0
    assert "What it cost" in page.read_text()


def test_many_keys_that_differ_have_a_table_of_their_own(runs: Path) -> None:
    gathered = read_runs([runs])
    first, second = (
        replace(run, recipe=run.recipe | {f"key{n}": (at, n) for n in range(9)}) for at, run in enumerate(gathered)
    )
    assert run_table([first, second]).columns[:6] == [
        "run",
        "bits per byte",
        "best",
        "best at step",
        "seed",
        "parameters",
    ]
    (keys,) = [
        part
        for part in run_report([first, second], "two").parts
        if isinstance(part, Table) and part.columns[0] == "key"
    ]
    assert keys.columns == ["key", "a", "deep/b"]
    assert ["key3", "[0, 3]", "[1, 3]"] in keys.rows
    assert "key3" in run_table([first, second]).data.columns
