"""A byte-level BPE as llama.cpp reads it, and whether llama.cpp makes the same tokens of every text."""

from typing import Any

from braidlm.data.tokenizing.tokenizer import BraidTokenizer, byte_characters

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel"}
_GPT2 = {"type": "ByteLevel", "use_regex": True}


def _split(digits: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": _PATTERN.replace("DIGITS", digits)}, "behavior": "Isolated"}


PRE_TOKENIZERS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "gpt-2": ([_GPT2], False),
    "smollm": ([{"type": "Digits", "individual_digits": True}, _GPT2], False),
    "qwen2": ([_split(r"\p{N}"), _BYTES], False),
    "llama-bpe": ([_split(r"\p{N}{1,3}"), _BYTES], True),
}
"""llama.cpp's names for ways to divide a text into words, the same in terms of the tokenizers library, and whether a
word that is a token is taken as it is (`ignore_merges`)."""


class Vocabulary:
    """The tokens of a model by id, with what llama.cpp must know about each."""

    def __init__(self, tokenizer: BraidTokenizer, rows: int):
        """`rows` are those of the embedding, which may be more than the tokenizer has tokens."""
        self.tokenizer = tokenizer
        by_id = {index: token for token, index in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
        self.tokens = [by_id.get(index, f"[PAD{index}]") for index in range(rows)]
        self.types = ["NORMAL" if index in by_id else "UNUSED" for index in range(rows)]
        for index, token in tokenizer.backend.get_added_tokens_decoder().items():
            # llama.cpp finds user-defined tokens in every text, and control tokens only where it is asked to.
            self.types[index] = "CONTROL" if token.special else "USER_DEFINED"
        self.merges = [" ".join(merge) for merge in tokenizer.definition["model"].get("merges", [])]

    def add_to(self, writer: Any, token_types: Any) -> None:
        """Give gguf's writer everything about the tokenizer."""
        tokenizer = self.tokenizer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer))
        writer.add_token_list(self.tokens)
        writer.add_token_types([token_types[name] for name in self.types])
        # An array cannot be empty, and llama.cpp demands one: a merge of what is never a piece of a word does nothing.
        writer.add_token_merges(self.merges or [f"{tokenizer.special.eos} {tokenizer.special.eos}"])
        writer.add_eos_token_id(tokenizer.eos_id)
        # Without the key llama.cpp would take token 11; texts begin as in `braid generate`.
        named = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        writer.add_bos_token_id(tokenizer.beginning[0] if tokenizer.beginning else named)
        if tokenizer.pad_id is not None:
            writer.add_pad_token_id(tokenizer.pad_id)
        if tokenizer.pause_id is not None:  # no model was trained to predict it
            writer.add_array("tokenizer.ggml.suppress_tokens", [tokenizer.pause_id])
        writer.add_add_bos_token(bool(tokenizer.beginning))
        writer.add_add_eos_token(False)
        if isinstance(template := tokenizer.settings.get("chat_template"), str):
            writer.add_chat_template(template)


def vocabulary_problems(tokenizer: BraidTokenizer, rows: int) -> list[str]:
    """Why llama.cpp would make other tokens of some text, or could not hold the vocabulary."""
    model = tokenizer.definition["model"]
    if model["type"] != "BPE":
        return [f"the tokenizer is of the kind {model['type']}; Braid writes byte-level BPE to GGUF"]
    problems = []
    if tokenizer.vocab_size > rows:
        problems.append(f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {rows} rows for them")
    if "normalizer" in tokenizer.definition:
        problems.append(f"the tokenizer changes texts first ({tokenizer.definition['normalizer']['type']})")
    if tokenizer.space_before != "nothing":
        problems.append("the tokenizer puts a space before every text (`space_before`), and llama.cpp does not")
    elif pre_tokenizer_name(tokenizer) is None:
        problems.append(
            f"no pre-tokenizer of {', '.join(PRE_TOKENIZERS)} divides texts into words as this tokenizer does"
        )
    if options := [name for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if name in model]:
        problems.append(f"the tokenizer's BPE has options that llama.cpp lacks: {', '.join(options)}")
    if missing := [byte for byte, char in enumerate(byte_characters()) if char not in model["vocab"]]:
        problems.append(f"the tokenizer has no token for {len(missing)} of the 256 bytes")
    if picky := [token["content"] for token in tokenizer.definition.get("added_tokens", []) if _is_picky(token)]:
        problems.append(f"llama.cpp finds these tokens in other places of a text: {', '.join(picky)}")
    if tokenizer.eos_id is None:
        problems.append("no token ends a text; llama.cpp would stop at token 11")
    return problems


def pre_tokenizer_name(tokenizer: BraidTokenizer) -> str | None:
    """llama.cpp's name for the way in which a tokenizer divides texts into words."""
    definition = tokenizer.definition
    steps, model = _steps(definition.get("pre_tokenizer", {})), definition["model"]
    if steps == [_BYTES] and not model.get("merges"):
        return "gpt-2"  # every byte is a token, however words are divided
    way = (steps, model.get("ignore_merges", False))
    return next((name for name, known in PRE_TOKENIZERS.items() if known == way), None)


def _steps(pre_tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    """A pre-tokenizer as a list of steps, without what does not change tokens."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]


def _is_picky(token: dict[str, Any]) -> bool:
    """Whether a token that texts may contain is recognised only in some places, or takes the spaces beside it along."""
    return not token.get("special") and any(token.get(name) for name in ("lstrip", "rstrip", "single_word"))
