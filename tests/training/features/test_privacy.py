"""DP-SGD: gradients of single rows, shortened, with noise; steps and their epsilon; and what would mix rows."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.data.loading.chunking import Windows
from braidlm.data.loading.config import DataConfig, MixtureConfig
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.open_data import open_data
from braidlm.data.loading.streams import random_permutation, raw_bits
from braidlm.model.config.strict import decode
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.stacked import StackedLinear
from braidlm.training.amounts import Amount
from braidlm.training.features import privacy as privacy_feature
from braidlm.training.features.feature import Setup
from braidlm.training.features.privacy import Privacy, PrivacyConfig
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.step import Stepper
from braidlm.training.train import train
from braidlm.training.trainable import TrainableBraid
from tests.data.packed_sets import stream
from tests.tiny_models import VOCABULARY, tiny_model
from tests.training.step.test_step import HERE
from tests.training.tiny_runs import records, stopped_after, tiny_recipe, weight_bytes

pytest.importorskip("opacus", reason="it counts the noise")
ROWS, LENGTH = 4, 12
BOUND = {"epsilon": 8, "delta": 1e-5, "clip": 0.5}
ROWS_THAT_STAY = {"kind": "windows", "stride": 33}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"block": {"feed": {"hidden": 8, "experts": {"names": 3, "router": {"losses": {}}}}}},
}


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (ROWS, LENGTH + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def private_step(
    model: Any, inputs: np.ndarray, labels: np.ndarray, clip: float = 0.5, accumulation: int = 1, **changes: Any
) -> tuple[Privacy, list[Tensor]]:
    """One step of a training with four rows in the mean batch, and the gradients that the optimizer had."""
    rows = {"batch": ROWS // accumulation, "accumulation": accumulation}
    config = decode(TrainingConfig, {"budget": 10, "clip": None, "privacy": BOUND | {"clip": clip}, **rows})
    data, opened = SimpleNamespace(length=LENGTH), SimpleNamespace(train=[range(10_000)])
    privacy = Privacy(Setup(model, config, HERE, torch.float32, 0, data, opened))  # type: ignore[arg-type]
    labelled = max(int((labels != IGNORED).sum()), 1)
    vars(privacy).update({"noise": 1.0, "rate": 0.01, "rows": ROWS, "length": LENGTH}, **changes)
    stepper = Stepper(TrainableBraid(model), config, HERE, torch.float32, [privacy])
    seen: list[Tensor] = []
    update = stepper.optimizer.step
    stepper.optimizer.step = lambda: (seen.extend(p.grad.clone() for p in stepper.parameters), update())  # type: ignore
    report = stepper.step(inputs, labels, labelled, 0.01)
    assert torch.isfinite(report.loss)
    return privacy, seen


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """How long the difference of two sums of gradients is."""
    return ROWS * math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True)))


def row_by_row(model: Any, inputs: np.ndarray, labels: np.ndarray, clip: float, length: int = LENGTH) -> list[Tensor]:
    """The sum of the rows' gradients, each by itself and shortened, by the rows of the mean batch; through the model's
    public forward."""
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    for row, label in zip(torch.from_numpy(inputs), torch.from_numpy(labels), strict=True):
        logits = model(input_ids=row[None], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[0], label, reduction="sum") / length
        own = torch.autograd.grad(loss, parameters, allow_unused=True)
        own = tuple(torch.zeros_like(p) if g is None else g for g, p in zip(own, parameters, strict=True))
        norm = math.sqrt(sum(float(g.square().sum()) for g in own))
        for at, gradient in enumerate(own):
            total[at] += gradient * min(1.0, clip / max(norm, 1e-9)) / ROWS
    return total


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("clip", [0.05, 1e9])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_are_those_of_single_rows(
    kind: str, clip: float, accumulation: int, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs, labels = batch()
    labels[1, 5:] = IGNORED
    wanted = row_by_row(tiny_model(**MODELS[kind]), inputs, labels, clip)
    privacy, found = private_step(
        tiny_model(**MODELS[kind]), inputs, labels, clip, noise=0.0, accumulation=accumulation
    )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4)
    assert privacy.readings()["shortened_gradients"] == (1.0 if clip < 1 else 0.0)
    assert privacy.at_once == (kind == "dense")
    assert capsys.readouterr().out.count("gradients are computed row by row") == (kind == "experts")


@pytest.mark.parametrize("rows", [0, 1, 3, 7])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_of_any_size_is_divided_by_the_mean_one(
    rows: int, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no pass has more rows than training.batch, for which there is memory."""
    passes, at_once = [], privacy_feature.gradients_at_once

    def watched(objective: Any, parameters: Any, inputs: Tensor, *others: Any) -> Any:
        passes.append(len(inputs))
        return at_once(objective, parameters, inputs, *others)

    monkeypatch.setattr(privacy_feature, "gradients_at_once", watched)
    inputs, labels = (np.concatenate([one, two])[:rows] for one, two in zip(batch(0), batch(1), strict=True))
    wanted = row_by_row(tiny_model(), inputs, labels, 0.5)
    privacy, found = private_step(tiny_model(), inputs, labels, noise=0.0, accumulation=accumulation)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4)
    assert sum(passes) == privacy.drawn == rows
    assert max(passes, default=0) <= ROWS // accumulation
    assert privacy.readings()["shortened_gradients"] == (rows > 0)


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_without_rows_is_noise_alone(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = np.zeros((0, LENGTH), np.int64)
    gradients = private_step(tiny_model(**MODELS[kind]), nothing, nothing)[1]
    assert torch.cat([one.flatten() for one in gradients]).std().item() == pytest.approx(BOUND["clip"] / ROWS, rel=0.05)
    assert capsys.readouterr().out == "", "nothing was tried that might fail"


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("labelled", [1, LENGTH])
def test_a_row_adds_no_more_than_the_bound_whatever_it_holds(kind: str, labelled: int) -> None:
    """Also where it has more labels than all others together: they must not count for those."""
    inputs, labels = batch()
    inputs[2:], labels[2:] = inputs[0], labels[0]
    labels[[0, 2, 3], 1:] = labels[1, labelled:] = IGNORED
    without = labels.copy()
    without[1] = IGNORED
    both = [private_step(tiny_model(**MODELS[kind]), inputs, one, noise=0.0)[1] for one in (labels, without)]
    assert 0.3 < distance(*both) <= BOUND["clip"] * 1.0001


def test_the_loss_that_is_told_is_the_mean_over_labels() -> None:
    inputs, labels = batch()
    labels[1, 3:] = IGNORED
    model = tiny_model().train()
    logits = model(input_ids=torch.from_numpy(inputs), use_cache=False).logits
    wanted = nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten())
    config = decode(TrainingConfig, {"budget": 10, "batch": ROWS, "privacy": BOUND})
    setup = Setup(model, config, HERE, torch.float32, 0, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    privacy = Privacy(setup)
    privacy.length, count = LENGTH, torch.tensor(float((labels != IGNORED).sum()))
    objective = TrainableBraid(model).objective()
    found = privacy.own_pass(objective, torch.from_numpy(inputs), torch.from_numpy(labels), count)
    torch.testing.assert_close(found.text, wanted.detach())


def test_the_rate_is_that_of_the_data_set_that_is_read_most_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a small data set with a large weight is in more steps than a row of the other."""
    mix = MixtureConfig(weights={"few": 1, "many": 1})
    loader = Loader([stream(50, "few"), stream(500, "many")], Windows(Windows.Config(stride=9)), 8, 4, mix=mix)
    counted = "braidlm.training.features.privacy.noise_multiplier"
    monkeypatch.setattr(counted, lambda epsilon, delta, rate, steps: rate)
    privacy = object.__new__(Privacy)
    privacy.config, privacy.budget = PrivacyConfig(epsilon=8, delta=1e-5), Amount(3)
    privacy.read_loader(loader)
    assert privacy.rate == privacy.noise == pytest.approx(2 / 5)  # two of its five rows in every step


def test_every_number_has_noise_of_its_own_in_every_step() -> None:
    privacy, _ = private_step(tiny_model(), *batch())
    noises = []
    for step in (1, 2):
        privacy.begin_step(step, 0.0)
        privacy.end_gradients()
        noises += [parameter.grad.flatten() for parameter in privacy.sums]
    values = torch.cat(noises)
    assert len(values.unique()) > 0.99 * len(values)


def test_the_noise_has_its_size_and_no_seed() -> None:
    runs = [private_step(tiny_model(), *batch()) for _ in range(2)]
    plain = private_step(tiny_model(), *batch(), noise=0.0)[1]
    noises = [torch.cat([(a - b).flatten() for a, b in zip(found, plain, strict=True)]) for _, found in runs]
    wanted = runs[0][0].noise * BOUND["clip"] / ROWS
    assert noises[0].std().item() == pytest.approx(wanted, rel=0.05)
    assert not torch.equal(*noises)


def test_noise_and_dropout_follow_from_no_seed_that_could_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's generator on a CPU knows 32 bits of a seed, and dropout's is the recipe's."""
    seeds = iter([5, 5 + 2**32] * 2)
    monkeypatch.setattr("secrets.randbits", lambda bits: next(seeds))
    nothing, noises = np.zeros((0, LENGTH), np.int64), []
    for _ in range(2):
        noises.append(private_step(tiny_model(), nothing, nothing)[1][0])
    assert not torch.equal(*noises)
    monkeypatch.undo()
    states = []
    for _ in range(2):
        model = tiny_model()
        torch.manual_seed(3)
        private_step(model, nothing, nothing)
        states.append(torch.get_rng_state())
    assert not torch.equal(*states)


def test_noise_leaves_frozen_rows_of_a_bank_where_they_are() -> None:
    model = tiny_model(**MODELS["experts"])
    bank = next(part for part in model.modules() if isinstance(part, StackedLinear))
    bank.trained_rows, before = slice(1, 2), bank.weight.detach().clone()
    private_step(model, *batch())
    changed = (bank.weight != before).flatten(1)
    assert changed.any(1).tolist() == [False, True, False]
    assert changed[1].all()


def private_recipe(stories: Path, out: Path, **changes: Any) -> dict[str, Any]:
    recipe = tiny_recipe({"stories": stories}, out, log={"every": 1}, data={"chunking": ROWS_THAT_STAY})
    recipe["training"] |= {"privacy": BOUND, "budget": "3 steps"} | changes.pop("training", {})
    return {key: {**value, **changes[key]} if key in changes else value for key, value in recipe.items()}


@pytest.mark.parametrize(
    ("budget", "chunking"),
    [("7 steps", "single"), ("900 tokens", "single"), ("300 words", "single"), ("300 words", ROWS_THAT_STAY)],
)
def test_the_epsilon_spent_is_that_of_the_steps_taken(
    budget: str, chunking: Any, stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Marks in words and tokens, which would cut batches into more steps, are passed by whole ones."""
    changes = {
        "data": {"chunking": chunking},
        "checkpoints": {"every": "100 words"},
        "validation": {"every": "1k steps"},
    }
    run = train(private_recipe(stories, tmp_path / "run", training={"budget": budget}, **changes), device="cpu")
    told = capsys.readouterr().out
    count, unit = int(budget.split()[0]), budget.split()[1]
    assert run.finished
    assert count <= run.progress.done(unit) < count * run.progress.steps / (run.progress.steps - 1)
    assert f"{run.progress.steps} steps, each of which reads a" in told
    spent = [record["epsilon"] for record in records(tmp_path / "run") if "epsilon" in record]
    assert len(spent) == run.progress.steps
    assert spent == sorted(spent)
    assert 0.97 * 8 < spent[-1] <= 8


@pytest.mark.parametrize(("chunking", "unit"), [(ROWS_THAT_STAY, "row"), ("single", "document")])
def test_log_and_folder_say_what_the_bound_is_for(
    chunking: Any, unit: str, stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(private_recipe(stories, tmp_path / "run", data={"chunking": chunking}), device="cpu")
    size = " of 32 tokens" if unit == "row" else ""
    assert f"Privacy: epsilon 8 at delta 1e-05 for each {unit}{size}: noise of" in capsys.readouterr().out
    told = json.loads((run.model / "lineage.json").read_text())["training"]["privacy"]
    assert (told["delta"], told["for_each"]) == (1e-5, unit)
    assert "loss" not in json.loads((run.model / "lineage.json").read_text())["training"], "no bound is for it"
    assert 7.7 < told["epsilon"] <= 8
    assert told["poisson_sampling"]["steps"] == 3
    assert f'"for_each": "{unit}"' in (run.model / "README.md").read_text()


def test_a_training_is_the_dp_sgd_that_the_accountant_is_asked_for(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients, without the noise, are those of a slow reference that draws the rows itself; its epsilon is that
    of composing the steps one by one."""
    seen: list[tuple[Any, list[Tensor]]] = []

    class Watched(Privacy):
        def end_gradients(self) -> None:
            weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            noise, self.noise = self.noise, 0.0
            super().end_gradients()
            self.noise = noise
            seen.append((weights, [p.grad.clone() for p in self.sums]))

    monkeypatch.setattr("secrets.randbits", lambda bits: 11)
    monkeypatch.setattr(Privacy, "make", classmethod(lambda cls, setup: [Watched(setup)]))
    recipe = private_recipe(stories, tmp_path / "run", training={"budget": "4 steps"})
    run = train(recipe, device="cpu")
    told = json.loads((run.model / "lineage.json").read_text())["training"]["privacy"]
    sampling = told["poisson_sampling"]
    model, (text,) = BraidForCausalLM.from_pretrained(run.model), open_data(decode(DataConfig, recipe["data"])).train
    tokens = text.read(0, len(text))[0].astype(np.int64)
    starts = np.arange(0, len(tokens) - 32, 33)
    assert sampling["probability"] == 4 / len(starts)
    for step, (weights, gradients) in enumerate(seen):
        model.load_state_dict(weights, strict=False)
        order = random_permutation(len(starts), "windows", 3, "stories", 0)
        chance = raw_bits(len(starts), "poisson", 11, "stories", step).astype(float) / 2**64
        drawn = np.sort(starts[order[chance < sampling["probability"]]])
        rows = np.array([tokens[at : at + 33] for at in drawn]).reshape(-1, 33)
        wanted = row_by_row(model, rows[:, :-1], rows[:, 1:], BOUND["clip"], 32)
        for ours, theirs in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4)
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(4):
        accountant.step(noise_multiplier=sampling["noise"], sample_rate=sampling["probability"])
    assert told["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


def test_a_run_that_was_stopped_draws_what_it_would_have_drawn(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the noise, which is another: weights and records are the same, bit for bit."""
    keys = iter([5, 5, 6])  # the last is not used, since the run has one
    monkeypatch.setattr("secrets.randbits", lambda bits: next(keys) if bits == 128 else 0)
    monkeypatch.setattr("braidlm.training.features.privacy.noise_multiplier", lambda *given: 0.0)
    monkeypatch.setattr("braidlm.training.features.privacy.epsilon_spent", lambda *given: 8.0)
    whole, cut = (private_recipe(stories, tmp_path / name, training={"budget": "9 steps"}) for name in ("whole", "cut"))
    done = train(whole, device="cpu")
    stopped_after(5, monkeypatch, cut)
    again = train(cut, device="cpu")
    assert again.finished
    assert weight_bytes(again.model) == weight_bytes(done.model)
    both = [[r for r in records(tmp_path / name) if r["kind"] in ("train", "validation")] for name in ("whole", "cut")]
    assert both[0] == both[1]


def test_a_larger_budget_needs_other_noise(stories: Path, tmp_path: Path) -> None:
    assert train(private_recipe(stories, tmp_path / "run"), device="cpu").finished
    with pytest.raises(BraidError, match="was chosen for a smaller budget"):
        train(private_recipe(stories, tmp_path / "run", training={"budget": "6 steps"}), device="cpu")
    assert train(private_recipe(stories, tmp_path / "run"), device="cpu").progress.steps == 3, "as it was"


EXPERTS = {"block": {"attention": {"heads": 2}, "feed": {"hidden": 8, "experts": {"names": 3}}}}
JOINED = {
    "stages": [
        {
            "parallel": {
                "layers": 1,
                "join": {"kind": "gumbel_v1", "losses": {"load_balance": 0.01}},
                "paths": [{"name": name, "attention": {"heads": 2}, "feed": {"hidden": 8}} for name in "ab"],
            }
        }
    ]
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "loss of a join": ({"model": JOINED}, "a routing loss is of the tokens of a whole batch"),
    "routing loss": ({"model": EXPERTS}, "a routing loss is of the tokens of a whole batch"),
    "lengths": ({"training": {"lengths": [{"until": 0.5, "length": 8}]}}, "a sequence that is cut into rows"),
    "distill": ({"training": {"distill": {"teachers": ["x"]}}}, "a teacher's probabilities are not covered"),
    "memory": ({"training": {"memory": 8}}, "a memory carries one row's text into the next"),
    "several processes": ({"training": {"parallel": "sharded"}}, "noise is added by one process"),
    "token dropout": ({"training": {"token_dropout": {"rate": 0.1}}}, "how many rows are before it"),
    "pauses": ({"data": {"pauses": 0.2}}, "how much text is before a row"),
    "losses": ({"training": {"losses": [{"next_sentence": {}}]}}, "an extra loss reads several rows"),
    "curriculum": (
        {"data": {"mix": {"curriculum": [{"at": 0, "weights": {"stories": 1, "maths": 2}}]}}},
        "the bound takes it to draw from all",
    ),
    "order": ({"data": {"order": "length"}}, "the bound takes it to draw from all"),
    "other rows in every epoch": ({"data": {"chunking": "contiguous"}}, r"(?s)nothing stays the same.*chunking=single"),
    "packed documents": ({"data": {"chunking": "documents"}}, "nothing stays the same"),
    "rows that read on": ({"data": {"chunking": "consecutive"}}, "nothing stays the same"),
    "epochs in words": (
        {"data": {"chunking": {"kind": "windows", "stride": 33, "words_per_epoch": 500}}},
        "or are others in every epoch",
    ),
    "overlapping rows": ({"data": {"chunking": {"kind": "windows", "stride": 32}}}, "rows overlap, or .*"),
    "more rows than text": ({"training": {"batch": 4000}}, "reads every row of a data set more than once"),
    "no delta": ({"training": {"privacy": {"epsilon": 1}}}, "delta"),
    "too strict": ({"training": {"privacy": {"epsilon": 1e-4, "delta": 1e-9}}}, "no noise keeps the bound"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_mixes_rows_is_refused(case: str, stories: Path, maths: Path, tmp_path: Path) -> None:
    changes, words = REFUSED[case]
    changes = {"training": {}, **changes, "data": {"chunking": ROWS_THAT_STAY, **changes.get("data", {})}}
    recipe = tiny_recipe({"stories": stories, "maths": maths}, tmp_path / "run", **changes)
    recipe["training"] = {"privacy": BOUND, **recipe["training"]}
    if case == "no delta":
        recipe["training"]["privacy"] = {"epsilon": 1}
    with pytest.raises(BraidError, match=words):
        train(recipe, device="cpu")
