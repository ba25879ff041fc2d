"""The tokenizer that data is packed with: an existing one, or one that is trained on a sample of the data."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from braidlm.core.console import progress, say
from braidlm.core.errors import BraidError
from braidlm.data.packing.shards import Limit
from braidlm.data.sources.format import by_document, from_first_word
from braidlm.data.sources.plan import ReadOptions, Shard, ShardPlan, no_documents
from braidlm.data.tokenizing.build import bytes_tokenizer, load_tokenizer, train_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpaceBefore, SpecialTokens
from braidlm.model.config.ranges import Positive, VocabularySize
from braidlm.model.config.strict import decode

DEFAULT_VOCAB_SIZE = 16_384
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class TokenizerChoice:
    """An existing tokenizer, or the settings of one to train."""

    existing: BraidTokenizer | None
    special: SpecialTokens
    vocab_size: int
    sample_bytes: int
    begin: bool = False
    space_before: SpaceBefore = "nothing"

    @property
    def fingerprint(self) -> dict[str, Any]:
        if self.existing is not None:
            return self.existing.identity()
        facts = {"bpe": self.vocab_size, "special": asdict(self.special), "sample": self.sample_bytes}
        if self.begin:
            facts["begin"] = True
        return facts if self.space_before == "nothing" else facts | {"space_before": self.space_before}


def choose_tokenizer(
    tokenizer: str | Path,
    vocab_size: int | None,
    special_tokens: Mapping[str, str] | Sequence[str] | None,
    sample_mb: float,
    begin: bool = False,
    space_before: SpaceBefore = "nothing",
) -> TokenizerChoice:
    """What was asked for, checked."""
    decode(VocabularySize | None, vocab_size, "vocab_size")
    decode(Positive, sample_mb, "sample_mb")
    special = SpecialTokens() if special_tokens is None else SpecialTokens.parse(special_tokens)
    existing: BraidTokenizer | None = None
    if str(tokenizer) == "bytes":
        existing = bytes_tokenizer(special)
    elif str(tokenizer) != "bpe":
        existing = load_tokenizer(tokenizer)
        existing = existing if special_tokens is None else existing.with_roles(special)
    if existing is not None and vocab_size is not None and vocab_size != existing.vocab_size:
        what = f"a vocabulary of {vocab_size} was asked for, and '{tokenizer}' has {existing.vocab_size} tokens"
        raise BraidError(what, todo="Leave the size out, or use `--tokenizer bpe` to train a tokenizer of that size.")
    if existing is not None and (begin or space_before != "nothing"):
        asked = "--begin" if begin else "--space-before"
        what = "only a tokenizer that is trained here can be told how texts begin"
        raise BraidError(what, todo=f"Leave out `{asked}`: '{tokenizer}' begins texts as its own files say.")
    sample_bytes = int(sample_mb * MEGABYTE)
    return TokenizerChoice(existing, special, vocab_size or DEFAULT_VOCAB_SIZE, sample_bytes, begin, space_before)


def make_tokenizer(
    choice: TokenizerChoice, plan: ShardPlan, options: ReadOptions, limit: Limit, folder: Path
) -> BraidTokenizer:
    """The tokenizer of a work folder: kept from an earlier run, which made shards with it, chosen, or trained now."""
    saved, tokenizer = folder / "tokenizer", choice.existing
    if (saved / "tokenizer_config.json").is_file():  # the last file that is written
        todo = f"The unfinished work is damaged: remove the folder {folder} and run the same command again."
        try:
            kept = load_tokenizer(saved)
        except BraidError as error:
            raise BraidError(error.what, str(saved), todo) from error
        if tokenizer is not None and tokenizer.identity() != kept.identity():
            raise BraidError("this is not the tokenizer that was chosen", str(saved), todo)
        return kept
    if tokenizer is None:
        started, total = time.monotonic(), round(min(choice.sample_bytes, plan.size) / MEGABYTE, 1)
        with progress("reading for the tokenizer", total, "MB") as advance:
            tokenizer = train_tokenizer(
                lambda characters: at_least_one(_sample(plan, options, limit, characters), advance=advance),
                choice.sample_bytes,
                choice.vocab_size,
                choice.special,
                choice.begin,
                choice.space_before,
            )
        say(f"trained a tokenizer of {tokenizer.vocab_size:,} tokens in {time.monotonic() - started:.1f} s")
    tokenizer.save(saved)
    return tokenizer


def _sample(plan: ShardPlan, options: ReadOptions, limit: Limit, characters: int) -> Iterator[str]:
    """Texts for training a tokenizer: the beginning of every shard, or of the data if there is a limit."""
    if limit:
        yield from _limited_sample(plan, options, limit, characters)
        return
    share = min(1.0, characters / max(1, plan.size))
    for shard in plan.shards:
        for text in beginning(shard, options, min(characters, int(share * shard.size) if share < 1 else characters)):
            yield text
            characters -= len(text)
        if characters <= 0:
            return


def _limited_sample(plan: ShardPlan, options: ReadOptions, limit: Limit, characters: int) -> Iterator[str]:
    """The first documents, as many as the limit allows; of a long one within it, the beginning."""
    documents_left, words_left = limit.documents, limit.words
    for shard in plan.shards:
        for document in documents_with_words(shard, options):
            texts, words = beginning_and_words(document, characters)
            if words_left is not None and (words_left := words_left - words) < 0:
                return
            if documents_left is not None and (documents_left := documents_left - 1) < 0:
                return
            yield from texts
            characters -= sum(map(len, texts))
            if characters <= 0:
                return


def at_least_one(texts: Iterator[str], where: str | None = None, advance: Any = None) -> Iterator[str]:
    """The texts, or an error if there is none; `advance` shows how much of them was read."""
    done = None
    for text in texts:
        done = (done or 0) + len(text)
        if advance is not None:
            advance(round(done / MEGABYTE, 1), "")
        yield text
    if done is None:
        raise no_documents(where)


def documents_with_words(shard: Shard, options: ReadOptions) -> Iterator[Iterator[str]]:
    """The texts of each document's pieces, without documents that are blank."""
    for document, _ in by_document(shard.format.pieces(shard, options)):
        if (texts := from_first_word(document, shard.place)) is not None:
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
