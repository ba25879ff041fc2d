"""Token dropout: as many tokens as asked for are replaced, others in every step, and nothing else changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.core.models.runs import newest_checkpoint
from braidlm.data.loading.batches import Batch
from braidlm.data.loading.chunking import Contiguous
from braidlm.data.loading.loader import Loader
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.data.tokenizing.tokenizer import SpecialTokens
from braidlm.training.features.token_dropout import TokenDropout, TokenDropoutConfig
from braidlm.training.train import train
from tests.data.packed_sets import stream
from tests.training.tiny_runs import stopped_after, tiny_recipe, weight_bytes

TOKENIZER = bytes_tokenizer(SpecialTokens(mask="<mask>", order=("<|endoftext|>", "<|pad|>", "<mask>")))
MASK = TOKENIZER.backend.token_to_id("<mask>")
LENGTH = 50


def read(rows: int = 6, **options: Any) -> Batch:
    """A batch of bytes."""
    batch = Loader([stream(2000, "stories")], Contiguous(), LENGTH, rows=rows, seed=1, **options).next_batch()
    return replace(batch, inputs=batch.inputs % 256 + len(TOKENIZER.special.order))


def dropped(batch: Batch, step: int = 0, share: float = 0.0, seed: int = 1, **config: Any) -> Batch:
    feature = TokenDropout(TokenDropoutConfig(**{"rate": 0.2, **config}), TOKENIZER, seed)
    feature.begin_step(step, share)
    return feature.read_batch(batch)


@given(st.floats(0.01, 0.99), st.integers(0, 9), st.sampled_from(["random", "mask"]))
def test_inputs_change_and_labels_stay(rate: float, step: int, replaced_by: Any) -> None:
    batch = read()
    plain = batch.inputs.copy()
    noisy = dropped(batch, step, rate=rate, replaced_by=replaced_by)
    assert np.array_equal(batch.inputs, plain), "the batch that was read stays as it is"
    assert np.array_equal(noisy.labels, batch.labels)
    changed, size = noisy.inputs != plain, plain.size
    # A random token may be the same again, one time in 256.
    assert abs(changed.sum() - rate * size) < 5 * np.sqrt(rate * (1 - rate) * size) + 0.02 * size
    special = {TOKENIZER.backend.token_to_id(token) for token in TOKENIZER.special.order}
    put = set(noisy.inputs[changed].tolist())
    assert put <= {MASK} if replaced_by == "mask" else not put & special


def test_special_tokens_are_never_replaced() -> None:
    batch = read()
    batch.inputs[:, ::3] = TOKENIZER.backend.token_to_id("<|endoftext|>")
    noisy = dropped(batch, rate=0.9)
    assert np.array_equal(noisy.inputs[:, ::3], batch.inputs[:, ::3])
    assert (noisy.inputs[:, 1::3] != batch.inputs[:, 1::3]).mean() > 0.8


def test_each_step_replaces_others_and_processes_agree() -> None:
    whole = read()
    assert np.array_equal(dropped(whole).inputs, dropped(whole).inputs)
    assert not np.array_equal(dropped(whole, step=1).inputs, dropped(whole, step=2).inputs)
    assert not np.array_equal(dropped(whole, seed=1).inputs, dropped(whole, seed=2).inputs)
    halves = [dropped(read(rows=3, rank=rank, world=2)) for rank in (0, 1)]
    assert np.array_equal(np.concatenate([half.inputs for half in halves]), dropped(whole).inputs)


def test_the_rate_changes_over_the_training() -> None:
    batch = read()
    rates = [
        (dropped(batch, share=share, rate=0.8, final_rate=0.0).inputs != batch.inputs).mean() for share in (0, 0.5, 1)
    ]
    assert rates[0] > 0.7 > 0.5 > rates[1] > 0.3 > rates[2] == 0


def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut, plain = (
        tiny_recipe({"stories": stories}, tmp_path / out, training={"token_dropout": noise})
        for out, noise in (("whole", {"rate": 0.3}), ("cut", {"rate": 0.3}), ("plain", None))
    )
    for recipe in (whole, plain):
        train(recipe, device="cpu")
    stopped_after(7, monkeypatch, cut)
    train(cut, device="cpu")
    results = [weight_bytes(newest_checkpoint(recipe["out"])) for recipe in (whole, cut, plain)]
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rate": 0.0}, "with a rate of 0 nothing is replaced"),
        ({"rate": 0.1, "replaced_by": "mask"}, "the tokenizer has no mask token"),
        ({"rate": 1.0}, r"training\.token_dropout\.rate: expected a number"),
    ],
)
def test_what_is_refused(config: dict[str, Any], message: str, stories: Path, tmp_path: Path) -> None:
    with pytest.raises(BraidError, match=message):
        train(tiny_recipe({"stories": stories}, tmp_path / "run", training={"token_dropout": config}), device="cpu")
