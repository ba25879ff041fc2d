"""DP-SGD: gradients of single rows, shortened, with noise; the accountant's epsilon; and what would mix rows."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.model.config.strict import decode
from braidlm.training.features.feature import Setup
from braidlm.training.features.privacy import Privacy, epsilon_spent, noise_multiplier
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.step import Stepper
from braidlm.training.train import train
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import VOCABULARY, tiny_model
from tests.training.step.test_step import HERE
from tests.training.tiny_runs import records, tiny_recipe

pytest.importorskip("opacus", reason="it counts the noise")
ROWS, LENGTH = 4, 12
BOUND = {"epsilon": 8, "delta": 1e-5, "clip": 0.5}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"block": {"feed": {"hidden": 8, "experts": {"names": 3, "router": {"losses": {}}}}}},
}


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (ROWS, LENGTH + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def private_step(model: Any, inputs: np.ndarray, labels: np.ndarray, **changes: Any) -> tuple[Privacy, list[Tensor]]:
    """One step, and the gradients that the optimizer had."""
    config = decode(TrainingConfig, {"budget": 10, "batch": ROWS, "clip": None, "privacy": BOUND})
    data, opened = SimpleNamespace(length=LENGTH), SimpleNamespace(train=[range(10_000)])
    with patch("braidlm.training.features.privacy.noise_multiplier", lambda *_: 1.0):  # it takes a while to count
        privacy = Privacy(Setup(model, config, HERE, torch.float32, 0, data, opened))  # type: ignore[arg-type]
    vars(privacy).update(changes)
    stepper = Stepper(TrainableBraid(model), config, HERE, torch.float32, [privacy])
    seen: list[Tensor] = []
    update = stepper.optimizer.step
    stepper.optimizer.step = lambda: (seen.extend(p.grad.clone() for p in stepper.parameters), update())  # type: ignore
    stepper.step(inputs, labels, labels.size, 0.01)
    return privacy, seen


def row_by_row(model: Any, inputs: np.ndarray, labels: np.ndarray, clip: float) -> list[Tensor]:
    """The mean of the rows' gradients, each by itself and shortened; through the model's public forward."""
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    for row, label in zip(torch.from_numpy(inputs), torch.from_numpy(labels), strict=True):
        logits = model(input_ids=row[None], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[0], label)
        own = torch.autograd.grad(loss, parameters, allow_unused=True)
        own = tuple(torch.zeros_like(p) if g is None else g for g, p in zip(own, parameters, strict=True))
        length = math.sqrt(sum(float(g.square().sum()) for g in own))
        for at, gradient in enumerate(own):
            total[at] += gradient * min(1.0, clip / length) / len(inputs)
    return total


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_gradients_are_those_of_single_rows(kind: str, clip: float) -> None:
    inputs, labels = batch()
    wanted = row_by_row(tiny_model(**MODELS[kind]), inputs, labels, clip)
    privacy, found = private_step(tiny_model(**MODELS[kind]), inputs, labels, noise=0.0, clip=clip)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4)
    assert privacy.readings()["shortened_gradients"] == (1.0 if clip < 1 else 0.0)


def test_one_row_moves_a_step_by_no_more_than_the_bound() -> None:
    inputs, labels = batch()
    other_inputs, other_labels = inputs.copy(), labels.copy()
    other_inputs[1], other_labels[1] = (one[0] for one in batch(7))
    both = [private_step(tiny_model(), *one, noise=0.0)[1] for one in ((inputs, labels), (other_inputs, other_labels))]
    moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(*both, strict=True)))
    assert 0 < moved <= 2 * BOUND["clip"] / ROWS * 1.0001


def test_the_noise_has_its_size_and_no_seed() -> None:
    runs = [private_step(tiny_model(), *batch()) for _ in range(2)]
    plain = private_step(tiny_model(), *batch(), noise=0.0)[1]
    noises = [torch.cat([(a - b).flatten() for a, b in zip(found, plain, strict=True)]) for _, found in runs]
    wanted = runs[0][0].noise * BOUND["clip"] / ROWS
    assert noises[0].std().item() == pytest.approx(wanted, rel=0.05)
    assert not torch.equal(*noises)


def test_epsilon_of_a_published_example() -> None:
    """TensorFlow Privacy's tutorial: 60,000 examples, batches of 250, noise 1.3, 15 epochs and delta 1e-5 give epsilon
    1.18 by the conversion of its time (Mironov, 2017); opacus converts more tightly (Balle and others, 2020)."""
    from opacus.accountants.analysis.rdp import compute_rdp

    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    divergences = compute_rdp(q=250 / 60_000, noise_multiplier=1.3, steps=3600, orders=orders)
    published = min(rdp + math.log(1e5) / (order - 1) for rdp, order in zip(divergences, orders, strict=True))
    assert published == pytest.approx(1.18, abs=0.01)
    assert 0.9 < epsilon_spent(1.3, 250 / 60_000, 3600, 1e-5) < published


def test_the_noise_keeps_the_bound() -> None:
    for epsilon in (1.0, 8.0):
        noise = noise_multiplier(epsilon, 1e-5, 0.01, 500)
        assert 0.97 * epsilon < epsilon_spent(noise, 0.01, 500, 1e-5) <= 1.01 * epsilon
    assert noise_multiplier(1.0, 1e-5, 0.01, 500) > noise_multiplier(8.0, 1e-5, 0.01, 500)


def test_a_run(stories: Path, tmp_path: Path) -> None:
    training = {"privacy": BOUND, "budget": "3 steps"}
    recipe = tiny_recipe(
        {"stories": stories}, tmp_path / "run", training=training, log={"every": 1}, checkpoints={"every": "3 steps"}
    )
    assert train(recipe, device="cpu").finished
    spent = [record["epsilon"] for record in records(tmp_path / "run") if "epsilon" in record]
    assert spent == sorted(spent)
    assert spent[-1] <= 8 * 1.01
    with pytest.raises(BraidError, match="was chosen for a smaller budget"):
        train(recipe | {"training": recipe["training"] | {"budget": "6 steps"}}, device="cpu")


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
    "losses": ({"training": {"losses": [{"next_sentence": {}}]}}, "an extra loss reads several rows"),
    "weights": ({"data": {"mix": {"weights": {"stories": 1, "maths": 2}}}}, "read more often than the bound knows"),
    "no delta": ({"training": {"privacy": {"epsilon": 1}}}, "delta"),
    "too strict": ({"training": {"privacy": {"epsilon": 1e-4, "delta": 1e-9}}}, "no noise keeps the bound"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_mixes_rows_is_refused(case: str, stories: Path, maths: Path, tmp_path: Path) -> None:
    changes, words = REFUSED[case]
    recipe = tiny_recipe({"stories": stories, "maths": maths}, tmp_path / "run", **{"training": {}, **changes})
    recipe["training"] = {"privacy": BOUND, **recipe["training"]}
    if case == "no delta":
        recipe["training"]["privacy"] = {"epsilon": 1}
    with pytest.raises(BraidError, match=words):
        train(recipe, device="cpu")
