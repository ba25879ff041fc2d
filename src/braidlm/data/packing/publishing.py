"""Shards are written to an address as they are finished; data.json, with which the data set is complete, comes last.

A shard is `NNNNNN/` with the files of a packed folder, and `NNNNNN/shard.json`, written last: the counts, the hash, and
the key of the command, so that the same command goes on from the address alone, on any machine. Before them come the
tokenizer and `key`, which says that it is there.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from braidlm.core.addresses import exists, files_at, read_json_at, remove_at, upload, write_at
from braidlm.data.packing.packed_data import MANIFEST, ShardFacts
from braidlm.data.packing.sharded import fetch_folder, shard_sha256
from braidlm.data.packing.shards import Limit, PackedText, ShardCounts, join
from braidlm.model.config.strict import decode

SHARD, KEY = "shard.json", "key.json"


def shard_name(index: int) -> str:
    """The folder of a shard."""
    return f"{index:06d}"


def shared_tokenizer(address: str, key: str, folder: Path) -> None:
    """Remove the index of what is replaced, and bring the tokenizer that an unfinished set was begun with."""
    if exists(f"{address}/{MANIFEST}"):
        remove_at(f"{address}/{MANIFEST}")
    if exists(f"{address}/{KEY}") and read_json_at(f"{address}/{KEY}") == {"key": key}:
        fetch_folder(f"{address}/tokenizer", folder)


def publish_tokenizer(folder: Path, address: str, key: str) -> None:
    """Write the tokenizer that all shards are packed with."""
    for file in sorted(folder.iterdir()):
        upload(file, f"{address}/tokenizer/{file.name}")
    write_at(f"{address}/{KEY}", json.dumps({"key": key}).encode())


def publish_shard(
    results: Path, index: int, counts: ShardCounts, dtype: np.dtype, has_prompts: bool, address: str, key: str
) -> ShardCounts:
    """Write a packed shard to its address, and remove it from the disk; one without documents is only noted."""
    name = shard_name(index)
    final = results / f"{name}-final"
    counts.target_bytes = join(results, final, [index], Limit(), dtype, has_prompts).target_bytes
    files = sorted(path.name for path in final.iterdir())
    counts.sha256 = shard_sha256(final, files)
    for file in files if counts.documents else ():
        upload(final / file, f"{address}/{name}/{file}")
    write_at(f"{address}/{name}/{SHARD}", json.dumps(asdict(counts) | {"key": key}).encode())
    for path in (*final.iterdir(), *results.glob(f"{name}.*")):
        path.unlink()
    final.rmdir()
    return counts


def published_shards(address: str, key: str, count: int) -> dict[int, ShardCounts]:
    """The counts of the shards that the same command wrote before."""
    known: dict[int, ShardCounts] = {}
    for file in files_at(f"{address}/*/{SHARD}"):
        name = file.split("/")[-2]
        facts = read_json_at(file)
        if facts.pop("key", None) == key and name.isdecimal() and int(name) < count:
            known[int(name)] = decode(ShardCounts, facts, file)
    return known


def publish(text: PackedText, address: str) -> None:
    """Write the index of the shards that are at the address."""
    totals, facts = ShardCounts(), []
    for index, shard in enumerate(text.shards):
        for field in ("tokens", "documents", "words", "bytes", "targets", "target_bytes"):
            setattr(totals, field, getattr(totals, field) + getattr(shard, field))
        if shard.documents:
            counts = (shard.tokens, shard.documents, shard.words, shard.bytes)
            facts.append(ShardFacts(shard_name(index), *counts, shard.sha256, text.targets(shard)))
    manifest = replace(text.manifest(totals), shards=facts)
    write_at(f"{address}/{MANIFEST}", json.dumps(asdict(manifest), indent=1).encode())
