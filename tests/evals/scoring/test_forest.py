"""Rows of prefix trees: nothing twice, nothing lost, and everyone sees exactly their own past."""

import random

import numpy as np
import pytest
import torch

from braidlm.evals.scoring.forest import ROW, STEP, Forest, Request, Row
from braidlm.evals.scoring.readers import batch_of


def some_requests(seed: int, count: int = 60, letters: int = 3, longest: int = 9) -> list[Request]:
    dice = random.Random(seed)
    found = []
    for _ in range(count):
        ids = [dice.randrange(letters) for _ in range(dice.randint(1, longest))]
        found.append(Request(ids, dice.randint(1, len(ids))))
    return found


def past(row: Row, place: int) -> list[int]:
    """The tokens that a place sees, by the mask that the models are given."""
    batch, _ = batch_of([row], torch.device("cpu"))
    if batch.ends is None:
        return row.tokens[: place + 1].tolist()
    seen = batch.mask()[0, 0, place].numpy()
    return batch.tokens[0].numpy()[seen].tolist()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_every_score_is_predicted_from_its_own_past(seed: int, share: bool) -> None:
    requests = some_requests(seed)
    forest = Forest(requests, share, row=20)
    seen: dict[int, tuple[list[int], int]] = {}
    for row in forest.rows:
        for source, target, where in zip(row.sources, row.targets, row.where, strict=True):
            assert where not in seen
            seen[int(where)] = (past(row, int(source)), int(target))
    expected = [
        (list(request.ids[:at]), request.ids[at])
        for request in requests
        for at in range(request.first, len(request.ids))
    ]
    assert [seen[at] for at in range(len(expected))] == expected
    assert forest.bounds[-1] == len(expected)


def test_a_prefix_stands_in_a_row_once() -> None:
    forest = Forest([Request([1, 2, 3, 4]), Request([1, 2, 3, 5]), Request([1, 2, 6, 7]), Request([1, 2, 3, 4])])
    (row,) = forest.rows
    assert row.tokens.tolist() == [1, 2, 3, 6]
    assert row.depths.tolist() == [0, 1, 2, 2]
    assert row.ends.tolist() == [4, 4, 3, 4]
    assert not row.is_chain
    assert row.width == STEP


def test_without_sharing_every_sequence_is_a_row() -> None:
    forest = Forest([Request([1, 2, 3, 4]), Request([1, 2, 3, 5]), Request([8])], share=False)
    assert [row.tokens.tolist() for row in forest.rows] == [[1, 2, 3], [1, 2, 3]]
    assert all(row.is_chain and row.width == 3 for row in forest.rows)


def test_rows_are_full_and_long_texts_have_their_own() -> None:
    short = [Request([*np.random.default_rng(seed).integers(0, 1000, 10).tolist()]) for seed in range(100)]
    rows = Forest(short).rows
    assert all(len(row) <= ROW for row in rows)
    assert len(rows) == -(-900 // (ROW // 9 * 9))
    long = [Request([7, *[seed] * 300]) for seed in range(3)]
    assert [len(row) for row in Forest(long).rows] == [300] * 3
    context = list(range(300))
    (row,) = Forest([Request([*context, 1, option], 301) for option in range(5)]).rows
    assert len(row) == 301


def test_passes_hold_rows_of_one_width() -> None:
    forest = Forest(some_requests(1, 300, letters=40, longest=30), row=64)
    for most in (1, 64, 200, 10_000):
        passes = list(forest.passes(most))
        assert sorted(map(id, forest.rows)) == sorted(id(row) for rows in passes for row in rows)
        for rows in passes:
            assert len({(row.is_chain, row.width) for row in rows}) == 1
            assert len(rows) == 1 or len(rows) * rows[0].width <= most


def test_the_layout_depends_on_the_requests_alone() -> None:
    requests = some_requests(3)
    first, second = Forest(requests), Forest(list(requests))
    assert [row.tokens.tolist() for row in first.rows] == [row.tokens.tolist() for row in second.rows]


def test_a_window_hides_what_is_too_far_back() -> None:
    forest = Forest([Request([1, 2, 3, 4]), Request([1, 2, 3, 5, 9]), Request([1, 6, 7])])
    batch, _ = batch_of(forest.rows, torch.device("cpu"))
    near = batch.mask(window=2)[0, 0].int().numpy()
    depths, whole = batch.depths[0].numpy(), batch.mask()[0, 0].int().numpy()
    assert (near == whole * (depths[:, None] - depths[None, :] < 2)).all()
    assert near.sum() < whole.sum()
