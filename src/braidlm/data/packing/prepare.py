"""`braid prepare`: from text to packed token files. Parallel, resumable, atomic.

The work is done in `OUT.part`: the tokenizer, then a set of files for every finished shard. The same command run again
continues there; the finished folder gets its name in one rename.
"""

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from braidlm.core.addresses import is_address
from braidlm.core.console import count, progress, say, warn
from braidlm.core.errors import BraidError, check_folder_name
from braidlm.core.files import explained_disk_errors, json_sha256, make_folder
from braidlm.core.jobs import Jobs, open_jobs
from braidlm.core.reading import given_path
from braidlm.data.packing.filtering import check_rules, choose
from braidlm.data.packing.packed_data import FORMAT, PackedData, is_packed
from braidlm.data.packing.publishing import publish, publish_tokenizer, shared_tokenizer
from braidlm.data.packing.sharded import open_packed
from braidlm.data.packing.shards import Limit, PackedText, ShardCounts
from braidlm.data.packing.tokenizer_choice import MEGABYTE, choose_tokenizer, make_tokenizer
from braidlm.data.packing.workers import Job, pack_all, work_folder
from braidlm.data.sources.plan import ReadOptions, ShardPlan, check_utf8, no_documents, plan_shards
from braidlm.data.sources.text import unmatched_patterns
from braidlm.data.tokenizing.build import BraidTokenizer
from braidlm.data.tokenizing.tokenizer import SpaceBefore
from braidlm.model.config.ranges import Workers
from braidlm.model.config.strict import decode

NAMED = re.compile(r"([\w-]+)=(.+)", re.DOTALL)
"""A source of one of several data sets."""


def prepare(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    name: str | None = None,
    tokenizer: str | Path = "bpe",
    vocab_size: int | None = None,
    special_tokens: Mapping[str, str] | Sequence[str] | None = None,
    begin: bool = False,
    space_before: SpaceBefore = "nothing",
    limit_documents: int | None = None,
    limit_words: int | None = None,
    sample_mb: float = 64,
    workers: int | None = None,
    replace: bool = False,
    shard_mb: float | None = None,
    wait: bool = False,
    cluster: str | None = None,
    **reading: Any,
) -> PackedData:
    """Pack sources (files, folders, globs, addresses, built-in corpora, `hub:NAME`) into the folder `out`.

    Where `out` is an address, shards are written there one by one, and the disk holds only those that are being packed.
    `tokenizer` is `bpe` (train one of `vocab_size` on a sample of `sample_mb` spread over this data), `bytes`, a
    folder or file, or a name on the Hub; with `begin` a trained one puts the token that ends a text before every text
    too, `space_before` a space. `reading` is how documents are read: the fields of `ReadOptions`. With a limit, only
    documents within it are read, also for training the tokenizer. Where another process prepares this folder, `wait`
    waits for it and takes what it made. With `cluster` (`ray`, `ray:HOST:PORT`) its nodes pack the shards.
    """
    options = ReadOptions(**reading)
    if cluster and workers:
        raise BraidError("a cluster decides how many processes pack", "--workers", "Leave it out, or --cluster.")
    check_rules(options)
    decode(Workers | None, workers, "workers")
    source_list = [sources] if isinstance(sources, str | Path) else list(sources)
    address = str(out).rstrip("/") if is_address(out) else None
    # What is prepared for an address has its unfinished work here.
    out = given_path(out if address is None else address.rpartition("/")[2])
    for text in (str(out.absolute()), name or "", *map(str, source_list)):
        check_utf8(text)
    choice = choose_tokenizer(tokenizer, vocab_size, special_tokens, sample_mb, begin, space_before)
    plan = plan_shards(source_list, options, None if shard_mb is None else max(1, int(shard_mb * MEGABYTE)))
    limit = _limit(limit_documents, limit_words, options, address)
    name = name or out.resolve().name
    facts = {"format": FORMAT, "name": name, "sources": plan.fingerprints, "reading": options.facts()}
    facts |= {"tokenizer": choice.fingerprint, "limit": asdict(limit)}
    # Continuing with other shard boundaries would lose documents.
    facts["shards"] = [[shard.source, shard.start, shard.stop] for shard in plan.shards]
    # Equal for the same sources in the same state, packed in the same way.
    key = json_sha256(facts)
    place = out if address is None else address
    if (finished := _finished(place, key, replace)) is not None:
        if not wait:  # several runs share what is prepared for them, and need not say so
            say(f"{place} is finished already: the same sources, options and tokenizer")
        return finished
    with explained_disk_errors(out), work_folder(out, key, wait) as folder:
        if (finished := _finished(place, key, replace)) is not None:  # by another process, since it was asked above
            return finished
        _warn_of_what_is_not_read(plan, options)
        if address is not None:
            shared_tokenizer(address, key, folder / "tokenizer")
        used = make_tokenizer(choice, plan, options, limit, folder)
        if address is not None:
            publish_tokenizer(folder / "tokenizer", address, key)
        job = Job(folder, options, plan.shards, address, key)
        processes = workers or os.cpu_count() or 1
        with open_jobs(cluster, folder.parent, "cpu") as jobs:
            left_out = _filter(job, processes, jobs)
            packed = _pack(job, used, limit, processes, jobs)
        _report(packed, used, source_list)
        origin = {"sources": [str(source) for source in source_list], "reading": options.facts(), "key": key}
        origin |= {"left_out": left_out} if left_out else {}
        whole = PackedText(name, used, packed, origin, job.has_prompts)
        if address is not None:
            publish(whole, address)
        else:
            whole.assemble(folder, out, limit)
    return open_packed(place)


def _limit(documents: int | None, words: int | None, options: ReadOptions, address: str | None) -> Limit:
    """The limit of a data set; an error where it cannot have one."""
    limit = Limit(documents, words)
    if limit and options.filters:
        what = "a limit ends the reading before it is known which documents are left out"
        raise BraidError(what, todo="Leave out the limit, or the filters.")
    if limit and address is not None:
        raise BraidError("a data set at an address has no limit", address, "Leave it out, or prepare into a folder.")
    return limit


def _warn_of_what_is_not_read(plan: ShardPlan, options: ReadOptions) -> None:
    for pattern in unmatched_patterns(options.separator, [shard.source for shard in plan.shards]):
        warn(f"no file matches the pattern '{pattern}' of the separators")
    if skipped := plan.skipped:
        kinds = ", ".join(sorted({Path(file).suffix or Path(file).name for file in skipped})[:8])
        warn(f"{len(skipped)} file{'s' * (len(skipped) > 1)} of a kind that is not read: left out ({kinds})")


def _finished(out: Path | str, key: str, replace: bool) -> PackedData | None:
    """The data set that an earlier run of the same command finished; an error if `out` is something else."""
    if isinstance(out, str):
        if not is_packed(out):  # of an unfinished one, the shards say what they are
            return None
    elif not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    elif not is_packed(out):
        raise BraidError("this exists already and is not a packed data set", str(out), "Choose another `--out`.")
    with contextlib.suppress(BraidError) if replace else contextlib.nullcontext():
        data = open_packed(out)  # a damaged one may be replaced
        if data.manifest.source.get("key") == key:
            return data
    if not replace:
        what = "this data set exists already and was made from other sources or options"
        raise BraidError(what, str(out), "Choose another `--out`, or pass `--replace` to put the new one in its place.")
    return None


def _filter(job: Job, workers: int, jobs: Jobs) -> dict[str, int]:
    """Decide which documents stay; how many are left out, by the reason."""
    if not job.options.filters:
        return {}
    every = range(len(job.shards))
    looks, masks = ([job.filter_file(index, kind) for index in every] for kind in ("look", "kept"))
    make_folder(looks[0].parent)
    looking = dataclasses.replace(job, looks=True)
    looking.save()
    remaining = [index for index in every if not looks[index].is_file()]
    read, total = 0.0, round(sum(job.shards[index].size for index in remaining) / MEGABYTE, 1)
    with (
        progress("looking for what is left out", total, "MB") as advance,
        contextlib.closing(pack_all(looking, remaining, workers, jobs)) as finished,
    ):
        for index, _ in finished:
            read += job.shards[index].size / MEGABYTE
            advance(round(read, 1), "")
    left_out = choose(looks, masks, job.options)
    say(f"left out: {', '.join(f'{number:,} {reason}' for reason, number in left_out.items())}")
    return left_out


def _pack(job: Job, tokenizer: BraidTokenizer, limit: Limit, workers: int, jobs: Jobs) -> list[ShardCounts]:
    """Pack every unfinished shard; the counts of all shards in order, or of as many as the limit needs."""
    job.save()
    job.results.mkdir(exist_ok=True)
    for path in job.results.glob("*.*.*"):  # what a killed process had written of its shard
        path.unlink(missing_ok=True)
    known = job.finished(tokenizer.vocab_size)
    remaining = [index for index in range(len(job.shards)) if index not in known]
    if known and remaining:
        say(f"going on with an earlier run: {len(known)} of {len(job.shards)} shards are finished")
    total = round(sum(job.shards[index].size for index in remaining) / MEGABYTE, 1)
    started, read, text = time.monotonic(), 0.0, 0.0
    with progress("packing", total, "MB") as advance:
        is_enough = bool(limit) and limit.reached_by(_in_order(known))
        with contextlib.closing(pack_all(job, [] if is_enough else remaining, workers, jobs)) as packing:
            for index, counts in packing:
                known[index] = counts
                read, text = read + job.shards[index].size / MEGABYTE, text + counts.bytes / MEGABYTE
                advance(round(read, 1), f"{text / (time.monotonic() - started):.1f} MB/s")
                if limit and limit.reached_by(_in_order(known)):
                    break
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
            f"If it parts documents, pack them with --separator '{eos}', or with `separator` of their set in a recipe"
        )
    if cuts := sum(shard.unsafe_cuts for shard in shards):
        warn(
            f"long documents were cut at {count(cuts)} places within words, for want of a better one; the tokens next "
            "to such a place may be others than in the uncut text"
        )
    if tokenizer.eos_id is None:
        warn("the tokenizer has no end-of-text token: documents follow each other without a mark")


def named_sources(sources: Sequence[str]) -> dict[str, list[str]] | None:
    """The sources of each set if they are given as NAME=SOURCE; None if they are sources of one set."""
    matches = [None if Path(source).exists() else NAMED.fullmatch(source) for source in sources]
    if not any(matches):
        return None
    sets: dict[str, list[str]] = {}
    for source, match in zip(sources, matches, strict=True):
        if match is None:
            todo = "Give every source as NAME=SOURCE to make several data sets, or none to make one."
            raise BraidError("this source has no name, and others have", source, todo)
        sets.setdefault(match[1], []).append(match[2])
    return sets


def prepare_sets(
    sets: Mapping[str, str | Path | Sequence[str | Path]],
    out: str | Path,
    *,
    tokenizer: str | Path = "bpe",
    **options: Any,
) -> dict[str, PackedData]:
    """Pack each set into a folder of its name in `out`.

    A tokenizer is trained on the first set only, since it should not see the text that the others hold out. `options`
    are those of `prepare`.
    """
    out = out if is_address(out) else Path(out).expanduser()
    if is_packed(out):
        raise BraidError(
            "this is one data set, and several were to be put into it", str(out), "Choose another `--out`."
        )
    for name in sets:
        check_folder_name("the name of a data set", name)
    packed: dict[str, PackedData] = {}
    for name, sources in sets.items():
        packed[name] = prepare(sources, f"{out}/{name}", tokenizer=tokenizer, **options)
        tokenizer = packed[name].tokenizer_folder
        # All are of the first set's tokenizer.
        options |= {"vocab_size": None, "special_tokens": None, "begin": False, "space_before": "nothing"}
    return packed
