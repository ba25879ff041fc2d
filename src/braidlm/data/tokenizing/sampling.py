"""The beginnings of shards, for training a tokenizer on a part of the data."""

from collections.abc import Iterator

from braidlm.data.sources.format import by_document, from_first_word
from braidlm.data.sources.plan import ReadOptions, Shard, place_of, read_pieces


def documents_with_words(shard: Shard, options: ReadOptions) -> Iterator[Iterator[str]]:
    """The texts of each document's pieces, without documents that are blank."""
    for document in by_document(read_pieces(shard, options)):
        texts = from_first_word(document.texts, place_of(shard))
        if texts is not None:
            yield texts


def beginning(shard: Shard, options: ReadOptions, characters: int) -> Iterator[str]:
    """Texts from the beginning of a shard, until they have so many characters."""
    for document in documents_with_words(shard, options):
        for text in document:
            yield text
            characters -= len(text)
            if characters <= 0:
                return


def beginning_and_words(document: Iterator[str], characters: int) -> tuple[list[str], int]:
    """The first pieces of a document, until they have so many characters, and the number of words in all of it."""
    kept: list[str] = []
    words, within_word = 0, False
    for text in document:
        words += len(text.split()) - (within_word and not text[:1].isspace() and bool(text))
        within_word = not text[-1].isspace() if text else within_word
        if characters > 0:
            kept.append(text)
            characters -= len(text)
    return kept, words
