"""Data sets that cannot be loaded, or not together, are refused before any work begins."""

from collections.abc import Sequence

from braidlm.core.errors import BraidError
from braidlm.data.loading.chunking import Chunking
from braidlm.data.loading.streams import TokenStream


def check_streams(streams: Sequence[TokenStream], chunking: Chunking, length: int) -> None:
    """Refuse none, two of one name, streams that are too short, and different tokenizers."""
    if not streams:
        raise BraidError("there is no data set to load", todo="Name at least one packed data set.")
    names = [stream.name for stream in streams]
    for name in sorted({n for n in names if names.count(n) > 1}):
        raise BraidError(f"two data sets are called '{name}'", todo="Give each a name of its own.")
    first = streams[0]
    for stream in streams:
        chunking.check(stream, length)
        _check_parts(stream, chunking, length)
        if stream.data.manifest.tokenizer != first.data.manifest.tokenizer:
            raise BraidError(
                f"data sets '{first.name}' and '{stream.name}' were prepared with different tokenizers",
                todo="Prepare them with one tokenizer: `braid prepare SOURCE --tokenizer DIR --out DIR`.",
            )


def _check_parts(stream: TokenStream, chunking: Chunking, length: int) -> None:
    """Refuse an order that leaves too little for a chunk, or an epoch that is no part of it."""
    if len(stream.parts) == 1:
        return
    if chunking.words_per_epoch is not None:
        raise BraidError(
            "an order of documents is read to its end, and `words_per_epoch` ends epochs before",
            "data.chunking",
            "Leave it out, or use data.order=shuffled.",
        )
    for number, part in enumerate(stream.parts, 1):
        if len(part) < length + 1:
            raise BraidError(
                f"part {number} of {len(stream.parts)} in the order of documents has {len(part)} tokens, but a chunk "
                f"of length {length} needs {length + 1}",
                f"data set '{stream.name}'",
                "Divide it into fewer parts (`data.order.pacing`), or begin with a larger one.",
            )
