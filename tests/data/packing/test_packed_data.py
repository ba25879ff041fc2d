"""Damaged data: packed folders, unfinished work and sources; each is an error that says so, and nothing is written."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.loading.validation import validation_windows
from braidlm.data.packing.packed_data import PackedData
from braidlm.data.packing.prepare import prepare


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("stories", tmp_path_factory.mktemp("packed") / "set", documents=20, tokenizer="bytes").folder


@pytest.fixture
def packed(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "set"))


def use(folder: Path) -> None:
    """Everything that a training does with a data set."""
    stream = TokenStream(PackedData(folder), Subset(0.0, 0.5))
    stream.tokens_at(stream.positions(np.arange(0, len(stream), 64), 64))
    list(validation_windows(stream, 16))


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def missing(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def random_bytes(name: str) -> Callable[[Path], None]:
    rng = np.random.default_rng(0)
    return lambda folder: (folder / name).write_bytes(rng.bytes((folder / name).stat().st_size))


def fact(**changed: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        facts = json.loads((folder / "data.json").read_text()) | changed
        (folder / "data.json").write_text(json.dumps({key: value for key, value in facts.items() if value != "gone"}))

    return change


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    **{f"cut {name}": (cut(name), "bytes where data.json promises") for name in ("tokens.bin", "words.bin")},
    **{f"cut {name}": (cut(name), "bytes where data.json promises") for name in ("documents.bin", "lengths.bin")},
    **{f"no {name}": (missing(name), "this file does not exist") for name in ("tokens.bin", "words.bin")},
    **{f"no {name}": (missing(name), "this file does not exist") for name in ("documents.bin", "lengths.bin")},
    "random ids": (random_bytes("tokens.bin"), "of a vocabulary of 258"),
    "random index": (random_bytes("documents.bin"), "documents.bin does not divide the tokens into documents"),
    "random lengths": (random_bytes("lengths.bin"), "do not add up to those in data.json"),
    "folder for file": (
        lambda folder: (missing("words.bin")(folder), (folder / "words.bin").mkdir())[1],
        "bytes where",
    ),
    "a list": (lambda folder: (folder / "data.json").write_text("[]") and None, "expected an object, found a list"),
    "no tokens": (fact(tokens="gone"), "tokens"),
    "tokens in words": (fact(tokens="many"), "tokens"),
    "negative tokens": (fact(tokens=-1), "tokens"),
    "endless tokens": (fact(tokens=float("inf")), "tokens"),
    "unknown type": (fact(dtype="object"), "dtype"),
    "unknown key": (fact(color="red"), "color"),
    "another format": (fact(format=7), "this data set has format 7"),
    "eos of nobody": (fact(eos_id=999_999), "eos_id is 999999 in a vocabulary of 258"),
    "no vocabulary": (fact(vocab_size=0), "vocab_size"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_packed_set_is_refused(packed: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    use(packed)
    damage(packed)
    with pytest.raises(BraidError, match=message) as caught:
        use(packed)
    assert str(packed) in str(caught.value)


def test_ids_beyond_those_that_are_looked_at_first_are_refused_when_they_are_read(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("braidlm.data.packing.packed_data.CHECKED_TOKENS", 10)
    tokens = np.memmap(packed / "tokens.bin", np.uint16, "r+")
    tokens[500] = 9999
    stream = TokenStream(PackedData(packed))
    stream.tokens_at(np.arange(500))
    with pytest.raises(BraidError, match="the id 9999"):
        stream.tokens_at(np.arange(501))
    with pytest.raises(BraidError, match="the id 9999"):
        stream.read(400, 200)


def test_a_damaged_set_may_be_replaced(packed: Path) -> None:
    options: dict[str, Any] = {"documents": 5, "tokenizer": "bytes", "workers": 1}
    (packed / "data.json").write_text('{"format": 1, "source": []}')
    with pytest.raises(BraidError, match=r"data\.json"):
        prepare("stories", packed, **options)
    assert prepare("stories", packed, replace=True, **options).manifest.documents == 5


# Unfinished work


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The work of a run that was stopped before it joined its three shards."""

    def stop(*args: Any, **options: Any) -> None:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr("braidlm.data.packing.shards.PackedText.assemble", stop)
        with pytest.raises(RuntimeError):
            again(tmp_path / "out")
    return tmp_path / "out.part"


def again(out: Path) -> PackedData:
    return prepare("stories", out, documents=20, vocab_size=300, workers=1, shard_mb=0.01)


WORK: dict[str, Callable[[Path], Any]] = {
    "marker is random": lambda part: (part / "shards/000000.json").write_bytes(b"\xff\x00"),
    "marker is a list": lambda part: (part / "shards/000000.json").write_text("[1, 2]"),
    "marker is deep": lambda part: (part / "shards/000000.json").write_text("[" * 100_000),
    "marker in words": lambda part: (part / "shards/000000.json").write_text('{"tokens": "many"}'),
    "tokens are cut": lambda part: os.truncate(part / "shards/000000.tokens", 7),
    "ids are random": lambda part: random_bytes("shards/000000.tokens")(part),
    "counts are random": lambda part: random_bytes("shards/000001.documents")(part),
    "words are missing": lambda part: (part / "shards/000001.words").unlink(),
    "job is random": lambda part: (part / "job.json").write_bytes(b"\xff"),
    "key is random": lambda part: (part / "key").write_bytes(b"\xff\xfe"),
    "key is missing": lambda part: (part / "key").unlink(),
}


@pytest.mark.parametrize("case", WORK)
def test_damaged_work_is_done_again(unfinished: Path, tmp_path: Path, case: str) -> None:
    WORK[case](unfinished)
    data = again(tmp_path / "out")
    expected = again(tmp_path / "expected")
    assert np.array_equal(data.tokens, expected.tokens)
    assert np.array_equal(data.document_starts, expected.document_starts)
    assert not unfinished.exists()


@pytest.mark.parametrize("content", [b"\xff", b"[]", b"{}", b'{"model": 1}'])
def test_a_damaged_tokenizer_of_unfinished_work_says_what_to_do(unfinished: Path, content: bytes) -> None:
    (unfinished / "tokenizer/tokenizer.json").write_bytes(content)
    with pytest.raises(BraidError, match=f"remove the folder {unfinished} and run the same command again"):
        again(unfinished.with_suffix(""))


def test_another_tokenizer_in_unfinished_work_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braidlm.data.packing.shards.PackedText.assemble", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare("stories", tmp_path / "out", documents=5, tokenizer="bytes", workers=1)
    other = tmp_path / "out.part/tokenizer/tokenizer.json"
    other.write_text(other.read_text().replace('"0"', '"swapped"').replace('"1"', '"0"').replace('"swapped"', '"1"'))
    with pytest.raises(BraidError, match="this is not the tokenizer that was chosen"):
        prepare("stories", tmp_path / "out", documents=5, tokenizer="bytes", workers=1)


@pytest.mark.parametrize("name", ["out.part", "out.part/lock"])
def test_something_else_in_the_place_of_the_work(tmp_path: Path, name: str) -> None:
    if name == "out.part":
        (tmp_path / name).write_text("a file")
    else:
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(BraidError, match=r"a file stands where a folder is needed|this is a folder"):
        again(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Sources


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], *sources: str, options: tuple[str, ...] = ()) -> str:
    """The message of a command that fails with code 2 and leaves nothing."""
    before = sorted(os.listdir(os.fsencode(tmp_path)))
    out = ["--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--workers", "1", *options]
    assert main(["prepare", *sources, *out]) == 2
    assert sorted(os.listdir(os.fsencode(tmp_path))) == before
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def test_a_deeply_nested_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "deep", "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    assert "a.jsonl, line 2: this line is not JSON (it is nested" in refused(tmp_path, capsys, str(path))
    path.write_text('{"text": "fine"}\n{"text": ' + "9" * 10_000 + "}\n")
    assert "a.jsonl, line 2" in refused(tmp_path, capsys, str(path))


def test_names_that_are_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"b\xff.txt")
    try:
        (tmp_path / name).write_text("text")
    except OSError:
        pytest.skip("this file system has only names that are UTF-8")
    for source in (str(tmp_path / name), str(tmp_path), f"{tmp_path}/*.txt"):
        assert r"b\udcff.txt': the name of this file or folder is not UTF-8" in refused(tmp_path, capsys, source)
    assert "is not UTF-8" in refused(tmp_path, capsys, "stories", options=("--out", str(tmp_path / name)))
    assert "is not UTF-8" in refused(tmp_path, capsys, "stories", options=("--name", name))


@pytest.mark.parametrize("seed", range(12))
def test_corrupt_pages_of_parquet(tmp_path: Path, seed: int) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    texts = [f"{number} is the number of this row" for number in range(300)]
    path, rng = tmp_path / "a.parquet", np.random.default_rng(seed)
    compression = ("snappy", "zstd", "none", "gzip")[seed % 4]
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=100, compression=compression)
    content = bytearray(path.read_bytes())
    for at in rng.integers(0, len(content), 20):
        content[at] = rng.integers(0, 256)
    path.write_bytes(content)
    # A change within a text is not seen; any other is an error that names the file.
    with contextlib.suppress(BraidError), errors_name("a.parquet"):
        prepare(path, tmp_path / "out", tokenizer="bytes", workers=1)
    assert not (tmp_path / "out.part").exists()


@contextlib.contextmanager
def errors_name(file: str) -> Iterator[None]:
    try:
        yield
    except BraidError as error:
        assert file in (error.where or "")  # noqa: PT017
        raise


def test_an_error_of_one_document_names_it(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("|", "removed")  # all words between two bars are one token
    backend.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "a.txt"
    path.write_text("a|a\n\n\na\n\n" + "word " * 300 + "\n\na")
    with pytest.raises(BraidError, match=r"a\.txt, document 3: this tokenizer has tokens that stand for more than 255"):
        prepare(path, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", special_tokens=["eos=</s>"], workers=1)
    with pytest.raises(BraidError, match=r"a\.txt, after byte \d+, document \d: this tokenizer has tokens"):
        prepare(
            path,
            tmp_path / "out",
            tokenizer=tmp_path / "tokenizer.json",
            special_tokens=["eos=</s>"],
            workers=1,
            shard_mb=0.000003,
        )


# Interrupts


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "term")]
)
def test_an_interrupt_while_workers_start(tmp_path: Path, number: int, code: int, word: str) -> None:
    """The signal goes to the whole process group, as from a terminal."""
    command = [sys.executable, "-P", "-m", "braidlm", "prepare", "stories", "--documents", "20000"]
    command += ["--tokenizer", "bytes", "--workers", "4", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "out.part/job.json").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert word in errors
    assert not (tmp_path / "out").exists()
