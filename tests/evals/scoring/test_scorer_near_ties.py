"""Whether tokens are the most probable ones: margins, and those that hang on rounding."""

import numpy as np
import pytest
import torch

from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import NEAR_TIE, Scorer, Scores, is_greedy, resolve_near_ties
from tests.tiny_models import random_ids, tiny_model


def requests(count: int = 12, time: int = 9) -> list[Request]:
    return [Request(row, 1 + index % 4) for index, row in enumerate(random_ids(count, time, seed=3).tolist())]


def plain_leads(model: torch.nn.Module, request: Request) -> list[float]:
    """Token by token, straight from the definition."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(request.ids)[:-1]])).logits[0].double()
    found = []
    for at in range(request.first, len(request.ids)):
        row, target = logits[at - 1], request.ids[at]
        others = torch.cat((row[:target], row[target + 1 :]))
        found.append(float(row[target] - others.max()))
    return found


def test_leads_are_those_of_the_plain_way_and_change_no_score() -> None:
    scorer, some = Scorer(tiny_model()), requests()
    scores = scorer.score(some, margins=True)
    assert scores.margins is not None
    expected = [lead for request in some for lead in plain_leads(scorer.model, request)]
    assert scores.margins == pytest.approx(np.array(expected), abs=1e-4)
    assert np.array_equal(scores.tokens, scorer.score(some).tokens)
    assert scorer.score(some).margins is None


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def test_what_greedy_decoding_writes_is_most_probable_and_nothing_else() -> None:
    model = tiny_model()
    scorer = Scorer(model)
    written = [Request(greedy(model, [1, 2, seed], 4), 3) for seed in range(5)]
    changed = [Request([*request.ids[:-1], (request.ids[-1] + 1) % 37], 3) for request in written]
    empty = Request([1, 2, 3], 3)
    some = [*written, *changed, empty]
    found = is_greedy(scorer, some, scorer.score(some, margins=True))
    assert found.tolist() == [True] * 5 + [False] * 5 + [False], "nothing scored is nothing written"


def test_a_lead_within_rounding_is_settled_in_float64() -> None:
    scorer, some = Scorer(tiny_model()), requests(3, 6)
    scores = scorer.score(some, margins=True)
    assert scores.margins is not None
    exact = is_greedy(scorer, some, scores)
    # As a device might say that rounds otherwise: every lead within rounding, on the wrong side.
    wrong = np.where(np.repeat(exact, np.diff(scores.bounds)), -NEAR_TIE / 2, NEAR_TIE / 2)
    assert is_greedy(scorer, some, Scores(scores.tokens, scores.bounds, wrong)).tolist() == exact.tolist()
    coarse = Scorer(tiny_model(), dtype=torch.bfloat16)
    assert is_greedy(coarse, some, Scores(scores.tokens, scores.bounds, wrong)).tolist() == (~exact).tolist()


def test_sums_by_length_are_settled_too() -> None:
    scorer, some = Scorer(tiny_model()), requests(2, 9)
    exact = scorer.score_float64(some).sums
    lengths = np.array([1.0, 3.0])
    # Far apart as sums, and by length nearer than the rounding of a sum.
    rounded = np.array([exact[0], 3 * (exact[0] + NEAR_TIE / 9)])
    assert np.array_equal(resolve_near_ties(scorer, some, rounded, [(0, 1)]), rounded)
    assert np.array_equal(resolve_near_ties(scorer, some, rounded, [(0, 1)], [lengths]), exact)
