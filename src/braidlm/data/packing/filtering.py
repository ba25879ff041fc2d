"""Documents that `braid prepare` leaves out on demand: duplicates, and what does not keep to rules of quality.

A first pass over the text looks at every document and keeps a few numbers of it. Of documents with the same words, or
nearly so, the first in the order of the sources stays, whatever the number of processes. Documents are near duplicates
as in text-dedup (MinHash with bands, as in Lee and others, 2022, "Deduplicating training data makes language models
better"): their five-word sequences are two sets, and the share that both have of all is above about 0.7 (0.6: one in
four is found; 0.8: nineteen of twenty).
"""

import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.data.sources.format import Piece, ReadOptions, by_document

Rule = Callable[[str, list[str]], bool]
WORDS = re.compile(r"\w+")
SEQUENCE = 5
"""Words of a sequence."""
BANDS, ROWS = 16, 8
"""Two documents are near duplicates if all rows of one band agree."""
AT_ONCE = 1 << 12
"""Sequences of a document that are hashed at a time."""
EXACT, NEAR = "exact duplicates", "near duplicates"
STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}


def length(text: str, words: list[str]) -> bool:
    """50 to 100,000 words (Gopher)."""
    return 50 <= len(words) <= 100_000


def word_length(text: str, words: list[str]) -> bool:
    """Words of 3 to 10 characters on average (Gopher)."""
    return 3 * len(words) <= sum(map(len, words)) <= 10 * len(words)


def symbols(text: str, words: list[str]) -> bool:
    """At most one `#` and one ellipsis for every ten words (Gopher)."""
    return 10 * max(text.count("#"), text.count("...") + text.count("…")) <= len(words)


def letters(text: str, words: list[str]) -> bool:
    """A letter in at least 80% of the words (Gopher)."""
    return sum(any(map(str.isalpha, word)) for word in words) >= 0.8 * len(words)


def stop_words(text: str, words: list[str]) -> bool:
    """At least two of the, be, to, of, and, that, have, with (Gopher): English sentences, and no lists."""
    return len(STOP_WORDS & {word.lower() for word in words}) >= 2


def repetition(text: str, words: list[str]) -> bool:
    """At most 30% of the lines repeat others (Gopher)."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return len(lines) - len(set(lines)) <= 0.3 * len(lines)


def placeholders(text: str, words: list[str]) -> bool:
    """No curly bracket and no lorem ipsum (C4): no code, no template."""
    return "{" not in text and "lorem ipsum" not in text.lower()


RULES: dict[str, Rule] = {
    rule.__name__: rule for rule in (length, word_length, symbols, letters, stop_words, repetition, placeholders)
}
"""Rules of a text and its words, which a document keeps or breaks."""


def check_rules(options: ReadOptions) -> None:
    """Refuse rules that do not exist."""
    for name in options.quality:
        if name not in RULES:
            raise BraidError(f"there is no rule of quality '{name}'.{did_you_mean(name, RULES)}", "quality")


def look(pieces: Iterable[Piece], options: ReadOptions, path: Path) -> int:
    """Write what is to be known of a shard's documents, a row of numbers each; how many documents there are.

    The first number says which rule a document breaks, from 1, or that it is blank (-1); the others are hashes.
    """
    checks = [RULES[name] for name in options.quality]
    texts = ("".join(texts) for texts, _ in by_document(pieces))
    table = np.array([_numbers(text, checks, options) for text in texts], np.int64)
    scratch = path.with_suffix(f".{os.getpid()}")
    with open(scratch, "wb") as file:
        np.save(file, table.reshape(len(table), -1), allow_pickle=False)
    os.replace(scratch, path)
    return len(table)


def choose(looks: Sequence[Path], masks: Sequence[Path], options: ReadOptions) -> dict[str, int]:
    """Write which documents of each shard stay; how many are left out, by the reason."""
    tables = [np.load(path, allow_pickle=False) for path in looks]
    sizes = [len(table) for table in tables]
    known = np.concatenate([table for table in tables if len(table)])
    reasons = {f"quality: {name}": known[:, 0] == number for number, name in enumerate(options.quality, 1)}
    stays = known[:, 0] == 0
    for name, columns in _DUPLICATES[options.duplicates].items():
        repeated = np.zeros(len(known), bool)
        candidates = np.flatnonzero(stays)
        for first in range(*columns):
            _, earliest, same = np.unique(known[candidates, first], return_index=True, return_inverse=True)
            repeated[candidates] |= candidates[earliest[same]] < candidates
        reasons[name] = repeated
        stays &= ~repeated
    stays |= known[:, 0] < 0
    for path, part in zip(masks, np.split(stays, np.cumsum(sizes)[:-1]), strict=True):
        with open(path, "wb") as file:
            np.save(file, part, allow_pickle=False)
    return {name: int(found.sum()) for name, found in reasons.items()}


_DUPLICATES: dict[str, dict[str, tuple[int, int]]] = {
    "keep": {},
    "exact": {EXACT: (1, 2)},
    "near": {EXACT: (1, 2), NEAR: (2, 2 + BANDS)},
}
"""Documents that agree in one of these columns are duplicates."""


def kept(pieces: Iterable[Piece], mask: np.ndarray) -> Iterator[Piece]:
    """The pieces of the documents that stay."""
    number = 0
    for piece in pieces:
        if mask[number]:
            yield piece
        number += piece.ends


def _numbers(text: str, checks: Sequence[Rule], options: ReadOptions) -> list[int]:
    words = text.split()
    broken = next((number for number, keeps in enumerate(checks, 1) if not keeps(text, words)), 0) if words else -1
    exact = int.from_bytes(blake2b(" ".join(words).encode(), digest_size=8).digest(), "little", signed=True)
    # Only documents that stay so far are compared.
    near = [0] * BANDS if broken or options.duplicates != "near" else bands(text)
    return [broken, exact, *(near if options.duplicates == "near" else [])]


def bands(text: str) -> list[int]:
    """The hashes of a document's bands; two documents agree in one if most of their sequences of words are the same."""
    words = np.array([zlib.crc32(word.encode()) for word in WORDS.findall(text.lower())], np.uint64)
    count = max(len(words) - SEQUENCE + 1, 1)
    sequences = np.zeros(count, np.uint64)
    for offset in range(min(SEQUENCE, len(words))):
        sequences = _mixed(sequences + words[offset : offset + count])
    sequences = np.unique(sequences)
    least = np.full(BANDS * ROWS, np.iinfo(np.uint64).max)
    for start in range(0, len(sequences), AT_ONCE):
        least = np.minimum(least, _mixed(sequences[start : start + AT_ONCE, None] ^ _SEEDS).min(axis=0))
    keys = np.zeros(BANDS, np.uint64)
    for row in least.reshape(BANDS, ROWS).T:
        keys = _mixed(keys + row)
    return [int(key) for key in keys.view(np.int64)]


def _mixed(values: np.ndarray) -> np.ndarray:
    """Well mixed 64 bits (the finalizer of SplitMix64); products wrap around."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_SEEDS = _mixed(np.arange(BANDS * ROWS, dtype=np.uint64))
