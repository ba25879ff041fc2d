"""Texts longer than a model reads: every token given as many of those before it as fit, whatever runs beside it."""

from typing import Any

import numpy as np
import pytest
import torch

from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.options import Item, MultipleChoice, RankedOptions, endings, pair
from braidlm.evals.scoring.requests import Request, too_long, windows_of
from braidlm.evals.scoring.scorer import Scorer
from tests.evals.plain_scorer import plain_tokens
from tests.tiny_models import random_ids, tiny_model

CONTEXT = 32


def some_ids(count: int, seed: int = 0) -> list[int]:
    return random_ids(1, count, seed=seed)[0].tolist()


def plainly(model: Any, ids: list[int], first: int, context: int) -> list[float]:
    """Token by token, each in a pass of its own: where a text is too long, by what the windows are to be.

    A continuation that fits loses only what stands before it. Of a longer one, the tokens up to the end of the context
    (or half a context of it, if that is more) are read together, and then half a context at a time.
    """
    scored = len(ids) - first
    ends = [len(ids)]
    if len(ids) - 1 > context and scored > context:
        ends = [max(context + 1, first + context // 2)]
        while ends[-1] < len(ids):
            ends.append(ends[-1] + context // 2)
    found = []
    for at in range(first, len(ids)):
        end = min(next(end for end in ends if at < end), len(ids))
        begin = max(0, end - 1 - context)
        found += plain_tokens(model, ids[begin : at + 1], at - begin)
    return found


LONG = [
    Request(some_ids(33)),  # just fits
    Request(some_ids(34)),  # by one too long
    Request(some_ids(34), 2),  # loses a token of its beginning
    Request(some_ids(100, 1)),
    Request(some_ids(100, 1), 5),
    Request(some_ids(100, 1), 40),
    Request(some_ids(100, 1), 66),
    Request(some_ids(100, 1), 67),
    Request(some_ids(100, 1), 68),  # 32 tokens: as many as fit
    Request(some_ids(9, 2)),
    Request(some_ids(100, 1), 100),  # nothing to score
]


@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize("share", [True, False])
def test_long_continuations_are_the_plain_sum_over_windows(positions: str, share: bool) -> None:
    model = tiny_model(torch.float64, positions=positions)
    scores = Scorer(model, share=share, dtype=torch.float64).score(LONG, margins=True)
    for (ids, first), tokens in zip(LONG, np.split(scores.tokens, scores.bounds[1:-1]), strict=True):
        np.testing.assert_allclose(tokens, plainly(model, list(ids), first, CONTEXT), rtol=0, atol=1e-9)
    assert scores.margins is not None
    assert len(scores.margins) == len(scores.tokens) == sum(len(ids) - first for ids, first in LONG)


def test_how_much_runs_at_once_changes_nothing() -> None:
    model = tiny_model(torch.float64)
    found = [
        Scorer(model, tokens_per_pass=places, dtype=torch.float64).score(LONG).tokens for places in (1, 50, 10_000)
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found[2], found[0], rtol=0, atol=1e-10)
    exact = Scorer(tiny_model()).score_float64(LONG)
    np.testing.assert_allclose(exact.sums, [sum(plainly(model, list(i), f, CONTEXT)) for i, f in LONG], atol=1e-5)


def test_what_fits_is_what_it_was_and_costs_no_more() -> None:
    short = [Request(some_ids(4 + seed, seed), 1 + seed % 3) for seed in range(20)]
    scorer = Scorer(tiny_model())
    alone = scorer.build_trees(short)
    assert alone.nodes <= sum(len(request.ids) - 1 for request in short)
    beside = scorer.build_trees([*short, Request(some_ids(100), 90)])
    scores, others = scorer.score_trees(alone), scorer.score_trees(beside)
    np.testing.assert_allclose(others.tokens[: len(scores.tokens)], scores.tokens, rtol=0, atol=2e-5)
    assert all(windows_of(request, CONTEXT) == [request] for request in short)
    assert windows_of(short[3], CONTEXT)[0] is short[3], "not even copied"


@pytest.mark.parametrize("context", [1, 2, 3, 8, 31])
def test_windows_score_every_token_once_and_fit(context: int) -> None:
    for count in range(2, 60):
        for first in range(1, count):
            ids = list(range(count))
            windows = windows_of(Request(ids, first), context)
            assert [token for each in windows for token in each.ids[each.first :]] == ids[first:]
            assert all(1 <= each.first < len(each.ids) <= context + 1 for each in windows)
            assert all(each.first >= min(each.ids[each.first], (context + 1) // 2) for each in windows[1:])
            if count > context + 1:
                assert all(len(each.ids) == context + 1 for each in windows), "as much context as fits"


def test_items_that_are_too_long_are_counted() -> None:
    requests = [Request(some_ids(20)), Request(some_ids(50), 30), Request(some_ids(50), 5), Request(some_ids(90), 5)]
    assert too_long(requests, CONTEXT) == {"shortened": 1, "in windows": 2}
    assert too_long(requests, CONTEXT, [(0, 1), (2, 3)]) == {"shortened": 1, "in windows": 1}
    assert too_long(requests, None) == {"shortened": 0, "in windows": 0}


def evaluated() -> EvaluatedModel:
    from braidlm.data.tokenizing.build import bytes_tokenizer

    tokenizer = bytes_tokenizer()
    return EvaluatedModel(Scorer(tiny_model(vocab_size=tokenizer.vocab_size)), tokenizer)


def test_tasks_say_what_they_cut() -> None:
    model = evaluated()
    long = "and so on until the end of this very long option "
    choice = MultipleChoice([endings("A", [long, "b"], 0), endings("A" * 40, ["a", "b"], 1)], "hash")
    result = choice.evaluate("t", model)
    assert (result.notes["shortened"], result.notes["in windows"]) == (1, 1)
    ids = [list(f"A {ending}".encode()) for ending in (long, "b")]
    sums = [sum(plainly(model.model, each, 1, CONTEXT)) for each in ids]
    assert result.items["chosen"][0] == int(np.argmax(sums))

    both = [pair("a" + long, "b" + long, "one"), pair(long + "a", long + "b", "one")]
    pairs = RankedOptions(both, "hash", share_context=False)
    result = pairs.evaluate("t", model)
    assert (result.notes["shortened"], result.notes["in windows"]) == (1, 1)

    items = [Item((("x" * 60, " yes"), ("x" * 60, " no, not at all")), "one", ("yes", "no"))]
    result = RankedOptions([*items, Item((("", "ab"), ("", "ac")), "one", ("b", "c"))], "hash").evaluate("t", model)
    assert (result.notes["shortened"], result.notes["in windows"]) == (1, 0)
