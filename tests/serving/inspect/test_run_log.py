"""A run's curves while they are written: in parts, cut off, replaced, odd and large."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from braidlm.serving.inspect import run_log
from braidlm.serving.inspect.run_log import RunLog


def line(kind: str, step: int, **facts: Any) -> str:
    return json.dumps({"kind": kind, "step": step, **facts}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text("training: {budget: 30 steps}\n")
    return tmp_path


def write(folder: Path, *lines: str) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("".join(lines))


def read(log: RunLog, after: str | None = None) -> dict[str, Any]:
    return log.metrics(after)


def named(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in zip(answer["columns"], row, strict=True) if value is not None}
        for row in answer["rows"]
    ]


def test_curves_grow_while_they_are_read(folder: Path) -> None:
    log = RunLog("a", "a", folder)
    nothing = read(log)
    assert (nothing["rows"], nothing["state"]) == ([], "waiting")
    write(folder, line("train", 10, loss=2.5, epochs={"a": 0.1}), '{"kind": "train", "step": 20, "lo')
    first = read(log, nothing["next"])
    assert named(first) == [{"step": 10, "kind": "train", "loss": 2.5}]
    assert not first["reset"]
    write(folder, 'ss": 2.0}\n', line("validation", 20, bits_per_byte=1.5, sets={"dev": {"perplexity": 9, "bytes": 3}}))
    second = read(log, first["next"])
    assert named(second) == [
        {"step": 20, "kind": "train", "loss": 2.0},
        {"step": 20, "kind": "validation", "bits_per_byte": 1.5, "perplexity/dev": 9},
    ]
    assert read(log, second["next"])["rows"] == []
    write(folder, line("validation", 20, bits_per_byte=1.4))
    assert len(read(log, second["next"])["rows"]) == 1, "a later record of a step that was read already"
    assert len(read(log)["rows"]) == 4


def test_routing_health_has_a_column_for_each_router(folder: Path) -> None:
    write(folder, line("train", 1, loss=1.0, usage={"r": [0.5, 0.5]}, entropy={"r": 0.9}, lowest={"r": 0.7}))
    (row,) = named(read(RunLog("a", "a", folder)))
    assert row == {"step": 1, "kind": "train", "loss": 1.0, "entropy/r": 0.9, "lowest/r": 0.7}


def test_a_run_that_went_on_from_an_earlier_checkpoint_is_read_anew(folder: Path) -> None:
    log = RunLog("a", "a", folder)
    write(folder, *(line("train", step, loss=1.0) for step in range(5)))
    before = read(log)["next"]
    (folder / "new").write_text(line("train", 0, loss=1.0) + line("train", 1, loss=0.5))
    os.replace(folder / "new", folder / "metrics.jsonl")
    again = read(log, before)
    assert again["reset"]
    assert [row["step"] for row in named(again)] == [0, 1]
    assert not read(log, again["next"])["reset"]


@pytest.mark.parametrize("after", ["0.999999", "x", "0.-1", "1.2.3", "９.１", ""])
def test_odd_cursors_do_no_harm(folder: Path, after: str) -> None:
    write(folder, line("train", 1, loss=1.0))
    assert len(read(RunLog("a", "a", folder), after)["rows"]) in (0, 1)


def test_states(folder: Path) -> None:
    log = RunLog("a", "a", folder)
    assert log.state == "waiting"
    write(folder, line("train", 29, loss=1.0))
    assert log.state == "interrupted"
    write(folder, line("train", 30, loss=1.0))
    assert log.state == "done"
    assert log.summary()["step"] == 30
    (folder / "recipe.yaml").write_text("training: {budget: 4000 steps}\n")
    assert (log.state, log.summary()["budget"]) == ("interrupted", "4k steps")
    (folder / "recipe.yaml").write_text("training: [")
    assert log.summary()["budget"] is None


def test_a_run_at_work_is_training(folder: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert RunLog("a", "a", folder).state == "training"
    os.close(handle)


def test_what_is_no_record_is_left_out(folder: Path) -> None:
    odd = ["\n", "[1]\n", "{\n", '{"kind": "train"}\n', '{"kind": "train", "step": "1"}\n', '{"kind": [], "step": 1}\n']
    odd += ["[" * 5000 + "\n", '{"kind": "train", "step": true}\n', "\xff\n"]
    write(folder, *odd, line("train", 1, loss=float("nan"), norm=float("inf"), name="text"))
    assert named(read(RunLog("a", "a", folder))) == [{"step": 1, "kind": "train"}]


def test_large_files_are_read_in_parts_and_thinned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "MAX_READ", 2000)
    monkeypatch.setattr(run_log, "MAX_LINE", 1500)
    monkeypatch.setattr(run_log, "MAX_ROWS", 40)
    monkeypatch.setattr(run_log, "ROWS_AT_ONCE", 25)
    write(folder, *(line("train", step, loss=1.0) for step in range(50)), "x" * 5000, "\n", line("train", 50, loss=1.0))
    write(folder, line("validation", 50, bits_per_byte=1.0))
    log, seen, after = RunLog("a", "a", folder), [], None
    for _ in range(20):
        answer = read(log, after)
        assert len(answer["rows"]) <= 25
        seen += [row["step"] for row in named(answer)]
        after = answer["next"]
        if not answer["more"]:
            break
    assert seen == sorted(seen)
    assert seen[-2:] == [50, 50], "what follows a line that is too long is read"
    assert len(log._curves.rows) <= 40


def test_a_pipe_or_a_link_in_place_of_the_metrics_is_not_read(folder: Path) -> None:
    log = RunLog("a", "a", folder)
    os.mkfifo(folder / "metrics.jsonl")
    assert read(log)["rows"] == []
    os.unlink(folder / "metrics.jsonl")
    (folder / "elsewhere").write_text(line("train", 1, loss=1.0))
    (folder / "metrics.jsonl").symlink_to(folder / "elsewhere")
    assert read(log)["rows"] == []


def test_samples_are_bounded(folder: Path) -> None:
    log = RunLog("a", "a", folder)
    write(folder, *(line("sample", step, prompt="<b>", text="x" * 20_000) for step in range(300)))
    samples = log.samples()
    assert (len(samples), samples[-1]["step"], len(samples[0]["text"])) == (200, 299, 10_000)
    assert samples[0]["prompt"] == "<b>"
