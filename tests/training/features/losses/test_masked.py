"""The hybrid objective: which tokens are masked, what is predicted where, and runs with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.data.packing.prepare import prepare
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.model.heads.losses import IGNORED
from braidlm.training.features.losses.masked import SHOWN, Masked, MaskedConfig, masked_counts
from braidlm.training.recipe import decode_recipe
from braidlm.training.step.objective import Objective, two_way_options
from braidlm.training.train import train
from tests.tiny_models import VOCABULARY, random_ids, tiny_model
from tests.training.features.losses.text_batches import batch_of
from tests.training.forked_runs import fork
from tests.training.tiny_runs import records, stopped_after, tiny_recipe, weight_bytes, weights, written

TOKEN = VOCABULARY - 1
"""The mask token, which no text has."""
SPECIAL = ["eos=<|endoftext|>", "pad=<|pad|>", "mask=<mask>", "<pause>"]


def made(rows: int = 4, seed: int = 0, model: Any = None, **options: Any) -> Masked:
    loss = Masked(MaskedConfig(**options), tiny_model() if model is None else model)
    loss.begin_run(rows, seed)
    loss.token, loss.ordinary = TOKEN, np.arange(TOKEN)
    return loss


def test_rows_are_shared_out_and_each_masked_token_is_predicted_before_itself() -> None:
    loss, batch = made(rows=4, share=0.5, rate=0.5, replaced_by="mask"), batch_of(8, 11)
    arranged = loss.read_batch(batch)
    rows = {tuple(row) for row in batch.labels.tolist()}
    for begin in (0, 4):
        for row in (begin, begin + 1):
            assert tuple(arranged.labels[row].tolist()) in rows
            assert (arranged.inputs[row, 1:] == arranged.labels[row, :-1]).all(), "causal rows are as they were"
        for row in (begin + 2, begin + 3):
            predicted = arranged.labels[row] >= 0
            assert predicted.sum() == 5
            assert (np.flatnonzero(arranged.inputs[row] == TOKEN) - 1).tolist() == np.flatnonzero(predicted).tolist()
            restored = np.where(arranged.inputs[row, 1:] == TOKEN, arranged.labels[row, :-1], arranged.inputs[row, 1:])
            assert tuple(restored.tolist()) in {row[:-1] for row in rows}
            assert (arranged.labels[row][~predicted] == SHOWN).all()
    assert loss.texts.item() == 4 * 11
    assert loss.masked.item() == 4 * 5
    assert arranged.word_count == batch.word_count == 88, "masked rows are text that is shown"


LENGTHS = st.lists(st.integers(0, 9), min_size=4, max_size=4)


@given(LENGTHS, st.floats(0.05, 1.0), st.sampled_from(["mixed", "mask"]), st.integers(0, 99))
def test_only_text_that_is_trained_is_seen_and_predicted(
    lengths: list[int], rate: float, replaced_by: Any, seed: int
) -> None:
    loss = made(rows=2, seed=seed, rate=rate, replaced_by=replaced_by)
    batch = batch_of(4, 9, lengths)
    arranged = loss.read_batch(batch)
    taken = np.array([False, True, False, True])
    predicted = arranged.labels[taken] >= 0
    assert max(int(predicted.sum()), 1) == loss.masked.item()
    assert max(int((arranged.labels[~taken] != IGNORED).sum()), 1) == loss.texts.item()
    assert not predicted[:, -1].any(), "the token after the row is no input"
    assert sorted((arranged.labels != IGNORED).sum(1).tolist()) == sorted(lengths)
    other = replace(batch, inputs=batch.inputs.copy())
    for row, length in enumerate(lengths):
        other.inputs[row, length + 1 :] = 0  # text that comes later
    assert (loss.read_batch(other).inputs[taken] == arranged.inputs[taken]).all()


def test_one_in_ten_is_another_token_and_one_in_ten_is_itself() -> None:
    loss = made(rate=1.0, replaced_by="mixed")
    inputs = np.full((100, 101), 3)
    masked, labels = loss.mask(inputs, inputs.copy(), 0)
    shares = [(masked[:, 1:] == token).mean() for token in (TOKEN, 3)]
    assert shares == [pytest.approx(0.8, abs=0.02), pytest.approx(0.1 + 0.1 / TOKEN, abs=0.02)]
    assert (labels[:, :-1] == 3).all()
    assert set(np.unique(masked)) == set(range(VOCABULARY))


def test_the_rate_changes_linearly_and_every_step_masks_others() -> None:
    loss, rates = made(rate=0.4, final_rate=0.2), []
    for share in (0.0, 0.25, 1.0, 1.1):
        assert loss.begin_step(3, share) is False
        rates.append(loss.rate)
    assert rates == [0.4, pytest.approx(0.35), pytest.approx(0.2), pytest.approx(0.2)]
    batch, seen = batch_of(4, 32), []
    for step in (3, 4, 3):
        loss.begin_step(step, 0.0)
        seen.append(loss.read_batch(batch).inputs)
    assert not (seen[0] == seen[1]).all()
    assert (seen[0] == seen[2]).all()


def test_processes_together_mask_what_one_does() -> None:
    alone = made(rows=2).read_batch(batch_of(8, 16))
    for first in (0, 4):
        loss = made(rows=2)
        mine = loss.read_batch(batch_of(8, 16, first=first, own=4))
        assert (mine.inputs == alone.inputs[first : first + 4]).all()
        assert (mine.labels == alone.labels[first : first + 4]).all()
        assert loss.masked.item() == masked_counts(np.ones((4, 16), bool), 0.3).sum()


@pytest.mark.parametrize("experts", [None, 3])
def test_losses_and_gradients_are_those_of_two_passes(experts: int | None) -> None:
    """Of the whole batch in micro-batches, against plain cross entropy of every row, and the routers' losses."""
    model = tiny_model(torch.float64, block={"feed": {"kind": "mlp", "experts": experts}}).train()
    loss, batch = made(rows=4, share=0.25, model=model), batch_of(8, 12, [12, 5, 12, 12, 1, 12, 12, 12])
    arranged = loss.read_batch(batch)
    objective = Objective(model, extra={"masked": loss})
    inputs, labels = torch.from_numpy(arranged.inputs), torch.from_numpy(arranged.labels)
    count = torch.tensor(float(batch.target_count))
    found = [objective(*piece, count) for piece in zip(inputs.chunk(2), labels.chunk(2), strict=True)]
    parameters = [p for p in model.parameters() if p.requires_grad]
    whole = sum(0.75 * each.text + 0.25 * each.extra["masked"] for each in found)
    ours = torch.autograd.grad(whole, parameters, retain_graph=True, allow_unused=True)

    def log_losses(row: int, two_way: int) -> torch.Tensor:
        own = inputs[row : row + 1]
        hidden = model.run(own, **two_way_options(model.model, own, two_way, by_masks=True)).hidden
        predicted = labels[row] >= 0
        scores = model.head(hidden)[0, predicted].log_softmax(-1)
        return -scores.gather(1, labels[row, predicted][:, None])[:, 0]

    text = torch.cat([log_losses(row, 0) for row in range(8) if row % 4 < 3]).mean()
    masked = torch.cat([log_losses(row, 1) for row in (3, 7)]).mean()
    torch.testing.assert_close(sum(each.text for each in found), text)
    torch.testing.assert_close(sum(each.extra["masked"] for each in found), masked)
    theirs = torch.autograd.grad(0.75 * text + 0.25 * masked, parameters, allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    if experts is not None:
        shares = [(piece != IGNORED).sum() / count for piece in labels.chunk(2)]
        assert sum(shares) == pytest.approx(1.0)
        assert all(each.routing is not None and each.routing > 0 for each in found)


def test_a_token_that_comes_again_is_found_by_looking_ahead() -> None:
    """Texts of four letters twice: only those who look ahead can tell the first four."""
    model = tiny_model(stages=["block"], positions="learned").train()
    loss = made(rows=32, rate=0.2, final_rate=0.2, replaced_by="mask", model=model)
    objective, optimizer = Objective(model, extra={"masked": loss}), torch.optim.Adam(model.parameters(), 1e-2)
    ahead: list[float] = []
    for step in range(150):
        letters = random_ids(32, 4, seed=step, vocab_size=8)
        text = torch.cat((torch.full((32, 1), 9), letters, letters), dim=1).numpy()
        loss.begin_step(step, 0.0)
        batch = loss.read_batch(batch_of(32, 8, text=text))
        inputs, labels = torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels)
        losses = objective(inputs, labels, torch.tensor(256.0))
        optimizer.zero_grad()
        (losses.text + losses.extra["masked"]).backward()
        optimizer.step()
        if step < 5 or step >= 145:
            hidden = model.run(inputs, two_way=loss.taken_rows).hidden
            first = labels[16:, :4].masked_fill(labels[16:, :4] < 0, IGNORED)
            ahead.append(model.head.loss(hidden[16:, :4], first).item())
    assert np.mean(ahead[:5]) > np.log(8)
    assert np.mean(ahead[-5:]) < 0.5 * np.log(8)


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed data set whose tokenizer has a mask token."""
    folder = tmp_path_factory.mktemp("data") / "stories"
    prepare("stories", folder, documents=120, tokenizer="bpe", vocab_size=300, special_tokens=SPECIAL, workers=1)
    return folder


def recipe(packed: Path, out: Path, loss: Any = "masked", **changes: Any) -> dict[str, Any]:
    training = {"losses": [loss], **changes.pop("training", {})}
    return tiny_recipe({"stories": packed}, out, training=training, log={"every": 1}, **changes)


def test_the_tokenizer_says_which_token_masks(masks: Path, stories: Path) -> None:
    loss, tokenizer = made(model=tiny_model(vocab_size=300)), load_tokenizer(masks)
    loss.read_tokenizer(tokenizer)
    assert tokenizer.decode([loss.token]) == "<mask>"
    assert sorted({*loss.ordinary, 0, 1, 2, 3}) == list(range(300))
    assert not {0, 1, 2, 3} & set(loss.ordinary)
    other = made(token="<|pad|>")
    other.read_tokenizer(tokenizer)
    assert other.token == 1
    with pytest.raises(BraidError, match="the tokenizer has no mask token"):
        loss.read_tokenizer(load_tokenizer(stories))
    with pytest.raises(BraidError, match="'<gap>' is no special token"):
        made(token="<gap>").read_tokenizer(tokenizer)


def test_runs_learn_it_and_go_on(masks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words and tokens are those of a plain run; marks in words cut rows."""
    longer: dict[str, Any] = {"training": {"budget": "900 words"}, "checkpoints": {"every": "150 words"}}
    whole = train(recipe(masks, tmp_path / "whole", **longer))
    assert whole.progress.words == 900
    recorded = records(whole.folder, "train")
    for losses in ([each["loss"] for each in recorded], [each["extra_losses"]["masked"] for each in recorded]):
        assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.2
    stopped_after(7, monkeypatch, recipe(masks, tmp_path / "parts", **longer))
    parts = train(recipe(masks, tmp_path / "parts", **longer))
    assert weight_bytes(parts.model) == weight_bytes(whole.model)
    assert records(parts.folder) == records(whole.folder)
    assert not load_model(whole.model).training, "the folder is a plain causal model"


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"pauses": 0.25}},
        {"data": {"chunking": "documents"}},
        {"model": {"head": {"kind": "bytes_parallel", "width": 8, "heads": 2}, "tie_embeddings": False}},
        {"model": {"block": {"attention": {"window": 8}}}},
        {"training": {"losses": ["masked", "next_sentence", {"early_exit": {"weights": "equal", "layers": [1]}}]}},
        {"training": {"activation_checkpointing": True, "accumulation": 2}},
    ],
)
def test_it_goes_with_other_options(changes: dict[str, Any], masks: Path, tmp_path: Path) -> None:
    model = {"stages": [{"block": {"layers": 2}}], **changes.pop("model", {})}
    run = train(recipe(masks, tmp_path / "run", model=model, **changes))
    assert run.finished
    assert all(np.isfinite(each["extra_losses"]["masked"]) for each in records(run.folder, "train"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"batch": 1}}, "a micro-batch of one row"),
        ({"data": {"chunking": "consecutive"}}, "the loss 'masked' and training.memory do not go together"),
        ({"model": {"block": {"attention": {"kind": "stick_breaking"}}}}, "cannot read rows both ways"),
    ],
)
def test_what_cannot_be_is_said_before_training(
    changes: dict[str, Any], message: str, masks: Path, tmp_path: Path
) -> None:
    with pytest.raises(BraidError, match=message):
        train(recipe(masks, tmp_path / "run", **changes))


def test_options_that_cannot_be(masks: Path, tmp_path: Path) -> None:
    for options in ({"share": 0.0}, {"share": 1.0}, {"rate": 0.0}, {"replaced_by": "nothing"}, {"weight": 1.0}):
        with pytest.raises(BraidError, match=next(iter(options))):
            decode_recipe(recipe(masks, tmp_path / "run", {"masked": options}))


@pytest.mark.slow
def test_two_processes_equal_two_micro_batches(masks: Path, tmp_path: Path) -> None:
    alone = train(recipe(masks, tmp_path / "alone", training={"accumulation": 2}))
    file = written(recipe(masks, tmp_path / "run"), tmp_path)
    fork(tmp_path / "screen", "train", file, "--device", "cpu", processes=2).finish()
    ours = weights(tmp_path / "run" / "checkpoints" / alone.model.name)
    for name, tensor in weights(alone.model).items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-5)
