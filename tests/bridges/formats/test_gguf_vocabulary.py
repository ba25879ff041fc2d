"""The tokenizer of a GGUF file: tokens, types, merges, and a name of a pre-tokenizer only where it is the right one."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from braidlm.bridges.formats.gguf import Vocabulary, pre_tokenizer_name, vocabulary_problems
from braidlm.data.tokenizing.build import BraidTokenizer, SpecialTokens, bytes_tokenizer, train_bpe

TEXTS = ["the cat sat on the mat, and the dog sat on the cat"] * 3
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""As Llama 3's tokenizer.json has it."""
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = {**BYTES, "use_regex": True}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def trained() -> BraidTokenizer:
    return BraidTokenizer(train_bpe(TEXTS, 300), SpecialTokens())


def changed(change: Callable[[dict[str, Any]], Any]) -> BraidTokenizer:
    """A trained tokenizer whose file is changed."""
    facts = json.loads(trained().backend.to_str())
    change(facts)
    return BraidTokenizer(Tokenizer.from_str(json.dumps(facts)), SpecialTokens())


def test_tokens_types_and_merges():
    tokenizer = trained()
    tokenizer.backend.add_tokens(["<word>"])
    size = tokenizer.vocab_size
    vocabulary = Vocabulary(tokenizer, size + 3)
    assert vocabulary_problems(tokenizer, size + 3) == []
    assert [tokenizer.backend.token_to_id(token) for token in vocabulary.tokens[:size]] == list(range(size))
    types = dict(zip(vocabulary.tokens, vocabulary.types, strict=True))
    assert types.pop("<|endoftext|>") == types.pop("<|pad|>") == "CONTROL"
    assert types.pop("<word>") == "USER_DEFINED"
    unused = {token for token, kind in types.items() if kind == "UNUSED"}
    assert unused == set(vocabulary.tokens[size:])
    assert set(types.values()) == {"NORMAL", "UNUSED"}
    assert vocabulary.merges[0] == "a t"
    # Each merge makes a token of the two before it, so a space divides them without doubt.
    assert all("".join(merge.split(" ")) in types for merge in vocabulary.merges)


@pytest.mark.parametrize(
    ("pre_tokenizer", "ignore_merges", "name"),
    [
        (GPT2, False, "gpt-2"),
        ({**GPT2, "trim_offsets": False}, False, "gpt-2"),
        (sequence({"type": "Digits", "individual_digits": True}, GPT2), False, "smollm"),
        (sequence(split(SPLIT.replace("{1,3}", "")), BYTES), False, "qwen2"),
        (sequence(split(SPLIT), BYTES), True, "llama-bpe"),
        (sequence(split(SPLIT), BYTES), False, None),
        (sequence(split(SPLIT.replace("{1,3}", "{1,2}")), BYTES), True, None),
        (sequence({"type": "Digits", "individual_digits": False}, GPT2), False, None),
        ({**GPT2, "add_prefix_space": True}, False, None),
        (BYTES, False, None),
        ({"type": "Whitespace"}, False, None),
    ],
)
def test_a_pre_tokenizer_is_named_only_where_it_is_the_same(pre_tokenizer, ignore_merges, name):
    def change(facts):
        facts["pre_tokenizer"] = pre_tokenizer
        facts["model"]["ignore_merges"] = ignore_merges

    tokenizer = changed(change)
    assert pre_tokenizer_name(tokenizer) == name
    assert (len(vocabulary_problems(tokenizer, 300)) == 0) == (name is not None)


def test_bytes_need_no_words():
    tokenizer = bytes_tokenizer()
    assert pre_tokenizer_name(tokenizer) == "gpt-2"
    assert vocabulary_problems(tokenizer, 258) == []
    assert Vocabulary(tokenizer, 258).merges == []


def _unigram(facts):
    facts["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<|endoftext|>", 0.0], ["<|pad|>", 0.0]]}


def _without_a_byte(facts):
    vocab = facts["model"]["vocab"]
    vocab["no byte"] = vocab.pop("Ā")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_unigram, "the tokenizer is of the kind Unigram"),
        (_without_a_byte, "the tokenizer has no token for 1 of the 256 bytes"),
        (lambda facts: facts.update(normalizer={"type": "NFC"}), "the tokenizer changes texts first (NFC)"),
        (lambda facts: facts["model"].update(dropout=0.1), "options that llama.cpp lacks: dropout"),
        (lambda facts: facts["pre_tokenizer"].update(add_prefix_space=True), "puts a space before every text"),
        (lambda facts: facts.update(pre_tokenizer=None), "no pre-tokenizer of gpt-2, smollm, qwen2, llama-bpe"),
    ],
)
def test_what_llama_cpp_would_tokenize_otherwise_is_refused(change, problem):
    assert any(problem in found for found in vocabulary_problems(changed(change), 300))


def test_other_refusals():
    tokenizer = trained()
    tokenizer.backend.add_tokens([AddedToken("<word>", lstrip=True)])
    assert vocabulary_problems(tokenizer, 400) == ["llama.cpp finds these tokens in other places of a text: <word>"]
    rows = trained().vocab_size - 1
    assert f"the model only {rows} rows" in vocabulary_problems(trained(), rows)[0]
    nameless = BraidTokenizer(trained().backend, SpecialTokens(eos=None, bos=None, pad=None))
    assert vocabulary_problems(nameless, 300) == ["no token ends a text; llama.cpp would stop at token 11"]
