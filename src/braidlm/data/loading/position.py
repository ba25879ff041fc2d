"""Where the loader is: in each data set, and within what was drawn from them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamPosition:
    """The position in one data set."""

    epoch: int = 0
    """How many epochs were begun before, of whatever part."""
    chunk: int = 0
    """How many chunks of this epoch have been trained."""
    part: int = 0
    """The part of the data set that this epoch reads; see `TokenStream.parts`."""
    before: float = 0.0
    """How often the data set was trained before this epoch."""


@dataclass(frozen=True)
class LoaderPosition:
    """The position of the loader between two draws of chunks, with an entry per data set."""

    streams: list[StreamPosition]
    credits: list[float]
    """See `assign_rows`."""


@dataclass(frozen=True)
class Place:
    """The next row of the chunks that were drawn, or that are drawn next."""

    row_length: int
    """Tokens of a row: a chunk is one, or several in turn."""
    progress: float = 0.0
    """That of the training when the chunks were drawn, which decides their mixture."""
    column: int = 0
    """The position in every chunk at which its next row begins."""
    offset: int = 0
    """How many trained positions of the next batch were trained before a mark."""

    @property
    def begins_a_draw(self) -> bool:
        return not self.column and not self.offset


def saved_stream_position(epoch: int, chunk: int, part: int = 0, before: float | None = None) -> StreamPosition:
    """A saved position; earlier versions, which knew no parts, saved the first two."""
    return StreamPosition(epoch, chunk, part, float(epoch) if before is None else before)
