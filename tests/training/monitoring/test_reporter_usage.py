"""How evenly routers use their choices: numbers by hand, records of a run, and the one warning."""

import math
from pathlib import Path
from typing import Any

import pytest

from braidlm.training.monitoring.reporter import USAGE_PATIENCE, UsageMonitor, lowest_usage, usage_entropy
from braidlm.training.train import train
from tests.training.tiny_runs import records, tiny_recipe

EVEN, LOST = [0.25, 0.25, 0.25, 0.25], [0.5, 0.3, 0.19, 0.01]


def test_entropy_and_lowest_by_hand() -> None:
    assert usage_entropy(EVEN) == pytest.approx(1.0)
    assert usage_entropy([1.0, 0.0]) == 0.0
    assert usage_entropy([0.5, 0.5, 0.0]) == pytest.approx(math.log(2) / math.log(3))
    assert usage_entropy([1.0]) == 1.0, "one choice is used as evenly as can be"
    assert lowest_usage(EVEN) == 1.0
    assert lowest_usage(LOST) == pytest.approx(0.04)
    assert lowest_usage([1.0, 0.0]) == 0.0


def test_a_lost_choice_is_told_once_and_only_when_it_stays_lost() -> None:
    monitor = UsageMonitor({"a": ["one", "two", "three", "four"]})
    for _ in range(USAGE_PATIENCE - 1):
        assert monitor.update({"a": LOST, "b": EVEN}) is None
    assert monitor.update({"a": EVEN, "b": EVEN}) is None, "it came back"
    messages = [monitor.update({"a": LOST, "b": EVEN}) for _ in range(3 * USAGE_PATIENCE)]
    warnings = [text for text in messages if text is not None]
    assert len(warnings) == 1
    assert messages[USAGE_PATIENCE - 1] == warnings[0]
    assert "below 5% of an even share in 10 records in a row): a (four)." in warnings[0]
    assert "a larger weight of a balance loss spreads the tokens, such as `losses: {switch: 0.2}`" in warnings[0]
    more = [monitor.update({"a": LOST, "b": LOST}) for _ in range(USAGE_PATIENCE)]
    assert more[-1] is not None
    assert "b (choice 4)" in more[-1]
    assert "a (" not in more[-1], "warned before"


def collapsing(stories: Path, out: Path, losses: dict[str, float]) -> dict[str, Any]:
    join = {"kind": "gumbel_v1", "sample": "softmax", "losses": losses}
    model = {"stages": [{"parallel": {"paths": 2, "join": join}}]}
    training = {"budget": 30, "optimizer": {"lr": 0.05}}
    rarely = {"every": "100 steps"}
    changes = {"training": training, "checkpoints": rarely, "validation": rarely, "log": {"every": 1}}
    return tiny_recipe({"stories": stories}, out, model=model, **changes)


def test_a_run_records_both_and_warns_of_a_router_that_collapses(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(collapsing(stories, tmp_path / "run", {"load_balance_as_printed": 100.0}))
    lines = records(tmp_path / "run", "train")
    for line in lines:
        for router, shares in line["usage"].items():
            assert line["entropy"][router] == pytest.approx(usage_entropy(shares), abs=1e-4)
            assert line["lowest"][router] == pytest.approx(lowest_usage(shares), abs=1e-4)
    assert all(share < 0.05 for share in lines[-1]["lowest"].values()), "as printed, the loss rewards collapse"
    warned = capsys.readouterr().err
    assert warned.count("routers that hardly use one of their choices") == 1
    assert "join (path_" in warned
    train(collapsing(stories, tmp_path / "even", {"load_balance": 100.0}))
    assert "routers that hardly use" not in capsys.readouterr().err
    assert all(share > 0.5 for share in records(tmp_path / "even", "train")[-1]["lowest"].values())
