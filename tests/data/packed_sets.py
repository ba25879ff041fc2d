"""Packed data sets written by hand, so that loading is tested apart from preparing."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.packing.packed_data import Manifest, PackedData, TargetCounts

EOS = 0
# Examples take milliseconds, but a busy machine may pause in the middle of one.
settings.register_profile("braid", deadline=None)
settings.load_profile("braid")
_scratch = tempfile.TemporaryDirectory(prefix="braid-packed-")
_count = iter(range(1 << 62))


def pack(
    documents: Sequence[Sequence[int]],
    words: Sequence[Sequence[int]] | None = None,
    name: str = "toy",
    tokenizer: str = "toy-tokenizer",
    dtype: str = "uint16",
    prompts: Sequence[int] | None = None,
) -> PackedData:
    """A packed data set of these documents (each with its EOS); by default every third token begins a word.

    `prompts` are the tokens at the beginning of each document that are only read; every other one has two bytes.
    """
    if words is None:
        words = [[int(t % 3 == 1) for t in document] for document in documents]
    folder = Path(_scratch.name) / str(next(_count))
    folder.mkdir()
    flat = [t for document in documents for t in document]
    lengths = np.array([[sum(w), 2 * len(w) + 1] for w in words], np.uint32)
    np.array(flat, dtype).tofile(folder / "tokens.bin")
    np.array([w for row in words for w in row], np.uint8).tofile(folder / "words.bin")
    np.cumsum([0, *map(len, documents)], dtype=np.int64).tofile(folder / "documents.bin")
    lengths.tofile(folder / "lengths.bin")
    targets = None
    if prompts is not None:
        masks = [[int(i >= p) for i in range(len(d))] for d, p in zip(documents, prompts, strict=True)]
        sizes = np.array([2 * sum(mask) for mask in masks], np.uint32)
        np.array([t for mask in masks for t in mask], np.uint8).tofile(folder / "targets.bin")
        sizes.tofile(folder / "target_bytes.bin")
        targets = TargetCounts(sum(map(sum, masks)), int(sizes.sum()))
    totals = [int(t) for t in lengths.sum(axis=0, dtype=np.int64)]
    vocab_size = max(1 << 15, max(flat, default=0) + 1)
    manifest = Manifest(name, len(flat), len(documents), *totals, dtype, vocab_size, EOS, tokenizer, targets=targets)
    (folder / "data.json").write_text(json.dumps(asdict(manifest)))
    return PackedData(folder)


def numbered(tokens: int, name: str = "toy", base: int = 1, document: int = 7, **options: str) -> PackedData:
    """`tokens` tokens base, base + 1, ... so that a token tells where it stands and which data set it is of."""
    flat = list(range(base, base + tokens))
    return pack([flat[i : i + document] for i in range(0, tokens, document)], name=name, **options)


def stream(tokens: int, name: str = "toy", base: int = 1, subset: Subset | None = None) -> TokenStream:
    """A stream of numbered tokens."""
    return TokenStream(numbered(tokens, name, base), subset)


@st.composite
def answered_data(draw: st.DrawFn) -> PackedData:
    """Documents of random lengths with unique tokens, each with a prompt of random length and the EOS as a target."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=2, max_size=12))
    flat = iter(range(1, sum(sizes) + 1))
    prompts = [draw(st.integers(0, size - 1)) for size in sizes]
    return pack([[*(next(flat) for _ in range(s - 1)), EOS] for s in sizes], prompts=prompts)


@st.composite
def packed_data(draw: st.DrawFn, min_documents: int = 1, max_documents: int = 12) -> PackedData:
    """Documents of random lengths with unique tokens and random words; one token may begin several."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=min_documents, max_size=max_documents))
    flat = iter(range(1, sum(sizes) + 1))
    words = [draw(st.lists(st.integers(0, 2), min_size=s, max_size=s)) for s in sizes]
    return pack([[next(flat) for _ in range(s)] for s in sizes], words)
