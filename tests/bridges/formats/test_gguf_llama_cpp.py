"""GGUF files run by llama.cpp itself, where llama-cpp-python is installed: the same tokens, logits and greedy texts."""

import json
import string
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from braidlm.bridges.formats.gguf import PRE_TOKENIZERS
from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.data.tokenizing.build import BraidTokenizer, SpecialTokens, bytes_tokenizer
from braidlm.opening.convert import convert
from tests.bridges.gguf_models import GPT2, LLAMA, MODELS, saved_braid

pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("llama_cpp")

TEXTS = [
    "It's 1234 o'clock; they'll say \"we've 25 apples\" -- don't they?\n\n  The naïve café\thas   12,345.67 teas.\r\n",
    "Ein Bär läuft über die Straße. 猫は魚が好きです。 Кот спит на крыше 2024 года. नमस्ते दुनिया 🙂👍🏽\n",
    "def f(x):\n    return x ** 2  # square\n\n\nprint(f(3), 'done')\n",
]
LOGITS = {"llama": 2e-4, "gpt2": 2e-2}
"""How far logits may be from ours: llama.cpp computes GELU in half precision."""


def opened(path: Path, **options: Any) -> Any:
    """A file in llama.cpp, with keys and values kept in float32 as ours are."""
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    return llama_cpp.Llama(str(path), n_ctx=0, n_threads=1, n_threads_batch=1, verbose=False, **exact, **options)


@pytest.mark.parametrize("architecture", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_logits(tmp_path, architecture):
    ours = saved_braid(tmp_path / "braid", architecture)
    convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf")
    theirs = opened(tmp_path / "model.gguf", logits_all=True)
    ids = torch.randint(0, 258, (20,), generator=torch.Generator().manual_seed(1))
    theirs.eval(ids.tolist())
    expected = ours(ids[None]).logits[0].numpy()
    tolerance = LOGITS["gpt2" if architecture.get("positions") == "learned" else "llama"]
    assert np.abs(theirs.scores[: len(ids)] - expected).max() <= tolerance


WIDE = {**LLAMA, "width": 256, "block": {"attention": {"heads": 4}, "feed": {"hidden": 256}}}
SMALLER = {
    "q8_0": (0.28, 0.15),
    "q6_k": (0.22, 0.3),
    "q5_k_m": (0.19, 0.5),
    "q5_0": (0.19, 0.5),
    "q4_k_m": (0.165, 0.8),
    "q4_0": (0.16, 0.9),
}
"""How large a file is at most, as a share of float32, and how far a logit may be from ours, as a share of the largest.
The random weights of these models are rounded worse than trained ones."""


@pytest.mark.parametrize("dtype", SMALLER)
@torch.no_grad()
def test_smaller_types(tmp_path, dtype):
    ours = saved_braid(tmp_path / "braid", WIDE)
    for kind in ("f32", dtype):
        convert(tmp_path / "braid", tmp_path / f"{kind}.gguf", to="gguf", dtype=kind)
    theirs = opened(tmp_path / f"{dtype}.gguf", logits_all=True)
    ids = torch.randint(0, 258, (20,), generator=torch.Generator().manual_seed(1))
    theirs.eval(ids.tolist())
    expected = ours(ids[None]).logits[0].numpy()
    sizes = [(tmp_path / f"{kind}.gguf").stat().st_size for kind in (dtype, "f32")]
    most, distance = SMALLER[dtype]
    assert sizes[0] / sizes[1] < most
    assert np.abs(theirs.scores[: len(ids)] - expected).max() < distance * np.abs(expected).max()
    assert "braid.lineage" in theirs.metadata


@pytest.mark.parametrize("architecture", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_greedy_texts(tmp_path, architecture):
    ours = saved_braid(tmp_path / "braid", architecture)
    convert(tmp_path / "braid", tmp_path / "model.gguf", to="gguf")
    theirs = opened(tmp_path / "model.gguf")
    prompts = [
        bytes_tokenizer().encode(f"{letter} and {number}") for number, letter in enumerate(string.ascii_lowercase)
    ]
    greedy = decode_tokens(Decoder(ours, len(prompts), 24), prompts, 12, Sampling(temperature=0), None, 0)
    texts = zip(*(tokens for tokens, _ in greedy), strict=True)
    for prompt, text in zip(prompts, texts, strict=True):
        assert list(islice(theirs.generate(prompt, temp=0.0, repeat_penalty=1.0), 12)) == list(text)


def merging_everything() -> Tokenizer:
    """A BPE that was trained on texts not divided into words: where words begin and end decides about most tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), list(SpecialTokens().order)
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, special_tokens=special, initial_alphabet=alphabet
    )
    characters = sorted(set("".join(TEXTS)))
    backend.train_from_iterator(
        [*TEXTS, *(a + b for a in characters for b in characters if not (a + b).isalpha())], trainer
    )
    return backend


@pytest.fixture(scope="module", params=["bytes", *PRE_TOKENIZERS])
def tokenizers(request, tmp_path_factory) -> tuple[BraidTokenizer, Any]:
    """A tokenizer of ours with a way to divide texts, and llama.cpp's from the file."""
    if request.param == "bytes":
        ours = bytes_tokenizer()
    else:
        steps, ignore_merges = PRE_TOKENIZERS[request.param]
        facts = json.loads(merging_everything().to_str())
        full = {"ByteLevel": {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}}
        filled = [{**full.get(step["type"], {"invert": False}), **step} for step in steps]
        facts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": filled}
        facts["model"]["ignore_merges"] = ignore_merges
        ours = BraidTokenizer(Tokenizer.from_str(json.dumps(facts)), SpecialTokens())
    ours.backend.add_tokens(["<word>"])
    folder = tmp_path_factory.mktemp("tokens")
    saved_braid(folder / "braid", LLAMA, ours, rows=ours.vocab_size + 2)
    convert(folder / "braid", folder / "model.gguf", to="gguf")
    return ours, opened(folder / "model.gguf")


def their_tokens(model: Any, text: str) -> list[int]:
    return model.tokenize(text.encode(), add_bos=True, special=False)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(" \n\t\r'") | st.sampled_from("".join(TEXTS)) | st.sampled_from(["'ll", "123", "  ", "<word>"])
    )
)
def test_tokens_of_mixed_texts(tokenizers, pieces):
    ours, theirs = tokenizers
    text = "".join(pieces)
    assert their_tokens(theirs, text) == ours.encode(text)


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_tokens_of_any_text(tokenizers, text):
    ours, theirs = tokenizers
    assert their_tokens(theirs, text) == ours.encode(text)


def test_special_tokens_are_text_and_every_text_comes_back(tokenizers):
    ours, theirs = tokenizers
    text = "<|endoftext|>".join(TEXTS)
    ids = their_tokens(theirs, text)
    assert ids == ours.encode(text)
    assert ours.eos_id not in ids
    assert theirs.detokenize(ids).decode() == text
    assert (theirs.token_eos(), theirs.token_bos()) == (ours.eos_id, ours.bos_id)
