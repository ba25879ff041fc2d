"""Averages of the weights: their values, and what a run validates and saves with them; its training is the same."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.core.reading import read_json
from braidlm.model.config.strict import decode, encode
from braidlm.training.features.averaging import WeightAverage, averages
from braidlm.training.loop import Trainer
from braidlm.training.recipe import TrainingConfig
from braidlm.training.train import train
from tests.training.tiny_runs import records, stopped_after, tiny_recipe, weight_bytes, weights

KINDS: dict[str, dict[str, Any]] = {
    "ema": {"kind": "ema", "rate": 0.7},
    "last": {"kind": "last", "share": 0.5},
    "last, every second": {"kind": "last", "share": 0.75, "every": 2},
}
LAST = "checkpoints/step-000012"
SHARES = {
    # The mean of three, of which each step leaves 0.7.
    str(KINDS["ema"]): [0.7**9 / 3] * 3 + [0.3 * 0.7**age for age in range(8, -1, -1)],
    str(KINDS["last"]): [0] * 6 + [1 / 6] * 6,
    str(KINDS["last, every second"]): [0] * 3 + [1 / 5, 0] * 4 + [1 / 5],
}
"""Of the weights after each of twelve steps."""


def made(model: nn.Module, spec: dict[str, Any]) -> WeightAverage:
    choice = decode(TrainingConfig, {"budget": 1, "average": spec}).average
    assert choice is not None
    return averages.build(choice, model)


def walked(average: WeightAverage, model: nn.Linear, values: list[float]) -> None:
    """A training whose weights are these, step by step."""
    for step, value in enumerate(values):
        nn.init.constant_(model.weight, value)
        average.end_step((step + 1) / len(values))


def inside(average: WeightAverage, model: nn.Linear) -> Tensor:
    with average.evaluating():
        return model.weight.detach().clone()


VALUES = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=30)


@given(values=VALUES, share=st.floats(0.05, 1), every=st.integers(1, 5))
def test_the_last_is_the_mean_of_the_last(values: list[float], share: float, every: int) -> None:
    model = nn.Linear(1, 1, bias=False)
    average = made(model, {"kind": "last", "share": share, "every": every})
    walked(average, model, values)
    window = [v for i, v in enumerate(values) if (i + 1) / len(values) > 1 - share + 1e-9][::every]
    assert average.count == len(window) > 0
    assert inside(average, model).item() == pytest.approx(sum(window) / len(window), abs=1e-4)
    assert model.weight.item() == pytest.approx(values[-1]), "outside it has its own"


@given(values=VALUES, rate=st.floats(0, 0.99))
def test_an_exponential_average_is_a_mean_at_first(values: list[float], rate: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    average = made(model, {"kind": "ema", "rate": rate})
    walked(average, model, values)
    expected = 0.0
    for count, value in enumerate(values, 1):
        new = max(1 - rate, 1 / count)
        expected = (1 - new) * expected + new * value
    assert inside(average, model).item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("budget", "begins"), [(16, 12), (40, 20)], ids=["while it is open", "before it opens"])
def test_with_a_larger_budget_the_last_are_those_of_the_larger(
    budget: int, begins: int, stories: Path, tmp_path: Path
) -> None:
    """Steps of the smaller budget's end do not count, as the learning rate goes on where the larger one has it."""
    recipe = tiny_recipe({"stories": stories}, tmp_path, training={"average": {"kind": "last", "share": 0.5}})
    assert read_json(train(recipe).model / "lineage.json")["training"]["averaged"] == 6
    recipe["training"]["budget"] = budget
    assert read_json(train(recipe).model / "lineage.json")["training"]["averaged"] == budget - begins


def test_weights_keep_their_memory_and_frozen_ones_are_left_alone() -> None:
    model = nn.Bilinear(2, 2, 2)
    model.bias.requires_grad_(False)
    average = made(model, {"kind": "ema"})
    assert list(average.parameters) == ["weight"]
    address, before = model.weight.data_ptr(), model.weight.detach().clone()
    average.end_step(0.1)
    nn.init.zeros_(model.weight)
    with contextlib.suppress(KeyError), average.evaluating():
        assert torch.equal(model.weight, before)
        raise KeyError  # an error inside leaves the training its weights too
    assert not model.weight.any()
    assert model.weight.data_ptr() == address


def test_half_precision_is_averaged_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    average = made(model, {"kind": "last", "share": 1.0})
    walked(average, model, [1.0] * 299 + [1.5])
    assert average.tensors[0].dtype == torch.float32
    assert average.tensors[0].item() == pytest.approx(1 + 0.5 / 300, abs=1e-5)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"kind": "ema", "rate": 1}, "average.rate: expected a number of at least 0 and below 1, got 1"),
        ({"kind": "last", "share": 0}, "average.share: expected a number above 0 and at most 1, got 0"),
        ("emu", "average: unknown average of weights 'emu'. Did you mean 'ema'?"),
        ({"rate": 0.9}, "average: no kind of average of weights is given. There are: ema, last"),
    ],
    ids=str,
)
def test_wrong_options(spec: Any, problem: str) -> None:
    with pytest.raises(BraidError) as caught:
        decode(TrainingConfig, {"budget": 1, "average": spec})
    assert problem in str(caught.value)


@pytest.fixture(scope="module")
def plain(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Tensor]]]:
    """A run without an average, and its weights after each step."""
    folder, seen = tmp_path_factory.mktemp("plain") / "run", []
    step = Trainer._step

    def watched(self: Trainer) -> None:
        step(self)
        seen.append({name: p.detach().clone() for name, p in self.model.named_parameters()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", watched)
        train(tiny_recipe({"stories": stories}, folder))
    return folder, seen


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
def test_the_training_is_the_same_and_its_end_is_the_average(
    spec: dict[str, Any],
    stories: Path,
    plain: tuple[Path, list[dict[str, Tensor]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without, steps = plain
    recipe = tiny_recipe({"stories": stories}, tmp_path / "run", training={"average": spec})
    folder = train(recipe).folder
    out = capsys.readouterr().out
    assert records(folder, "train") == records(without, "train")
    saved, last = weights(folder / LAST), weights(without / LAST)
    shares = SHARES[str(spec)]
    for name, tensor in saved.items():
        mean = sum(share * each[name] for share, each in zip(shares, steps, strict=True))
        torch.testing.assert_close(tensor, mean, atol=1e-6, rtol=1e-5)
    assert any(not torch.equal(tensor, last[name]) for name, tensor in saved.items())
    own = load_file(folder / "states/step-000012/average.safetensors")
    assert all(torch.equal(own[f"own.{name}"], tensor) for name, tensor in last.items())
    count = sum(share > 0 for share in shares)
    assert read_json(folder / LAST / "lineage.json")["training"]["averaged"] == count
    (end,) = records(folder, "last_weights")
    validation, other = records(folder, "validation")[-1], records(without, "validation")[-1]
    assert validation["averaged"] == count
    assert validation["bits_per_byte"] != other["bits_per_byte"] == pytest.approx(end["bits_per_byte"], abs=1e-9)
    assert f"step 12: validation bits per byte of averaged weights ({count}): stories" in out
    assert f"Without averaging: {end['bits_per_byte']:.3f} bits per byte, in place of " in out


def test_before_the_window_opens_weights_are_the_trainings_own(
    stories: Path, plain: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    recipe = tiny_recipe({"stories": stories}, tmp_path / "run", training={"average": {"kind": "last", "share": 0.5}})
    folder, early = train(recipe).folder, "checkpoints/step-000004"
    assert weight_bytes(folder / early) == weight_bytes(plain[0] / early)
    assert "averaged" not in read_json(folder / early / "lineage.json")["training"]
    assert "averaged" not in records(folder, "validation")[0]


def muon_recipe(stories: Path, folder: Path, kind: str) -> dict[str, Any]:
    training = {"average": KINDS[kind], "optimizer": {"kind": "muon"}}
    return tiny_recipe({"stories": stories}, folder, training=training)


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, stories: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The kind of an average, and a run with it that was never stopped."""
    return request.param, train(muon_recipe(stories, tmp_path_factory.mktemp("whole") / "run", request.param)).folder


@pytest.mark.parametrize("stop", [3, 9], ids=["before the window", "inside of it"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    whole: tuple[str, Path], stop: int, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, whole_run = whole
    again = muon_recipe(stories, tmp_path / "again", kind)
    stopped_after(stop, monkeypatch, again)
    folder = train(again).folder
    for name in ("step-000004", "step-000008", "step-000012"):
        assert weight_bytes(folder / "checkpoints" / name) == weight_bytes(whole_run / "checkpoints" / name)
    assert records(folder, "train") == records(whole_run, "train")
    assert records(folder, "validation") == records(whole_run, "validation")
    for file in ("average.safetensors", "optimizer.safetensors"):
        state = f"states/step-000012/{file}"
        assert (folder / state).read_bytes() == (whole_run / state).read_bytes()


def test_averaged_adapters_go_on_exactly(
    stories: Path, plain: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where adapters are trained, these are averaged, and a checkpoint has them merged."""

    def recipe(folder: str) -> dict[str, Any]:
        training = {"average": "ema", "lora": {"rank": 2}, "budget": "8 steps"}
        made = tiny_recipe({"stories": stories}, tmp_path / folder, training=training, start_from=str(plain[0]))
        return {key: value for key, value in made.items() if key != "model"}

    whole = train(recipe("whole")).model
    stopped_after(5, monkeypatch, recipe("again"))
    again = train(recipe("again")).model
    assert weight_bytes(again) == weight_bytes(whole)
    adapter = "adapter/adapter_model.safetensors"
    assert (again / adapter).read_bytes() == (whole / adapter).read_bytes()
    own = load_file(whole.parents[1] / "states" / whole.name / "average.safetensors")
    averages_and_own = [key for key in own if "lora" in key]
    assert len(averages_and_own) == len(own) - 1 > 2, "nothing else is trained"


def test_the_option_is_read_back() -> None:
    for spec in KINDS.values():
        config = decode(TrainingConfig, {"budget": 1, "average": spec})
        assert decode(TrainingConfig, encode(config)) == config
