"""`braid prepare`: from text to packed token files. Parallel, resumable, atomic.

The work is done in `OUT.part`: the tokenizer, then a set of files for every finished shard. The same command run again
continues there; the finished folder gets its name in one rename.
"""

import codecs
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from braidlm.core.console import count, progress, say, warn
from braidlm.core.errors import BraidError
from braidlm.core.files import explained_disk_errors
from braidlm.core.reading import given_path
from braidlm.data.packing.assembly import Limit, assemble
from braidlm.data.packing.packed_data import FORMAT, PackedData, is_packed, token_dtype
from braidlm.data.packing.shards import ShardCounts, finished_shard, remove_scratch_files
from braidlm.data.packing.work_folder import work_folder
from braidlm.data.packing.workers import Job, pack_all
from braidlm.data.sources.format import TEMPLATE
from braidlm.data.sources.plan import ReadOptions, ShardPlan, check_answers, check_utf8, plan_shards
from braidlm.data.sources.separators import Separator, check_separator, unmatched_patterns
from braidlm.data.tokenizing.build import BraidTokenizer, SpecialTokens, bytes_tokenizer, load_tokenizer
from braidlm.data.tokenizing.sampling import beginning, beginning_and_words, documents_with_words
from braidlm.data.tokenizing.training import train_bpe_on_sample
from braidlm.model.config.ranges import Positive, VocabularySize, Workers
from braidlm.model.config.strict import decode

DEFAULT_VOCAB_SIZE = 16_384
MEGABYTE = 1_000_000


def prepare(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    name: str | None = None,
    tokenizer: str | Path = "bpe",
    vocab_size: int | None = None,
    special_tokens: Mapping[str, str] | Sequence[str] | None = None,
    fields: str | Sequence[str] = ("text",),
    joiner: str = "\n",
    answer: str | None = None,
    template: str = TEMPLATE,
    separator: Separator = "blank",
    section_bytes: int | None = None,
    encoding: str = "utf-8",
    errors: str = "strict",
    documents: int = 10_000,
    first: int = 0,
    seed: int = 0,
    split: str = "train",
    subset: str | None = None,
    limit_documents: int | None = None,
    limit_words: int | None = None,
    sample_mb: float = 64,
    workers: int | None = None,
    replace: bool = False,
    shard_mb: float | None = None,
    wait: bool = False,
) -> PackedData:
    """Pack sources (files, folders, globs, built-in corpora, `hub:NAME`) into the folder `out`.

    `tokenizer` is `bpe` (train one of `vocab_size` on a sample of `sample_mb` spread over this data), `bytes`, a
    folder or file, or a name on the Hub. See `ReadOptions` for how documents are read. With a limit, only documents
    within it are read, also for training the tokenizer. Where another process prepares this folder, `wait` waits for
    it and takes what it made.
    """
    options = ReadOptions(
        fields=(fields,) if isinstance(fields, str) else tuple(fields),
        joiner=joiner,
        answer=answer,
        template=template,
        separator=separator,
        section_bytes=section_bytes,
        encoding=encoding,
        errors=errors,
        documents=documents,
        first=first,
        seed=seed,
        split=split,
        subset=subset,
    )
    _check(options, workers)
    source_list = [sources] if isinstance(sources, str | Path) else list(sources)
    out = given_path(out)
    for text in (str(out.absolute()), name or "", *map(str, source_list)):
        check_utf8(text)
    choice = _choose_tokenizer(tokenizer, vocab_size, special_tokens, sample_mb)
    plan = plan_shards(source_list, options, None if shard_mb is None else max(1, int(shard_mb * MEGABYTE)))
    check_answers(plan, options)
    for pattern in unmatched_patterns(separator, [shard.source for shard in plan.shards]):
        warn(f"no file matches the pattern '{pattern}' of the separators")
    limit = Limit(limit_documents, limit_words)
    command: dict[str, Any] = {
        "format": FORMAT,
        "name": name or out.resolve().name,
        "sources": plan.fingerprints,
        "reading": options.facts(),
        "tokenizer": choice.fingerprint,
        "limit": asdict(limit),
        # Continuing with other shard boundaries would lose documents.
        "shards": [[shard.source, shard.start, shard.stop] for shard in plan.shards],
    }
    key = hashlib.sha256(json.dumps(command, sort_keys=True).encode()).hexdigest()
    if (finished := _finished(out, key, replace)) is not None:
        return finished
    origin = {"sources": [str(source) for source in source_list], "reading": options.facts(), "key": key}
    with explained_disk_errors(out), work_folder(out, key, wait) as folder:
        if (finished := _finished(out, key, replace)) is not None:  # by another process, since it was asked above
            return finished
        packing_tokenizer = _tokenizer(choice, plan, options, limit, folder)
        job = Job(folder, options, plan.shards)
        packed = _pack(job, packing_tokenizer, limit, workers or os.cpu_count() or 1)
        _report(packed, packing_tokenizer, source_list)
        assemble(
            folder,
            out,
            name=command["name"],
            tokenizer=packing_tokenizer,
            shards=packed,
            limit=limit,
            source=origin,
            has_prompts=job.has_prompts,
        )
    return PackedData(out)


@dataclass(frozen=True)
class _TokenizerChoice:
    """An existing tokenizer, or the settings of one to train."""

    existing: BraidTokenizer | None
    special: SpecialTokens
    vocab_size: int
    sample_bytes: int

    @property
    def fingerprint(self) -> dict[str, Any]:
        if self.existing is not None:
            return self.existing.identity()
        return {"bpe": self.vocab_size, "special": asdict(self.special), "sample": self.sample_bytes}


def _choose_tokenizer(
    tokenizer: str | Path,
    vocab_size: int | None,
    special_tokens: Mapping[str, str] | Sequence[str] | None,
    sample_mb: float,
) -> _TokenizerChoice:
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
        raise BraidError(
            f"a vocabulary of {vocab_size} was asked for, and '{tokenizer}' has {existing.vocab_size} tokens",
            todo="Leave the size out, or use `--tokenizer bpe` to train a tokenizer of that size.",
        )
    return _TokenizerChoice(existing, special, vocab_size or DEFAULT_VOCAB_SIZE, int(sample_mb * MEGABYTE))


def _check(options: ReadOptions, workers: int | None) -> None:
    try:
        codecs.lookup(options.encoding)
    except LookupError:
        raise BraidError(f"unknown encoding '{options.encoding}'", todo="For example utf-8, latin-1, utf-16.") from None
    if options.errors not in ("strict", "replace", "ignore"):
        raise BraidError(f"errors cannot be '{options.errors}'", todo="Choose strict, replace or ignore.")
    check_separator(options.separator)
    decode(Workers | None, workers, "workers")


def _finished(out: Path, key: str, replace: bool) -> PackedData | None:
    """The data set that an earlier run of the same command finished; an error if `out` is something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not is_packed(out):
        raise BraidError("this exists already and is not a packed data set", str(out), "Choose another `--out`.")
    with contextlib.suppress(BraidError) if replace else contextlib.nullcontext():
        data = PackedData(out)  # a damaged one may be replaced
        if data.manifest.source.get("key") == key:
            say(f"{out} is finished already: the same sources, options and tokenizer")
            return data
    if not replace:
        raise BraidError(
            "this data set exists already and was made from other sources or options",
            str(out),
            "Choose another `--out`, or pass `--replace` to put the new one in its place.",
        )
    return None


def _tokenizer(
    choice: _TokenizerChoice, plan: ShardPlan, options: ReadOptions, limit: Limit, folder: Path
) -> BraidTokenizer:
    """The tokenizer of this command: kept from an earlier run, chosen, or trained now."""
    saved = folder / "tokenizer"
    tokenizer = choice.existing
    if (saved / "tokenizer_config.json").is_file():  # the last file that is written
        return _saved_tokenizer(saved, tokenizer)
    if tokenizer is None:
        started, total = time.monotonic(), round(min(choice.sample_bytes, plan.size) / MEGABYTE, 1)
        with progress("reading for the tokenizer", total, "MB") as advance:
            backend = train_bpe_on_sample(
                lambda characters: _counted(_sample(plan, options, limit, characters), advance),
                choice.sample_bytes,
                choice.vocab_size,
                choice.special.order,
            )
        tokenizer = BraidTokenizer(backend, choice.special)
        say(f"trained a tokenizer of {tokenizer.vocab_size:,} tokens in {time.monotonic() - started:.1f} s")
        if tokenizer.vocab_size < choice.vocab_size:
            warn(f"the text gives a vocabulary of only {tokenizer.vocab_size} of the {choice.vocab_size} asked for")
    tokenizer.save(saved)
    return tokenizer


def _saved_tokenizer(saved: Path, existing: BraidTokenizer | None) -> BraidTokenizer:
    """The tokenizer of the earlier run that this one continues; its shards have been made with it."""
    todo = f"The unfinished work is damaged: remove the folder {saved.parent} and run the same command again."
    try:
        tokenizer = load_tokenizer(saved)
    except BraidError as error:
        raise BraidError(error.what, str(saved), todo) from error
    if existing is not None and existing.identity() != tokenizer.identity():
        raise BraidError("this is not the tokenizer that was chosen", str(saved), todo)
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


def _counted(texts: Iterator[str], advance: Any) -> Iterator[str]:
    done, seen = 0, False
    for text in texts:
        seen, done = True, done + len(text)
        advance(round(done / MEGABYTE, 1), "")
        yield text
    if not seen:
        raise no_documents()


def _pack(job: Job, tokenizer: BraidTokenizer, limit: Limit, workers: int) -> list[ShardCounts]:
    """Pack every unfinished shard; the counts of all shards in order, or of as many as the limit needs."""
    job.save()
    job.results.mkdir(exist_ok=True)
    remove_scratch_files(job.results)
    size = tokenizer.vocab_size
    dtype = token_dtype(size)
    finished = (finished_shard(job.results, index, dtype, size, job.has_prompts) for index in range(len(job.shards)))
    known = {index: counts for index, counts in enumerate(finished) if counts is not None}
    remaining = [index for index in range(len(job.shards)) if index not in known]
    if known and remaining:
        say(f"going on with an earlier run: {len(known)} of {len(job.shards)} shards are finished")
    total = round(sum(job.shards[index].size for index in remaining) / MEGABYTE, 1)
    started, read, text = time.monotonic(), 0.0, 0.0
    with progress("packing", total, "MB") as advance:
        packing = pack_all(job, remaining, workers)
        try:
            while not (limit and limit.reached_by(_in_order(known))):
                index, counts = next(packing, (None, None))
                if index is None or counts is None:
                    break
                known[index] = counts
                read, text = read + job.shards[index].size / MEGABYTE, text + counts.bytes / MEGABYTE
                advance(round(read, 1), f"{text / (time.monotonic() - started):.1f} MB/s")
        finally:
            packing.close()  # type: ignore[attr-defined]
    return _in_order(known)


def _in_order(known: Mapping[int, ShardCounts]) -> list[ShardCounts]:
    """The counts of the shards before the first that is missing."""
    return [known[index] for index in takewhile(known.__contains__, range(len(known)))]


def _report(shards: Sequence[ShardCounts], tokenizer: BraidTokenizer, sources: Sequence[str | Path]) -> None:
    if not sum(shard.documents for shard in shards):
        raise no_documents(", ".join(map(str, sources)))
    if empty := sum(shard.empty for shard in shards):
        say(f"left out {count(empty)} empty documents")
    if marked := sum(shard.marked for shard in shards):
        eos = tokenizer.special.eos
        warn(
            f"{count(marked)} documents contain the text '{eos}', which was packed as plain text. "
            f"If it parts documents, run again with --separator '{eos}'"
        )
    if cuts := sum(shard.unsafe_cuts for shard in shards):
        warn(
            f"long documents were cut at {count(cuts)} places within words, for want of a better one; the tokens next "
            "to such a place may be others than in the uncut text"
        )
    if tokenizer.eos_id is None:
        warn("the tokenizer has no end-of-text token: documents follow each other without a mark")


def no_documents(where: str | None = None) -> BraidError:
    """The error for a source without text."""
    return BraidError(
        "there are no documents in it, only empty ones or none", where, "Check the source and its fields."
    )
