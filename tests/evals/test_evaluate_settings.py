"""What a user may choose: settings reach the tasks and the keys of kept results; paths that are heard."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import braidlm
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model, save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.results import TaskResult
from braidlm.evals.tasks import TASKS, Task
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.outcome import Outcome


class Counting:
    """Open data that says how often and with what it was asked."""

    count, sha256 = 1, "0" * 64

    def __init__(self) -> None:
        self.asked: list[Settings] = []

    def check(self, settings: Settings) -> None:
        if settings.seeds > 100:
            raise BraidError(f"that is too many seeds: {settings.seeds}")

    def evaluate(self, task: str, model: EvaluatedModel, advance: Any = None) -> TaskResult:
        self.asked.append(model.settings)
        return TaskResult(task, "m", float(model.settings.seeds), 1, None)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counting:
    """A task `counting` whose score depends on one of the settings."""
    data = Counting()

    class CountingTask(Task):
        description, size, licence, metric, fetch = "d", "s", "l", "m", "f"
        locations = ("counting",)
        uses = ("seeds",)

        def open(self, place: Path) -> Any:
            return data

    monkeypatch.setitem(TASKS.parts, "counting", CountingTask)
    (tmp_path / "data" / "counting").mkdir(parents=True)
    monkeypatch.setenv("BRAID_DATA", str(tmp_path / "data"))
    return data


Verb = Callable[..., Outcome]


def test_settings_come_from_the_command_line(eval_verb: Verb, counting: Counting, runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = eval_verb(runs / "one", "counting", "--seeds", 5, "--allow-code-execution", "--out", out, "--quiet")
    assert (shown.code, shown.err) == (0, "")
    assert counting.asked == [Settings(seeds=5, allow_code_execution=True)]
    assert json.loads((out / "results.json").read_text())["tasks"]["counting"]["settings"] == {"seeds": 5}


def test_only_settings_that_a_task_uses_make_another_result(counting: Counting, runs: Path, tmp_path: Path) -> None:
    def score(**given: Any) -> float:
        found = braidlm.eval(runs / "one", "counting", settings=Settings(**given), out=tmp_path / "out", device="cpu")
        return found.of("one").tasks["counting"].score

    assert [score(), score(seeds=2), score(seeds=2, finetune_epochs=9), score()] == [1.0, 2.0, 2.0, 1.0]
    assert len(counting.asked) == 2


def test_a_task_may_refuse_settings_before_anything_is_scored(
    eval_verb: Verb, counting: Counting, runs: Path, tmp_path: Path
) -> None:
    shown = eval_verb(runs / "one", "counting", "--seeds", 101, "--out", tmp_path / "out")
    assert (shown.code, shown.out) == (2, "")
    assert "that is too many seeds: 101" in shown.err
    assert not counting.asked


def test_settings_without_effect_are_said(eval_verb: Verb, runs: Path, data: Path, tmp_path: Path) -> None:
    shown = eval_verb(runs / "one", "blimp_fast", "--seeds", 2, "--data", data, "--out", tmp_path / "out", "--quiet")
    assert shown.code == 0
    assert "warning: no task that is evaluated has a use for seeds" in shown.err


@pytest.mark.parametrize("name", list(TASKS))
def test_tasks_use_settings_that_exist(name: str) -> None:
    assert set(TASKS[name].uses) <= {field.name for field in fields(Settings)}


def test_a_suite_is_its_tasks(eval_verb: Verb, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from braidlm.evals.tasks.task import SUITES

    monkeypatch.setitem(SUITES, "two_tasks", ("blimp", "bits_per_byte"))
    shown = eval_verb(runs / "one", "two_tasks", "--data", tmp_path / "none", "--out", tmp_path / "out")
    assert "blimp: its data is not in" in shown.err
    assert "bits_per_byte: its data is not in" in shown.err
    assert "Did you mean 'babylm_fast'?" in eval_verb(runs / "one", "babylm_fas").err


@pytest.fixture(scope="module")
def braided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two paths that say different things."""
    torch.manual_seed(0)
    tokenizer = bytes_tokenizer()
    stages = [
        "block",
        {"parallel": {"layers": 1, "paths": ["stories", "maths"], "join": "shared_linear"}},
        "block",
    ]
    model = {"width": 16, "context": 64, "block": {"attention": {"kind": "softmax", "heads": 2}}, "stages": stages}
    made = BraidForCausalLM(BraidConfig(model, tokenizer.vocab_size))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0)
    return save_model(made, tmp_path_factory.mktemp("braided") / "both", tokenizer, {"made_by": "a test"})


def test_only_the_paths_that_are_asked_for_are_heard(
    eval_verb: Verb, braided: Path, data: Path, tmp_path: Path
) -> None:
    def score(*arguments: object) -> dict[str, Any]:
        options = ("--data", data, "--out", tmp_path / "out", "--json")
        return eval_verb(braided, "bits_per_byte", *options, *arguments).json()["models"][0]

    both, stories = score(), score("--paths", "stories")
    assert (both["paths"], stories["paths"]) == (None, ["stories"])
    assert both["tasks"]["bits_per_byte"]["score"] != stories["tasks"]["bits_per_byte"]["score"]
    assert len(list((tmp_path / "out" / "kept").iterdir())) == 2, "each is kept by itself"
    alone = save_model(load_model(braided, paths=["stories"]), tmp_path / "alone", bytes_tokenizer(), {"made_by": "x"})
    found = braidlm.eval(alone, "bits_per_byte", data=data, device="cpu")
    assert found.models[0].tasks["bits_per_byte"].score == stories["tasks"]["bits_per_byte"]["score"]


def test_paths_that_do_not_exist(eval_verb: Verb, braided: Path, runs: Path, data: Path, tmp_path: Path) -> None:
    options = ("bits_per_byte", "--data", data, "--out", tmp_path / "out")
    shown = eval_verb(braided, *options, "--paths", "storys")
    assert shown.code == 2
    assert "storys" in shown.err
    assert "stories" in shown.err
    assert eval_verb(runs / "one", *options, "--paths", "stories").code == 2
    assert not (tmp_path / "out").exists()
