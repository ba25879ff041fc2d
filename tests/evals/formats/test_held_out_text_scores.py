"""What a run reports for its validation text and what `braid eval` gives for it are one number."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braidlm.data.packing.prepare import prepare_sets
from braidlm.training.train import train
from tests.outcome import Outcome

MODEL = {"width": 16, "context": 64, "block": {"attention": {"heads": 2}}, "stages": [{"block": {"layers": 1}}]}


def recipe(out: Path, data_set: dict[str, Any], tokens: int | None, half: str | None = None) -> dict[str, Any]:
    return {
        "name": "tiny",
        "out": str(out),
        "model": MODEL,
        "data": {"length": 24, "sets": {"text": data_set}},
        "training": {"budget": "3 steps", "batch": 2},
        "validation": {"every": "3 steps", "tokens": tokens, "half": half},
    }


def reported(run: Path) -> float:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["bits_per_byte"] for record in records if record["kind"] == "validation"][-1]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "text"])
def test_validation_on_other_text(packed: bool, tmp_path: Path, eval_verb: Callable[..., Outcome]) -> None:
    for name in ("train", "dev"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("\n".join(f"A line of {name}, number {n}." for n in range(60)))
        (tmp_path / name / "b.txt").write_text(f"One {name} text.\n\nWith paragraphs." * 20)
    rules = {"a*": "lines", "b*": "file"}
    prepare_sets(
        {"train": tmp_path / "train", "dev": tmp_path / "dev"},
        tmp_path / "data",
        vocab_size=300,
        separator=rules,
        workers=1,
    )
    data_set = {"path": str(tmp_path / "data/train"), "validation": str(tmp_path / "data/dev")}
    train(recipe(tmp_path / "run", data_set, None), device="cpu")
    path = tmp_path / ("data/dev" if packed else "dev")
    options = () if packed else ("--separator", "a*=lines", "--separator", "b*=file")
    outcome = eval_verb(
        tmp_path / "run",
        "bits_per_byte",
        "--data",
        f"bits_per_byte={path}",
        "--out",
        tmp_path / "e",
        "--json",
        *options,
    )
    assert outcome.code == 0, outcome.err
    (model,) = json.loads((tmp_path / "e/results.json").read_text())["models"]
    assert model["tasks"]["bits_per_byte"]["score"] == pytest.approx(reported(tmp_path / "run"), abs=1e-6)


def test_validation_on_held_out_documents(tmp_path: Path, eval_verb: Callable[..., Outcome]) -> None:
    prepare_sets({"stories": "stories"}, tmp_path / "data", documents=60, tokenizer="bytes", workers=1)
    data_set = {"path": str(tmp_path / "data/stories"), "holdout": 0.1}
    train(recipe(tmp_path / "run", data_set, 900), device="cpu")
    data = f"bits_per_byte={tmp_path}/data/stories"
    options = ("--held-out", "0.1", "--max-tokens", "900", "--out", tmp_path / "e", "--json")
    assert eval_verb(tmp_path / "run", "bits_per_byte", "--data", data, *options).code == 0
    (model,) = json.loads((tmp_path / "e/results.json").read_text())["models"]
    assert model["tasks"]["bits_per_byte"]["score"] == pytest.approx(reported(tmp_path / "run"), abs=1e-6)


@pytest.mark.parametrize("half", ["choose", "report"])
def test_validation_on_one_half(half: str, tmp_path: Path, eval_verb: Callable[..., Outcome]) -> None:
    lines = "\n".join(f"A long text without blank lines, line {n}." for n in range(1500))
    (tmp_path / "corpus").mkdir()
    for name in ("train", "dev"):
        (tmp_path / f"corpus/{name}.txt").write_text(f"{lines}\n\nA short text of {name}.")
    content = recipe(tmp_path / "run", {"folder": str(tmp_path / "corpus")}, None, half)
    content["data"] |= {"cache": str(tmp_path / "cache"), "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    train(content, device="cpu")
    data = f"bits_per_byte={tmp_path}/corpus/dev.txt"
    options = ("--half", half, "--out", tmp_path / "e", "--json")
    assert eval_verb(tmp_path / "run", "bits_per_byte", "--data", data, *options).code == 0
    (model,) = json.loads((tmp_path / "e/results.json").read_text())["models"]
    result = model["tasks"]["bits_per_byte"]
    assert result["metric"] == f"bits per byte, {half} half"
    assert result["score"] == pytest.approx(reported(tmp_path / "run"), abs=1e-6)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record.get("half") for record in records if record["kind"] == "validation"] == [half]
