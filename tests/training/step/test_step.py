"""One optimizer step: equal to the loop anyone would write by hand, however it is cut or sped up."""

import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from braidlm.model.config.strict import decode
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper, packed_batch
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import VOCABULARY, tiny_model

HERE = Rank(0, 1, torch.device("cpu"))
STEPS = 5


def batches(rows: int = 8, length: int = 12) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels; some batches are cut, as at a mark of words."""
    made = []
    rng = np.random.default_rng(0)
    for index in range(STEPS):
        tokens = rng.integers(0, VOCABULARY, (rows, length + 1))
        labels = tokens[:, 1:].copy()
        if index % 2:
            labels.reshape(-1)[: 25 * index] = IGNORED
        made.append((tokens[:, :-1].copy(), labels))
    return made


def stepped(model: BraidForCausalLM, **training: Any) -> list[tuple[float, float]]:
    """Loss and norm of each step by the Stepper."""
    options = {"budget": STEPS, "batch": 8, "optimizer": {"lr": 0.02}} | training
    stepper = Stepper(TrainableBraid(model), decode(TrainingConfig, options), HERE, torch.float32)
    seen = []
    for index, (inputs, labels) in enumerate(batches()):
        count = int((labels != IGNORED).sum())
        report = stepper.step(inputs, labels, count, 0.02 / (index + 1))
        loss, norm = report.loss, report.gradient_norm
        seen.append((loss.item(), norm.item()))
    return seen


def by_hand(model: BraidForCausalLM, clip: float = 1.0) -> list[tuple[float, float]]:
    """The same through the model's public forward."""
    model.train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        foreach=False,
    )
    seen = []
    for index, (inputs, labels) in enumerate(batches()):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (index + 1)
        logits = model(input_ids=torch.from_numpy(inputs), use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen


def assert_same(a: BraidForCausalLM, b: BraidForCausalLM, tolerance: float = 5e-6) -> None:
    left, right = dict(a.named_parameters()), dict(b.named_parameters())
    assert set(left) == set(right)
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def start() -> BraidForCausalLM:
    return tiny_model(seed=5)


@pytest.fixture(scope="module")
def expected() -> tuple[BraidForCausalLM, list[tuple[float, float]]]:
    model = start()
    return model, by_hand(model)


def test_a_step_equals_the_plain_loop(expected: tuple[BraidForCausalLM, list[tuple[float, float]]]) -> None:
    model = start()
    seen = stepped(model)
    assert_same(model, expected[0])
    assert np.allclose(seen, expected[1], atol=1e-5)
    assert expected[1][0][1] > 1.0, "the gradient is clipped"
    with pytest.raises(AssertionError):
        assert_same(model, start())


@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_accumulation_equals_one_big_batch(
    accumulation: int, expected: tuple[BraidForCausalLM, list[tuple[float, float]]]
) -> None:
    model = start()
    seen = stepped(model, batch=8 // accumulation, accumulation=accumulation)
    assert_same(model, expected[0])
    assert np.allclose(seen, expected[1], atol=1e-5)


def test_activation_checkpointing_changes_nothing(
    expected: tuple[BraidForCausalLM, list[tuple[float, float]]],
) -> None:
    model = start()
    runs: list[int] = []
    model.model.stages[0].layers[0].register_forward_pre_hook(lambda *_: runs.append(1))
    seen = stepped(model, activation_checkpointing=True, accumulation=2, batch=4)
    assert_same(model, expected[0])
    assert np.allclose(seen, expected[1], atol=1e-5)
    assert len(runs) == 2 * 2 * STEPS, "blocks run again in the backward pass"


def test_activation_checkpointing_repeats_the_same_dropout() -> None:
    def run(checkpointing: bool) -> BraidForCausalLM:
        model = tiny_model(seed=5, dropout=0.2)
        torch.manual_seed(1)
        stepped(model, activation_checkpointing=checkpointing)
        return model

    assert_same(run(True), run(False))
    torch.manual_seed(2)
    other = tiny_model(seed=5, dropout=0.2)
    stepped(other)
    with pytest.raises(AssertionError):
        assert_same(other, run(False))


def test_no_clipping() -> None:
    ours, theirs = start(), start()
    seen = stepped(ours, clip=None)
    hand = by_hand(theirs, clip=float("inf"))
    assert_same(ours, theirs)
    assert np.allclose(seen, hand, atol=1e-4)


def test_a_piece_without_a_label_moves_nothing_but_decay() -> None:
    """A process whose rows lie outside the piece adds nothing to the gradient."""
    model = start()
    stepper = Stepper(TrainableBraid(model), decode(TrainingConfig, {"budget": 1, "batch": 2}), HERE, torch.float32)
    report = stepper.step(np.zeros((2, 4), np.int64), np.full((2, 4), IGNORED), 5, 0.0)
    loss, norm = report.loss, report.gradient_norm
    assert (loss.item(), norm.item()) == (0.0, 0.0)
    assert_same(model, start(), 0.0)


@pytest.mark.slow
def test_compiled_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, differentiated and run as graphs; the C++ of a graph is torch's own, and takes a minute to build."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    eager, compiled = tiny_model(seed=5, stages=["block"]), tiny_model(seed=5, stages=["block"])
    logging.disable(logging.CRITICAL)  # torch's trace of the compiler makes pytest's log slow
    try:
        assert np.allclose(stepped(compiled, compile=True), stepped(eager), atol=1e-5)
    finally:
        logging.disable(logging.NOTSET)
    assert_same(eager, compiled, 1e-4)  # AdamW makes much of gradients near zero


def test_a_replayed_steps_batch_is_sent_in_one_piece() -> None:
    inputs, labels = batches()[1]
    packed = packed_batch(inputs, labels, 71)
    tokens, targets, count = packed.split((inputs.size, labels.size, 1))
    assert (tokens.view(inputs.shape).numpy() == inputs).all()
    assert (targets.view(labels.shape).numpy() == labels).all()
    assert count.view(torch.float32)[0] == 71.0
