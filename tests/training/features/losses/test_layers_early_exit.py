"""The early-exit loss: its weights, its curricula, and its value and gradient against the plain formula."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.span import LayerRecord
from braidlm.training.features.extra_losses import TrainingPass
from braidlm.training.features.losses.layers import EarlyExitConfig, EarlyExitLoss
from braidlm.training.features.modules import dropout_schedules
from tests.tiny_models import random_ids, tiny_model

DEEP: list[Any] = [{"block": {"layers": 6}}]


def loss_of(model: BraidForCausalLM, **options: Any) -> EarlyExitLoss:
    return EarlyExitLoss(EarlyExitConfig(**options), model)


def run_pass(model: BraidForCausalLM) -> TrainingPass:
    inputs, labels, record = random_ids(3, 7), random_ids(3, 7, seed=1), LayerRecord([])
    labels[0, :3] = IGNORED
    hidden = model.run(inputs, record=record).hidden
    assert record.hidden_states is not None
    return TrainingPass(model, inputs, labels, torch.tensor(18.0), hidden, tuple(record.hidden_states))


def test_weights_are_the_papers_relative_to_the_last() -> None:
    """e(l) = scale x sum of i up to l, for l from 0; the last has L - 1 + scale x the sum up to L - 2."""
    loss = loss_of(tiny_model(stages=DEEP), scale=0.3)
    paper = [0.3 * sum(range(layer + 1)) for layer in range(5)]
    last = 5 + 0.3 * sum(range(5))
    assert [loss.weight_of(layer) for layer in range(1, 6)] == pytest.approx([weight / last for weight in paper])
    assert loss.exits == [2, 3, 4, 5], "the first layer's weight is 0"


def test_chosen_layers_count_as_much_as_the_last() -> None:
    loss = loss_of(tiny_model(stages=DEEP), layers=[1, 4], weights="equal", curriculum="all")
    assert (loss.exits, loss.enabled, loss.weights.tolist()) == ([1, 4], [0, 1], [1.0, 1.0])
    with pytest.raises(BraidError, match="cannot be left after layer 7"):
        loss_of(tiny_model(stages=DEEP), layers=[7])
    with pytest.raises(BraidError, match="no layer counts"):
        loss_of(tiny_model(stages=DEEP), layers=[1])


def test_it_is_the_weighted_sum_of_cross_entropies() -> None:
    model = tiny_model(torch.float64, stages=DEEP).train()
    loss = loss_of(model, curriculum="all").double()

    def reference(done: TrainingPass) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for layer in (2, 3, 4, 5):
            logits = model.head(model.model.norm(done.layers[layer]))
            sums = F.cross_entropy(logits.flatten(0, 1), done.labels.flatten(), ignore_index=IGNORED, reduction="sum")
            total = total + loss.weight_of(layer) * sums / 18
        return total

    results = []
    for compute in (reference, loss):
        model.zero_grad()
        value = compute(run_pass(model))
        value.backward()
        results.append([value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected.to(got.dtype), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("curriculum", "every", "places"), [("rotate", 2, 2), ("rotate", 3, 2), ("gradual", 2, 4)])
def test_a_compiled_step_finds_its_exits_by_index(
    curriculum: str, every: int, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes as many exits as count in any step, and no more."""
    model = tiny_model(stages=DEEP)
    loss, done = loss_of(model, curriculum=curriculum, every=every), run_pass(model)
    assert len(loss.chosen) == places
    for step in range(every):
        loss.begin_step(step, 0.1 + 0.2 * step)
        some = loss(done)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            torch.testing.assert_close(loss(done), some)


def test_layers_take_turns() -> None:
    loss = loss_of(tiny_model(stages=DEEP), curriculum="rotate", every=3)
    seen: dict[int, list[int]] = {layer: [] for layer in loss.exits}
    for step in range(6):
        assert loss.begin_step(step, step / 6) is False
        counting = [loss.exits[index] for index in loss.enabled]
        assert loss.weights.tolist()[: len(counting)] == pytest.approx([loss.weight_of(layer) for layer in counting])
        assert not loss.weights[len(counting) :].any()
        for layer in counting:
            seen[layer].append(step)
    assert all(len(steps) == 2 and steps[1] - steps[0] == 3 for steps in seen.values())


def test_layers_are_added_from_the_last_to_the_first() -> None:
    loss = loss_of(tiny_model(stages=DEEP), curriculum="gradual")
    counts = []
    for share in (0.0, 0.1, 0.2, 0.3, 0.5, 0.9):
        loss.begin_step(0, share)
        counting = [loss.exits[index] for index in loss.enabled]
        assert counting == loss.exits[len(loss.exits) - len(counting) :]
        counts.append(len(counting))
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-2:] == [4, 4], "from the middle of the training on all count"


@pytest.mark.parametrize("stages", [["block"], ["block", "block"], ["block", {"project": {"to": 8}}, "block"]])
def test_a_model_without_early_layers_is_refused(stages: list[Any]) -> None:
    with pytest.raises(BraidError, match="no layer counts"):
        loss_of(tiny_model(stages=stages, tie_embeddings=False, block={"attention": {"heads": 2}}))


def test_a_step_against_it_makes_early_layers_better() -> None:
    model = tiny_model(stages=DEEP).train()
    loss = loss_of(model, curriculum="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = loss(run_pass(model))
    before.backward()
    optimizer.step()
    assert float(loss(run_pass(model)).detach()) < float(before.detach())


def test_dropout_rises_exponentially() -> None:
    schedule = dropout_schedules["exponential"](dropout_schedules["exponential"].Config(levels=4))
    values = [schedule(share) for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)]
    assert values == pytest.approx([0, 0, 2**0.25 - 1, 2**0.5 - 1, 2**0.75 - 1, 1, 1])
