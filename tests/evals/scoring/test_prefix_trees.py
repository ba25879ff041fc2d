"""Rows of prefix trees: nothing twice, nothing lost, and everyone sees exactly their own past."""

import random

import numpy as np
import pytest
import torch

from braidlm.evals.scoring.forward import batch_of
from braidlm.evals.scoring.prefix_trees import ROW, WIDTH_MULTIPLE, PrefixTrees, TreeRow
from braidlm.evals.scoring.requests import Request


def some_requests(seed: int, count: int = 60, letters: int = 3, longest: int = 9) -> list[Request]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        ids = [rng.randrange(letters) for _ in range(rng.randint(1, longest))]
        found.append(Request(ids, rng.randint(1, len(ids))))
    return found


def past(row: TreeRow, node: int) -> list[int]:
    """The tokens that a node sees, by the mask that the models are given."""
    batch, _ = batch_of([row], torch.device("cpu"))
    if batch.subtree_ends is None:
        return row.tokens[: node + 1].tolist()
    seen = batch.mask()[0, 0, node].numpy()
    return batch.tokens[0].numpy()[seen].tolist()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_every_score_is_predicted_from_its_own_past(seed: int, share: bool) -> None:
    requests = some_requests(seed)
    trees = PrefixTrees(requests, share, row=20)
    seen: dict[int, tuple[list[int], int]] = {}
    for row in trees.rows:
        for predictor, target, score_index in zip(row.predictors, row.targets, row.score_indices, strict=True):
            assert score_index not in seen
            seen[int(score_index)] = (past(row, int(predictor)), int(target))
    expected = [
        (list(request.ids[:at]), request.ids[at])
        for request in requests
        for at in range(request.first, len(request.ids))
    ]
    assert [seen[at] for at in range(len(expected))] == expected
    assert trees.bounds[-1] == len(expected)


def test_a_prefix_stands_in_a_row_once() -> None:
    trees = PrefixTrees([Request([1, 2, 3, 4]), Request([1, 2, 3, 5]), Request([1, 2, 6, 7]), Request([1, 2, 3, 4])])
    (row,) = trees.rows
    assert row.tokens.tolist() == [1, 2, 3, 6]
    assert row.positions.tolist() == [0, 1, 2, 2]
    assert row.subtree_ends.tolist() == [4, 4, 3, 4]
    assert not row.is_chain
    assert row.width == WIDTH_MULTIPLE


def test_without_sharing_every_sequence_is_a_row() -> None:
    trees = PrefixTrees([Request([1, 2, 3, 4]), Request([1, 2, 3, 5]), Request([8])], share=False)
    assert [row.tokens.tolist() for row in trees.rows] == [[1, 2, 3], [1, 2, 3]]
    assert all(row.is_chain and row.width == 3 for row in trees.rows)


def test_rows_are_full_and_long_texts_have_their_own() -> None:
    short = [Request([*np.random.default_rng(seed).integers(0, 1000, 10).tolist()]) for seed in range(100)]
    rows = PrefixTrees(short).rows
    assert all(len(row) <= ROW for row in rows)
    assert len(rows) == -(-900 // (ROW // 9 * 9))
    long = [Request([7, *[seed] * 300]) for seed in range(3)]
    assert [len(row) for row in PrefixTrees(long).rows] == [300] * 3
    context = list(range(300))
    (row,) = PrefixTrees([Request([*context, 1, option], 301) for option in range(5)]).rows
    assert len(row) == 301


def test_passes_hold_rows_of_one_width() -> None:
    trees = PrefixTrees(some_requests(1, 300, letters=40, longest=30), row=64)
    for most in (1, 64, 200, 10_000):
        passes = list(trees.passes(most))
        assert sorted(map(id, trees.rows)) == sorted(id(row) for rows in passes for row in rows)
        for rows in passes:
            assert len({(row.is_chain, row.width) for row in rows}) == 1
            assert len(rows) == 1 or len(rows) * rows[0].width <= most


def test_the_layout_depends_on_the_requests_alone() -> None:
    requests = some_requests(3)
    first, second = PrefixTrees(requests), PrefixTrees(list(requests))
    assert [row.tokens.tolist() for row in first.rows] == [row.tokens.tolist() for row in second.rows]


def test_a_window_hides_what_is_too_far_back() -> None:
    trees = PrefixTrees([Request([1, 2, 3, 4]), Request([1, 2, 3, 5, 9]), Request([1, 6, 7])])
    batch, _ = batch_of(trees.rows, torch.device("cpu"))
    near = batch.mask(window=2)[0, 0].int().numpy()
    positions, whole = batch.positions[0].numpy(), batch.mask()[0, 0].int().numpy()
    assert (near == whole * (positions[:, None] - positions[None, :] < 2)).all()
    assert near.sum() < whole.sum()
