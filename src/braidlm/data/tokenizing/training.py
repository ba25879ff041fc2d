"""Train a byte-level BPE, in bounded memory whatever the text.

The library's trainer keeps every different word of its sample, at up to 150 bytes of memory for each byte of a word.
Natural language repeats its words; text without spaces, or of random names, does not. So a sample with too many
different words is replaced by a smaller one.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from braidlm.core.console import warn
from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.cutting import PART_CHARS, word_ends
from braidlm.data.tokenizing.spaces import BETWEEN_LINES, SpaceBefore
from braidlm.data.tokenizing.tokenizer import SpecialTokens

MAX_WORD_CHARS = 1024
"""Longer words are cut: the trainer's time grows with the square of a word's length."""
MAX_DISTINCT_BYTES = 4_000_000
"""Of all different words together: about 600 MB in the trainer. 64 MB of English have 3 to 4 million."""


class _TooManyWordsError(Exception):
    """A sample has more different words than the trainer can hold; says after how many characters."""

    def __init__(self, characters: int):
        self.characters = characters


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = SpecialTokens.order,
    max_distinct_bytes: float = math.inf,
    space_before: SpaceBefore = "nothing",
) -> Tokenizer:
    """A byte-level BPE with GPT-2's pattern; special tokens get the first ids, in the order given.

    `space_before` puts a space before every text that has none, or before every line too; decoding takes the spaces
    between lines away again.
    """
    min_size = 256 + len(special_tokens)
    if vocab_size < min_size:
        raise BraidError(
            f"a vocabulary of {vocab_size} is too small for a byte-level BPE",
            todo=f"Choose at least {min_size}: 256 bytes and {len(special_tokens)} special tokens.",
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space_before != "nothing", use_regex=True)
    backend.decoder = decoders.ByteLevel()
    if space_before == "lines":
        backend.normalizer = normalizers.Replace(*BETWEEN_LINES)
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(*reversed(BETWEEN_LINES))])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(_parts(texts, max_distinct_bytes), trainer)
    return backend


def train_bpe_on_sample(
    sample: Callable[[int], Iterable[str]],
    characters: int,
    vocab_size: int,
    special_tokens: Sequence[str],
    space_before: SpaceBefore = "nothing",
) -> Tokenizer:
    """A BPE of `sample(characters)`, or of a smaller sample if that one has too many different words."""
    asked = characters
    while True:
        try:
            backend = train_bpe(sample(characters), vocab_size, special_tokens, MAX_DISTINCT_BYTES, space_before)
        except _TooManyWordsError as error:
            # A smaller sample is spread over the data in the same way, and may have a few more words than this part.
            characters = max(1, int(0.8 * min(characters, error.characters)))
            continue
        if characters < asked:
            size = f"{characters / 1e6:.1f} MB"
            warn(f"the tokenizer was trained on only {size} of the text, because it has so many different words")
        return backend


def _parts(texts: Iterable[str], max_distinct_bytes: float) -> Iterator[str]:
    """Texts short enough for the trainer's buffer, without words that are too long for it, while it can hold them."""
    seen: set[str] = set()
    characters = distinct_bytes = 0
    for part in (part for text in texts for part in word_ends(text, PART_CHARS)):
        words = part.split()
        pieces = [part]
        # A run of spaces is a word to the trainer too.
        if max(map(len, words), default=0) > MAX_WORD_CHARS or 4 * sum(map(len, words)) < len(part):
            pieces = [part[at : at + MAX_WORD_CHARS] for at in range(0, len(part), MAX_WORD_CHARS)]
            words = [word for piece in pieces for word in piece.split()]
        unseen = set(words) - seen
        seen |= unseen
        characters, distinct_bytes = characters + len(part), distinct_bytes + len("".join(unseen).encode())
        if distinct_bytes > max_distinct_bytes and characters > PART_CHARS:
            raise _TooManyWordsError(characters)
        yield from pieces
