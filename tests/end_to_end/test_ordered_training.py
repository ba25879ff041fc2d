"""A curriculum in a run: the order is recorded, and a run that is stopped goes on in it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.errors import BraidError
from braidlm.data.loading.order import ByLength, BySurprisal
from braidlm.training.loop import Trainer
from braidlm.training.train import train
from tests.training.tiny_runs import records, tiny_recipe, weight_bytes


def recipe(data: dict[str, Path], out: Path, **order: Any) -> dict[str, Any]:
    return tiny_recipe(data, out, data={"order": {"kind": "surprisal", **order}}, training={"budget": "800 words"})


@pytest.mark.parametrize("pacing", ["sorted", "root"])
def test_a_run_goes_on_in_its_order(
    pacing: str, stories: Path, maths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"stories": stories, "maths": maths}
    whole = train(recipe(data, tmp_path / "whole", pacing=pacing))
    step = Trainer._step

    def stopped(self: Trainer) -> None:
        step(self)
        if self.progress.steps in (3, 8):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_step", stopped)
    assert not train(recipe(data, tmp_path / "run", pacing=pacing)).finished
    monkeypatch.setattr(BySurprisal, "scores", None)  # what goes on reads its record
    assert not train(recipe(data, tmp_path / "run", pacing=pacing)).finished
    run = train(recipe(data, tmp_path / "run", pacing=pacing))
    assert run.finished
    assert weight_bytes(run.model) == weight_bytes(whole.model)
    assert records(run.folder) == records(whole.folder)
    files = [sorted(p.relative_to(f) for p in (f / "order").iterdir()) for f in (run.folder, whole.folder)]
    assert files[0] == files[1]
    assert [str(file) for file in files[0]] == ["order/maths.tsv", "order/order.json", "order/stories.tsv"]
    for file in files[0]:
        assert (run.folder / file).read_bytes() == (whole.folder / file).read_bytes()


def test_the_easiest_come_first(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shortest documents first, a chunk has more of them, and more ends, than with the longest."""
    ends: dict[bool, int] = {}
    step = Trainer._step
    for longest_first in (False, True):

        def counted(self: Trainer, longest_first: bool = longest_first) -> None:
            draw = self.loader.next_batch

            def next_batch(*args: Any) -> Any:
                batch = draw(*args)
                ends[longest_first] = int((batch.inputs == self.data.tokenizer.eos_id).sum())
                return batch

            monkeypatch.setattr(self.loader, "next_batch", next_batch)
            step(self)

        monkeypatch.setattr(Trainer, "_step", counted)
        order = {"order": {"kind": "length", "descending": longest_first}}
        out = tmp_path / str(longest_first)
        train(tiny_recipe({"stories": stories}, out, data=order, training={"budget": 1, "batch": 16}))
    assert ends[False] > ends[True]


def test_a_fresh_run_has_a_fresh_order_and_another_order_is_another_run(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(recipe({"stories": stories}, tmp_path / "run"))
    assert json.loads((run.folder / "order" / "order.json").read_text())["stories"]["kind"] == "surprisal"
    other = recipe({"stories": stories}, tmp_path / "run", kind="length")
    with pytest.raises(BraidError, match=r"data.order.kind: surprisal -> length"):
        train(other)
    train(other, fresh=True)
    assert json.loads((run.folder / "order" / "order.json").read_text())["stories"]["kind"] == "length"
    plain = tiny_recipe({"stories": stories}, tmp_path / "run", training={"budget": 1})
    monkeypatch.setattr(ByLength, "scores", None)
    train(plain, fresh=True)
    assert not (run.folder / "order").exists()


@pytest.mark.parametrize(
    ("budget", "pacing", "warned"),
    [("2 steps", "sorted", True), ("99 words", "sorted", True), ("2 steps", "linear", False), ("2 steps", None, False)],
)
def test_a_budget_that_ends_within_the_order_is_told(
    budget: str, pacing: str | None, warned: bool, stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = "shuffled" if pacing is None else {"kind": "length", "pacing": pacing}
    changes: dict[str, Any] = {"data": {"order": order}, "training": {"budget": budget}}
    train(tiny_recipe({"stories": stories}, tmp_path / "run", **changes))
    assert ("the last ones are never read" in capsys.readouterr().err) == warned
