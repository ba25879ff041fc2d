"""Packing: exact tokens, words and boundaries; equal for any number of workers; resumed after a kill."""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braidlm.cli import prepare as verb
from braidlm.core.errors import BraidError
from braidlm.data.packing import workers
from braidlm.data.packing.packed_data import PackedData, is_packed
from braidlm.data.packing.prepare import prepare
from braidlm.data.packing.workers import pack_all
from braidlm.data.tokenizing.build import load_tokenizer

STORIES = [f"Zoë number {number} went to 你好 town.\nIt's {number * 7} o'clock!  The end." for number in range(200)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "stories.txt"
    path.write_text("\n\n".join(STORIES) + "\n\n   \n")
    return path


def texts_of(data: PackedData) -> list[str]:
    """Every document decoded, with its words, bytes and EOS checked."""
    tokenizer, found = load_tokenizer(data.tokenizer_folder), []
    assert data.manifest.tokenizer == tokenizer.fingerprint
    assert data.document_starts[0] == 0
    assert data.document_starts[-1] == len(data.tokens) == len(data.word_starts) == data.manifest.tokens
    for number, (start, stop) in enumerate(zip(data.document_starts[:-1], data.document_starts[1:], strict=True)):
        assert data.tokens[stop - 1] == tokenizer.eos_id
        text = tokenizer.decode(data.tokens[start : stop - 1].tolist())
        assert data.document_words[number] == len(text.split()) == data.word_starts[start:stop].sum()
        assert data.document_bytes[number] == len(text.encode())
        found.append(text)
    assert data.manifest.documents == len(found) == len(data.document_words)
    assert data.manifest.words == data.document_words.sum()
    assert data.manifest.bytes == data.document_bytes.sum()
    return found


def contents(folder: Path) -> dict[str, str]:
    """A hash of every file but the manifest, whose source names the folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "data.json"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_documents_come_back_exactly(text: Path, tmp_path: Path, tokenizer: str) -> None:
    data = prepare(
        text, tmp_path / "out", tokenizer=tokenizer, vocab_size=300 if tokenizer == "bpe" else None, workers=1
    )
    assert texts_of(data) == STORIES
    assert data.manifest.dtype == "uint16"
    assert data.manifest.name == "out"
    assert data.manifest.eos_id == (0 if tokenizer == "bpe" else 256)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "stories.txt"]


def test_one_and_two_workers_and_any_shards_give_the_same(text: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"vocab_size": 300}
    one = prepare(text, tmp_path / "one", workers=1, **common)
    two = prepare(text, tmp_path / "two", workers=2, shard_mb=0.002, **common)
    assert contents(one.folder) == contents(two.folder)
    assert texts_of(two) == STORIES


def test_a_long_document_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braidlm.data.tokenizing.encoding.PART_CHARS", 50)
    monkeypatch.setattr("braidlm.data.tokenizing.encoding.AROUND", 10)
    monkeypatch.setattr("braidlm.data.sources.text.BLOCK", 70)
    monkeypatch.setattr("braidlm.data.sources.files.BLOCK", 70)
    monkeypatch.setattr("braidlm.data.packing.shards.BATCH_CHARS", 120)
    monkeypatch.setattr("braidlm.data.packing.shards.DOCUMENTS", 1)
    (tmp_path / "a.txt").write_text("\n".join(STORIES))
    (tmp_path / "b.txt").write_text("short")
    data = prepare(tmp_path / "*.txt", tmp_path / "out", separator="file", vocab_size=300, workers=1)
    assert texts_of(data) == ["\n".join(STORIES), "short"]


def test_a_large_vocabulary_takes_uint32(tmp_path: Path, text: Path) -> None:
    small = prepare(text, tmp_path / "small", vocab_size=300, workers=1)
    facts = json.loads((small.tokenizer_folder / "tokenizer.json").read_text())
    token = dict(facts["added_tokens"][0], content="<far>", id=70_000)
    facts["added_tokens"].append(token)
    # A gap in the ids is not what the library writes, so fill it.
    vocab = facts["model"]["vocab"]
    vocab |= {f"unused{number}": number for number in range(len(vocab), 70_000)}
    (tmp_path / "wide.json").write_text(json.dumps(facts))
    wide = prepare(text, tmp_path / "wide", tokenizer=tmp_path / "wide.json", special_tokens=["eos=<far>"], workers=1)
    assert wide.manifest.dtype == "uint32"
    assert wide.tokens[wide.document_starts[1] - 1] == 70_000
    assert texts_of(wide) == STORIES


def test_fields_limits_and_special_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"q": f"What is {n}?", "a": f"It is {n}."}) for n in range(50)))
    options: dict[str, Any] = {"fields": ["q", "a"], "joiner": " ", "workers": 1, "shard_mb": 0.0005}
    roles = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>", "mask": "<mask>"}
    data = prepare(path, tmp_path / "d", limit_documents=7, special_tokens=roles, vocab_size=270, **options)
    assert texts_of(data) == [f"What is {n}? It is {n}." for n in range(7)]
    assert data.manifest.eos_id == 2
    data = prepare(path, tmp_path / "w", limit_words=20, tokenizer="bytes", **options)
    assert data.manifest.words == 18  # whole documents of six words
    with pytest.raises(BraidError, match="the limit leaves no document"):
        prepare(path, tmp_path / "n", limit_words=5, tokenizer="bytes", **options)
    assert not (tmp_path / "n").exists()


def test_a_limited_tokenizer_sees_only_the_limited_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("aaaa aaaa aaaa\n\n" + "zebra zebra zebra\n\n" * 20)
    data = prepare(path, tmp_path / "out", vocab_size=300, limit_words=3, workers=1)
    assert len(load_tokenizer(data.folder).encode("zebra")) == 5
    assert len(load_tokenizer(data.folder).encode("aaaa")) < 4


def test_a_sample_is_spread_over_the_data(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("alpha alpha alpha\n\n" * 500 + "omega omega omega\n\n" * 500)
    data = prepare(path, tmp_path / "out", vocab_size=300, sample_mb=0.002, shard_mb=0.001, workers=1)
    assert len(load_tokenizer(data.folder).encode(" alpha")) == len(load_tokenizer(data.folder).encode(" omega")) == 1


def test_built_in_corpus_and_a_tokenizer_of_another_data_set(tmp_path: Path) -> None:
    stories = prepare("stories", tmp_path / "stories", documents=200, vocab_size=400, workers=1)
    maths = prepare("maths", tmp_path / "maths", documents=50, tokenizer=stories.folder, workers=1)
    assert stories.manifest.documents == 200
    assert maths.manifest.tokenizer == stories.manifest.tokenizer
    assert len(texts_of(maths)) == 50


def test_finished_work_is_not_done_again(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    prepare(text, out, vocab_size=300, workers=1)
    changed = (out / "tokens.bin").stat().st_mtime_ns
    prepare(text, out, vocab_size=300, workers=2)
    assert "is finished already: the same sources, options and tokenizer" in capsys.readouterr().out
    assert (out / "tokens.bin").stat().st_mtime_ns == changed
    with pytest.raises(
        BraidError, match=r"made from other sources or options\nChoose another `--out`, or pass `--replace`"
    ):
        prepare(text, out, vocab_size=290, workers=1)
    assert prepare(text, out, vocab_size=290, workers=1, replace=True).manifest.vocab_size == 290
    text.write_text("another text")
    with pytest.raises(BraidError, match="made from other sources"):
        prepare(text, out, vocab_size=290, workers=1)


def test_nothing_else_is_ever_replaced(text: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.tex").write_text("x")
    with pytest.raises(BraidError, match="exists already and is not a packed data set"):
        prepare(text, tmp_path / "precious", tokenizer="bytes", replace=True)
    assert (tmp_path / "precious/thesis.tex").read_text() == "x"


SLOW = """
import sys, time
from pathlib import Path
from braidlm.data.packing import workers
import braidlm.data.packing.prepare
pack, delay = workers.Job.pack, float(sys.argv[3])
def slowly(job, index, packer):
    time.sleep(delay)
    return pack(job, index, packer)
workers.Job.pack = slowly
braidlm.data.packing.prepare.prepare(sys.argv[1], sys.argv[2], vocab_size=300, workers=1, shard_mb=0.002)
"""


def test_killed_in_the_middle_and_run_again(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, part = tmp_path / "out", tmp_path / "out.part"
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(text), str(out), "0.15"])
    deadline = time.monotonic() + 60
    while len(list((part / "shards").glob("*.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists()
    assert not is_packed(part)
    done = {path.name: path.stat().st_mtime_ns for path in (part / "shards").glob("*.json")}
    assert len(done) >= 3
    # A marker without its whole file, as a crash of the machine could leave it, does not count.
    (part / "shards/000001.tokens").write_bytes(b"x")
    half = part / "shards/000009.tokens.1"
    half.write_bytes(b"x")
    halves: list[bool] = []
    monkeypatch.setattr(
        "braidlm.data.packing.prepare.pack_all", lambda *args: [halves.append(half.exists()), pack_all(*args)][1]
    )
    data = prepare(text, out, vocab_size=300, workers=1, shard_mb=0.002)
    assert halves == [False]
    assert f"going on with an earlier run: {len(done) - 1} of" in capsys.readouterr().out
    assert not part.exists()
    assert contents(out) == contents(prepare(text, tmp_path / "whole", vocab_size=300, workers=1).folder)
    assert texts_of(data) == STORIES


def test_workers_end_when_their_parent_is_killed(text: Path, tmp_path: Path) -> None:
    text.write_text("\n\n".join(STORIES * 60))
    code = "import sys; from braidlm.data.packing.prepare import prepare as p; "
    code += "p(*sys.argv[1:], tokenizer='bytes', workers=2, shard_mb=0.01)"
    process = subprocess.Popen([sys.executable, "-c", code, str(text), str(tmp_path / "out")])
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out.part/shards").glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.5)
    count = len(list((tmp_path / "out.part/shards").glob("*.json")))
    time.sleep(0.5)
    assert len(list((tmp_path / "out.part/shards").glob("*.json"))) == count
    assert not (tmp_path / "out").exists()
    data = prepare(text, tmp_path / "out", tokenizer="bytes", workers=2, shard_mb=0.01)
    assert data.manifest.documents == len(STORIES) * 60


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_only_the_parent_minds_a_signal(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    start = workers._start_process

    def started_and_signalled(folder: Path) -> "subprocess.Popen[str]":
        process = start(folder)
        process.send_signal(number)  # as from whoever ends all processes of a service
        return process

    monkeypatch.setattr(workers, "_start_process", started_and_signalled)
    data = prepare(text, tmp_path / "out", tokenizer="bytes", workers=2, shard_mb=0.005)
    assert texts_of(data) == STORIES
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint({signal.SIGINT, signal.SIGTERM})


def test_another_command_starts_over(text: Path, tmp_path: Path) -> None:
    part = tmp_path / "out.part"
    (part / "shards").mkdir(parents=True)
    (part / "key").write_text("of another command")
    (part / "shards/000000.json").write_text("{}")
    assert texts_of(prepare(text, tmp_path / "out", tokenizer="bytes", workers=1)) == STORIES


def test_work_with_other_shard_boundaries_is_not_continued(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr("braidlm.data.packing.shards.PackedText.assemble", crash)
    with pytest.raises(RuntimeError):
        prepare(text, tmp_path / "out", tokenizer="bytes", workers=1, shard_mb=0.0100)
    shards = tmp_path / "out.part/shards"
    assert len(list(shards.glob("*.json"))) == 2
    (shards / "000001.json").unlink()  # only the first shard was finished
    monkeypatch.undo()
    # Two shards again, with another boundary.
    data = prepare(text, tmp_path / "out", tokenizer="bytes", workers=1, shard_mb=0.0098)
    assert texts_of(data) == STORIES


def test_two_at_once_are_kept_apart(text: Path, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "out.part").mkdir()
    with open(tmp_path / "out.part/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BraidError, match="another `braid prepare` is at work here"):
            prepare(text, tmp_path / "out", tokenizer="bytes", workers=1)


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_leave_nothing_that_looks_finished(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\n" * 400 + b"bad \xff\n\n" + b"good\n\n" * 400)
    with pytest.raises(
        BraidError, match=r"a.txt: byte 2404 \(0xff\) is not UTF-8 text\nIf the file has another encoding"
    ):
        prepare(path, tmp_path / "out", tokenizer="bytes", workers=workers, shard_mb=0.001)
    assert not (tmp_path / "out").exists()
    data = prepare(path, tmp_path / "out", tokenizer="bytes", workers=workers, shard_mb=0.001, errors="replace")
    assert data.manifest.documents == 801


def test_a_full_disk_is_explained(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("braidlm.data.packing.shards.os.fsync", full)
    with pytest.raises(BraidError, match="the disk is full; nothing was written"):
        prepare(text, tmp_path / "out", tokenizer="bytes", workers=1)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert texts_of(prepare(text, tmp_path / "out", tokenizer="bytes", workers=1)) == STORIES


def test_empty_data_and_wrong_options(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n \n\t\n")
    for tokenizer in ("bpe", "bytes"):
        with pytest.raises(BraidError, match="there are no documents in it, only empty ones or none"):
            prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer=tokenizer, workers=1)
    wrong = {
        "unknown encoding 'utf-88'": {"encoding": "utf-88"},
        "errors: .*'skip'": {"errors": "skip"},
        "the separator is empty": {"separator": ""},
        "workers: expected a whole number from 1 to": {"workers": 0},
        "a vocabulary of 999 was asked for, and 'bytes' has 258 tokens": {"tokenizer": "bytes", "vocab_size": 999},
    }
    for message, options in wrong.items():
        with pytest.raises(BraidError, match=message):
            prepare(tmp_path / "a.txt", tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_marker_in_the_text_is_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo")
    data = prepare(tmp_path / "a.txt", tmp_path / "a", tokenizer="bytes", workers=1)
    assert texts_of(data) == ["one\n<|endoftext|>\ntwo"]
    assert "1 documents contain the text '<|endoftext|>'" in capsys.readouterr().err
    data = prepare(tmp_path / "a.txt", tmp_path / "b", tokenizer="bytes", workers=1, separator="<|endoftext|>")
    assert texts_of(data) == ["one", "two"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "one two", "a": "three"}\n')
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    command = [str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--field", "q", "--field", "a"]
    verb.run(parser.parse_args([*command, "--joiner", "\\n\\n", "--tokenizer", "bytes", "--workers", "1"]))
    assert texts_of(PackedData(tmp_path / "out")) == ["one two\n\nthree"]
    shown = capsys.readouterr().out
    assert "bytes per token" in shown
    assert str(tmp_path / "out").split("/")[-1] in shown
    assert np.array_equal(PackedData(tmp_path / "out").tokens[:3], list(b"one"))


def test_only_a_trained_tokenizer_is_told_how_texts_begin(tmp_path: Path) -> None:
    data = prepare("stories", tmp_path / "begun", documents=20, vocab_size=300, begin=True, workers=1)
    tokenizer = load_tokenizer(data.tokenizer_folder)
    assert tokenizer.beginning == [tokenizer.eos_id]
    plain = prepare("stories", tmp_path / "plain", documents=20, vocab_size=300, workers=1)
    assert plain.tokens.tolist() == data.tokens.tolist()
    with pytest.raises(BraidError, match=r"only a tokenizer that is trained here(.|\n)*Leave out `--begin`: 'bytes'"):
        prepare("stories", tmp_path / "bytes", tokenizer="bytes", begin=True)
    with pytest.raises(BraidError, match="Leave out `--space-before`: 'bytes'"):
        prepare("stories", tmp_path / "bytes", tokenizer="bytes", space_before="texts")
    assert not (tmp_path / "bytes").exists()


def test_files_that_are_left_out_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a text\n" * 9)
    for name in ("b.docx", "c.png"):
        (folder / name).write_text("something")
    prepare([folder], tmp_path / "packed", tokenizer="bytes")
    assert "2 files of a kind that is not read: left out (.docx, .png)" in capsys.readouterr().err
