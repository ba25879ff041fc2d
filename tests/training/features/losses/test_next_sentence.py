"""The latent objective: sentences against slow loops, what collapses, and runs with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.training.features.extra_losses import TrainingPass
from braidlm.training.features.losses.next_sentence import NextSentence, mean_states, spread
from braidlm.training.train import train
from tests.tiny_models import random_ids, tiny_model
from tests.training.tiny_runs import records, stopped_after, tiny_recipe, weight_bytes

WIDTH, END, BREAK = 16, 5, 6
KINDS = st.lists(st.lists(st.sampled_from(["word", "end", "break"]), min_size=6, max_size=6), min_size=1, max_size=3)


def sentences_of(kinds: list[str]) -> list[tuple[list[int], bool]]:
    """The positions of each sentence, and whether it is whole; slow and easy to believe."""
    found: list[tuple[list[int], bool]] = []
    current: list[int] = []
    for position, kind in enumerate(kinds):
        current.append(position)
        if kind != "word":
            found.append((current, kind == "end"))
            current = []
    return found


@given(KINDS)
def test_means_are_the_slow_ones(rows: list[list[str]]) -> None:
    hidden = torch.randn(len(rows), 6, WIDTH, generator=torch.Generator().manual_seed(0))
    ends, breaks = (torch.tensor([[kind == what for kind in row] for row in rows]) for what in ("end", "break"))
    states, whole = mean_states(hidden, ends, breaks)
    for row, kinds in enumerate(rows):
        expected = sentences_of(kinds)
        assert whole[row].tolist() == [good for _, good in expected] + [False] * (6 - len(expected))
        for number, (positions, _) in enumerate(expected):
            torch.testing.assert_close(states[row, number], hidden[row, positions].mean(0))


def made(**options: Any) -> tuple[Any, NextSentence]:
    torch.manual_seed(0)
    model = tiny_model()
    loss = NextSentence(NextSentence.Config(**options), model)
    loss.ends[END], loss.breaks[BREAK] = True, True
    return model, loss


def a_pass(model: Any, inputs: torch.Tensor) -> TrainingPass:
    hidden = model.model(inputs, use_cache=False).last_hidden_state
    return TrainingPass(model, inputs, random_ids(*inputs.shape, seed=1), torch.tensor(float(inputs.numel())), hidden)


# Sentences 1 2 5, 3 5, then a text ends; in the second row one sentence more.
INPUTS = torch.tensor([[1, 2, END, 3, END, BREAK, 7, END, 8], [9, END, 10, 11, END, 12, END, 13, 14]])


def test_the_loss_is_its_formula() -> None:
    model, loss = made()
    done = a_pass(model, INPUTS)
    rows = [[(0, 3), (3, 5), (6, 8)], [(0, 2), (2, 5), (5, 7)]]
    means = [[done.hidden[row, slice(*at)].mean(0) for at in spans] for row, spans in enumerate(rows)]
    centre = torch.stack([mean for row in means for mean in row]).mean(0).detach()
    pairs = [(means[0][0], means[0][1]), (means[1][0], means[1][1]), (means[1][1], means[1][2])]
    distances = [1 - F.cosine_similarity(loss.predict(a), b.detach() - centre, dim=0) for a, b in pairs]
    expected = torch.stack(distances).mean()
    found = loss(done)
    torch.testing.assert_close(found, expected)
    parameters = [*model.model.parameters(), *loss.parameters()]
    gradients = [torch.autograd.grad(each, parameters, retain_graph=True) for each in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_no_sentence_no_loss() -> None:
    model, loss = made()
    for inputs in (torch.full((2, 5), 1), torch.tensor([[1, END, 2, 3]]), torch.tensor([[1, END, BREAK, 2, END]])):
        assert loss(a_pass(model, inputs)).item() == 0.0


def test_micro_batches_count_by_their_tokens() -> None:
    model, loss = made()
    whole = a_pass(model, INPUTS)
    half = TrainingPass(model, whole.inputs, whole.labels, whole.count * 2, whole.hidden)
    torch.testing.assert_close(loss(half), loss(whole) / 2)


def test_learning_predicts_and_a_constant_prediction_costs_one() -> None:
    model, loss = made()
    done = a_pass(model, INPUTS)
    before = loss(done)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss(a_pass(model, INPUTS)).backward()
        optimizer.step()
    assert loss(done) < before / 4
    _, same = made()
    with torch.no_grad():
        for parameter in same.predict.parameters():
            parameter.zero_()
    assert same(done).item() == pytest.approx(1.0)


def test_the_spread_shows_a_collapse() -> None:
    model, loss = made()
    loss(a_pass(model, INPUTS))
    assert 0.1 < loss.readings()["spread"] <= 1.0
    whole = torch.ones(2, 3, dtype=torch.bool)
    one = torch.randn(1, 1, WIDTH).expand(2, 3, WIDTH)
    assert spread(one, whole).item() == pytest.approx(0.0, abs=1e-5)
    sides = torch.eye(6).view(2, 3, 6)
    assert spread(torch.cat((sides, -sides)), torch.ones(4, 3, dtype=torch.bool)).item() == pytest.approx(1.0)


def test_tokens_that_end_sentences(stories: Path) -> None:
    tokenizer = load_tokenizer(stories)
    loss = NextSentence(NextSentence.Config(), tiny_model(vocab_size=tokenizer.vocab_size + 4))
    loss.read_tokenizer(tokenizer)
    ends = {tokenizer.decode([token]) for token in loss.ends.nonzero()[:, 0].tolist()}
    assert {".", "!", "?"} <= ends
    assert not {",", "a", " the", ":"} & ends
    assert loss.breaks.nonzero()[:, 0].tolist() == [tokenizer.eos_id, tokenizer.pad_id]


def recipe(stories: Path, out: Path, **training: Any) -> dict[str, Any]:
    losses = [{"next_sentence": {"weight": 1.0}}]
    return tiny_recipe({"stories": stories}, out, training={"losses": losses, **training}, log={"every": 1})


def test_runs_learn_it_and_go_on(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = {"budget": "40 steps"}
    whole = train(recipe(stories, tmp_path / "whole", **longer))
    recorded = [record["extra_losses"] for record in records(whole.folder, "train")]
    assert sum(each["next_sentence"] for each in recorded[-5:]) < sum(each["next_sentence"] for each in recorded[:5])
    assert all(0 <= each["next_sentence.spread"] <= 1 for each in recorded)
    stopped_after(7, monkeypatch, recipe(stories, tmp_path / "parts", **longer))
    parts = train(recipe(stories, tmp_path / "parts", **longer))
    assert weight_bytes(parts.model) == weight_bytes(whole.model)
    assert records(parts.folder) == records(whole.folder)
