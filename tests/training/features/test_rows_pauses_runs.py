"""Runs with pauses: budgets count text alone, what is trained is a plain model, and a run goes on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from braidlm.core.errors import BraidError
from braidlm.data.packing.prepare import prepare
from braidlm.training.loop import Trainer
from braidlm.training.train import train
from tests.training.tiny_runs import records, stopped_after, tiny_recipe, weight_bytes, weights

PAUSES = ["eos=<|endoftext|>", "pad=<|pad|>", "<pause>"]


@pytest.fixture(scope="module")
def paused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed data set whose tokenizer has a pause."""
    folder = tmp_path_factory.mktemp("data") / "stories"
    prepare("stories", folder, documents=120, tokenizer="bpe", vocab_size=300, special_tokens=PAUSES, workers=1)
    return folder


def recipe(data: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return tiny_recipe({"stories": data}, out, data={"pauses": 0.25}, **changes)


def test_sequences_have_their_length_and_budgets_count_text(
    paused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []
    step = Trainer._step

    def spy(self: Trainer) -> None:
        original = self.stepper.step

        def watched(inputs: np.ndarray, *args: Any, **options: Any) -> Any:
            seen.append(inputs)
            return original(inputs, *args, **options)

        monkeypatch.setattr(self.stepper, "step", watched)
        step(self)
        monkeypatch.setattr(self.stepper, "step", original)

    monkeypatch.setattr(Trainer, "_step", spy)
    run = train(recipe(paused, tmp_path / "run", training={"budget": "1000 tokens"}))
    assert run.progress.tokens == 1000
    assert {inputs.shape for inputs in seen} == {(4, 32)}
    assert all((inputs == 2).sum(1).tolist() == [8] * 4 for inputs in seen)


def test_the_model_is_a_plain_one(paused: Path, tmp_path: Path) -> None:
    run = train(recipe(paused, tmp_path / "run"))
    before = train(recipe(paused, tmp_path / "begin", training={"budget": "1 steps"}))
    assert not torch.equal(*(weights(one.model)["model.embedding.weight"][2] for one in (run, before)))
    model = AutoModelForCausalLM.from_pretrained(run.model, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    assert tokenizer.convert_tokens_to_ids("<pause>") == 2
    ids = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    thinking = torch.cat((ids, torch.full((1, 3), 2)), dim=1)
    written = model.generate(thinking, max_new_tokens=8, do_sample=False)[0, thinking.shape[1] :]
    assert 2 not in written
    assert "<pause>" not in tokenizer.decode(written)


def test_a_stopped_run_goes_on(paused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(recipe(paused, tmp_path / "whole"))
    stopped_after(7, monkeypatch, recipe(paused, tmp_path / "parts"))
    parts = train(recipe(paused, tmp_path / "parts"))
    assert weight_bytes(parts.model) == weight_bytes(whole.model)
    assert records(parts.folder) == records(whole.folder)


def test_a_tokenizer_without_a_pause_is_refused(stories: Path, tmp_path: Path) -> None:
    with pytest.raises(BraidError, match="needs a tokenizer that has the special token <pause>"):
        train(recipe(stories, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
