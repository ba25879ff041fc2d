"""Opening a model by its name, whatever wrote its folder."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import braidlm
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.opening.open import open_model
from tests.tiny_models import random_ids, tiny_model

TOKENIZER = bytes_tokenizer()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(vocab_size=TOKENIZER.vocab_size, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    TOKENIZER.save(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "little"
    model = tiny_model(vocab_size=TOKENIZER.vocab_size)
    save_model(model, run / "checkpoints" / "step-1", TOKENIZER, {"training": {"steps": 1}})
    (run / "recipe.yaml").write_text("name: little\n")
    return run


@torch.no_grad()
def test_a_folder_of_transformers_is_imported_on_the_fly(gpt2: Path) -> None:
    ids = random_ids(2, 16, vocab_size=TOKENIZER.vocab_size)
    model, tokenizer = braidlm.load(gpt2)
    expected = GPT2LMHeadModel.from_pretrained(gpt2).eval()(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert not model.training
    assert tokenizer.fingerprint == TOKENIZER.fingerprint


def test_load_takes_every_name(run: Path) -> None:
    by_run, by_name = braidlm.load(run)[0], braidlm.load(run / "step-1")[0]
    for one, other in zip(by_run.parameters(), by_name.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_title_is_the_runs(run: Path) -> None:
    assert open_model(run).title == "little"


def test_a_model_that_no_bridge_reads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(BraidError, match="holds a 'mamba' model; Braid reads braid, gpt2, llama"):
        braidlm.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BraidError, match="no model_type"):
        braidlm.load(tmp_path)


def test_paths_are_checked_for_both_kinds(run: Path, gpt2: Path) -> None:
    for name in (run, gpt2):
        with pytest.raises(BraidError, match="path"):
            braidlm.load(name, paths=["nothing"])
