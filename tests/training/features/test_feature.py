"""The contract of training features: their keys, what they refuse, when they act, and that nobody names them."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch
from braidlm.model.config.strict import decode
from braidlm.training import loop, train
from braidlm.training.features import feature as contract
from braidlm.training.features.feature import Feature, Setup, feature, features, make_features, with_features
from braidlm.training.recipe import TrainingConfig, decode_recipe
from braidlm.training.step import step
from braidlm.training.step.parallel import Rank
from tests.tiny_models import tiny_model
from tests.training.tiny_runs import stopped_after, tiny_recipe, weight_bytes

KNOWN = {"braidlm.training.features.feature", "braidlm.training.features.extra_losses"}


@pytest.mark.parametrize("module", [loop, step, train])
def test_the_loop_names_no_feature(module: Any) -> None:
    tree = ast.parse(inspect.getsource(module))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name and name.startswith("braidlm.training.features")} <= KNOWN
    text = inspect.getsource(module)
    keys = {key for name in features if features[name].Keys for key in features[name].Keys.__annotations__}
    assert len(keys) >= 8
    assert not [key for key in keys if f"training.{key}" in text]


@pytest.mark.parametrize("name", list(features))
def test_every_feature_says_what_it_is(name: str) -> None:
    found = features[name]
    assert found.name == name
    assert found.__doc__
    assert set(found.excludes) <= set(features)


def test_all_problems_are_found_at_once(stories: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe({"stories": stories}, tmp_path, data={"pauses": 0.1, "chunking": "consecutive"})
    recipe["training"] |= {"lengths": [{"until": 0.5, "length": 7}], "losses": ["masked"]}
    with pytest.raises(BraidError) as caught:
        decode_recipe(recipe)
    for problem in (
        "32 tokens, do not make rows of 7",
        "rows with a memory of the text before them keep their length",
        "pauses are counted for whole sequences",
        "the loss 'masked' and training.memory do not go together",
        "the loss 'masked' and training.lengths do not go together",
        "Nothing was started.",
    ):
        assert problem in str(caught.value)


def test_a_key_of_a_feature_is_decoded_strictly() -> None:
    with pytest.raises(BraidError, match=r"training: unknown key 'averag'. Did you mean 'average'\?"):
        decode(TrainingConfig, {"budget": 1, "averag": "ema"}, "training")
    with pytest.raises(BraidError, match=r"training.lengths\[0\].length: expected a whole number"):
        decode(TrainingConfig, {"budget": 1, "lengths": [{"until": 0.5, "length": "8"}]}, "training")


class Counting(Feature):
    """Counts the calls of its hooks, and saves how many steps there were."""

    file = "counting.safetensors"
    calls: list[str]

    @dataclass
    class Keys:
        counting: bool = False

    def __init__(self, setup: Setup):
        self.steps, self.calls = torch.zeros(()), []
        MADE.append(self)

    def begin_step(self, step: int, share: float) -> bool:
        self.calls.append(f"begin {step} {share:.2f}")
        return False

    def read_batch(self, batch: Batch, share: float = 0.0) -> Batch:
        self.calls.append(f"batch {share:.2f}")
        return batch

    def inputs(self, index: int, parts: int) -> dict[str, Any]:
        self.calls.append(f"inputs {index} of {parts}")
        return {}

    def read_pass(self, found: Any) -> None:
        self.calls.append("pass")

    def end_update(self) -> None:
        self.calls.append("update")

    def end_step(self, share: float) -> None:
        self.calls.append(f"end {share:.2f}")
        self.steps += 1

    def state(self) -> dict[str, Tensor]:
        return {"steps": self.steps}

    def load_state(self, saved: Any) -> None:
        self.steps.copy_(saved["steps"])


MADE: list[Counting] = []


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if its file were in the folder, but that every run has it."""
    monkeypatch.setattr(features, "parts", dict(features.parts))
    feature("training.counting")(Counting)
    monkeypatch.setattr(Counting, "is_given", classmethod(lambda cls, training: True))
    MADE.clear()
    yield
    contract._defaults.cache_clear()


@pytest.mark.usefixtures("counting")
def test_a_feature_acts_in_its_places_and_goes_on(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe({"stories": stories}, tmp_path / "run", training={"batch": 2, "accumulation": 2})
    stopped_after(5, monkeypatch, recipe)
    passes = ["inputs 0 of 2", "pass", "inputs 1 of 2", "pass"]
    first, *_ = MADE
    assert first.calls[:8] == ["begin 0 0.00", "batch 0.08", *passes, "update", "end 0.08"]
    run = train.train(recipe)
    assert MADE[-1].calls[0] == "begin 5 0.42"
    assert MADE[-1].steps == 12
    plain = train.train({**recipe, "out": str(tmp_path / "plain")})
    assert weight_bytes(run.model) == weight_bytes(plain.model)


@pytest.mark.usefixtures("counting")
def test_its_keys_are_keys_of_the_training() -> None:
    made: Any = with_features(make_dataclass("Section", [("budget", int)]))
    assert decode(made, {"budget": 1, "counting": True}).counting is True
    with pytest.raises(BraidError, match="Did you mean 'counting'"):
        decode(made, {"budget": 1, "countin": True})
    setup = Setup(tiny_model(), decode(TrainingConfig, {"budget": 1}), Rank(0, 1, torch.device("cpu")), torch.float32)
    assert [one.name for one in make_features(setup)] == ["training.counting", "training.dropout"]
