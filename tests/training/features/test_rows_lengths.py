"""Shorter sequences at first: as many tokens in more rows, whole ones after, and a run that goes on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch
from braidlm.training.features.distill.distillation import StoredDistillation
from braidlm.training.features.rows import Lengths, ShorterRows
from braidlm.training.recipe import decode_recipe
from braidlm.training.step.step import Stepper, StepReport
from braidlm.training.train import train
from tests.training.tiny_runs import records, stopped_after, tiny_recipe, weight_bytes

PARTS = [{"until": 0.25, "length": 8}, {"until": 0.75, "length": 16}]


def recipe(stories: Path, out: Path, parts: list[dict[str, Any]] = PARTS, **changes: Any) -> dict[str, Any]:
    training = {"lengths": parts, **changes.pop("training", {})}
    return tiny_recipe({"stories": stories}, out, training=training, **changes)


def lengths_of(*parts: ShorterRows) -> Lengths:
    setup: Any = SimpleNamespace(training=SimpleNamespace(lengths=list(parts)))
    return Lengths(setup)


def test_parts_of_the_training_have_their_lengths() -> None:
    lengths = lengths_of(ShorterRows(0.25, 8), ShorterRows(0.75, 16))
    assert [lengths.row_length(share) for share in (0.0, 0.24, 0.25, 0.74, 0.75, 1)] == [8, 8, 16, 16, None, None]
    assert lengths.attended([(1.0, 32)]) == [(0.25, 8), (0.5, 16), (0.25, 32)]
    assert lengths_of().attended([(1.0, 32)]) == [(1.0, 32)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_shapes_of_a_run(accumulation: int, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part ends with the sequences that are begun: rows of 8 tokens read those of 32 in four steps, of 16 in two."""
    shapes: list[tuple[int, ...]] = []
    step = Stepper.step

    def watched(self: Stepper, inputs: np.ndarray, *args: Any, **options: Any) -> StepReport:
        shapes.append(inputs.shape)
        return step(self, inputs, *args, **options)

    monkeypatch.setattr(Stepper, "step", watched)
    rows = {"batch": 4 // accumulation, "accumulation": accumulation}
    run = train(recipe(stories, tmp_path / "run", training=rows))
    assert shapes == [(16, 8)] * 4 + [(8, 16)] * 6 + [(4, 32)] * 2
    assert run.progress.tokens == 12 * 4 * 32


def test_a_stopped_run_goes_on_as_if_it_had_not(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(recipe(stories, tmp_path / "whole"))
    stopped_after(6, monkeypatch, recipe(stories, tmp_path / "parts"))
    parts = train(recipe(stories, tmp_path / "parts"))
    assert weight_bytes(parts.model) == weight_bytes(whole.model)
    assert records(parts.folder) == records(whole.folder)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_student_reads_what_was_stored_of_its_tokens(
    accumulation: int, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its rows are, and in however many parts a step is computed."""
    shapes: list[tuple[int, ...]] = []
    batches: list[Batch] = []
    read_batch, following = StoredDistillation.read_batch, StoredDistillation._next

    def watched_batch(self: StoredDistillation, batch: Batch, share: float) -> Batch:
        batches.append(batch)
        return read_batch(self, batch)

    def watched(self: StoredDistillation, inputs: Tensor) -> tuple[Tensor, Tensor]:
        tokens = slice(self.next_token, self.next_token + inputs.numel())
        found = ids, logs = following(self, inputs)
        positions = batches[-1].whole.positions.reshape(-1)[tokens]
        assert np.array_equal(inputs.reshape(-1), batches[-1].inputs.reshape(-1)[tokens])
        assert np.array_equal(ids.flatten(0, 1), self.stored[0].ids[positions])
        assert np.allclose(logs.flatten(0, 1), self.stored[0].logs[positions])
        shapes.append(tuple(inputs.shape))
        return found

    monkeypatch.setattr(StoredDistillation, "read_batch", watched_batch)
    monkeypatch.setattr(StoredDistillation, "_next", watched)
    teacher = train(tiny_recipe({"stories": stories}, tmp_path / "teacher", training={"budget": 1}))
    rows = {"batch": 4 // accumulation, "accumulation": accumulation}
    taught = {**rows, "distill": {"teachers": [str(teacher.model)], "top_k": 16}}
    train(recipe(stories, tmp_path / "student", training=taught, data={"cache": str(tmp_path / "cache")}))
    assert set(shapes) == {(rows["batch"] * 32 // length, length) for length in (8, 16, 32)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": [{"until": 0.5, "length": 7}]}, "32 tokens, do not make rows of 7"),
        ({"parts": [{"until": 0.5, "length": 8}, {"until": 0.5, "length": 16}]}, "must end after the one before"),
        ({"parts": [{"until": 0, "length": 8}]}, "until"),
        ({"data": {"chunking": "consecutive"}}, "rows with a memory"),
        ({"data": {"pauses": 0.1}}, "pauses are counted for whole sequences"),
    ],
)
def test_lengths_that_cannot_be(stories: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BraidError, match=message):
        decode_recipe(recipe(stories, tmp_path / "run", **changes))


def test_rows_that_a_loss_takes_keep_their_length(stories: Path, tmp_path: Path) -> None:
    losses = {"losses": [{"masked": {"share": 0.5}}]}
    with pytest.raises(BraidError, match=r"'masked' and training.lengths do not go together"):
        train(recipe(stories, tmp_path / "run", training=losses))
