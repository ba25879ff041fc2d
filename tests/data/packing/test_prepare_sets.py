"""Several data sets in one command, and files of several kinds in one data set."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.data.packing.packed_data import PackedData
from braidlm.data.packing.prepare import named_sources, prepare, prepare_sets
from braidlm.data.tokenizing.build import load_tokenizer


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Folders with the same words in text, JSONL, parquet and compressed text; `dev` has a word of its own."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    for name, word in (("train", "alpha"), ("dev", "omega")):
        folder = tmp_path / "corpus" / name
        folder.mkdir(parents=True)
        texts = [f"{word} {word} {number}" for number in range(20)]
        (folder / "a.txt").write_text("\n\n".join(texts))
        (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in texts))
        parquet.write_table(pyarrow.table({"id": range(20), "text": texts}), folder / "c.parquet")
        (folder / "d.txt.gz").write_bytes(gzip.compress("\n\n".join(texts).encode()))
    return tmp_path / "corpus"


def test_one_tokenizer_of_the_first_set(corpus: Path, tmp_path: Path) -> None:
    sets = {"train": corpus / "train", "dev": [corpus / "dev"]}
    packed = prepare_sets(sets, tmp_path / "out", vocab_size=280, special_tokens=["eos=</s>"], workers=1)
    assert packed["train"].folder == tmp_path / "out/train"
    assert packed["train"].manifest.tokenizer == packed["dev"].manifest.tokenizer
    tokenizer = load_tokenizer(packed["dev"].folder)
    assert tokenizer.special.eos == "</s>"
    assert len(tokenizer.encode(" alpha")) < len(tokenizer.encode(" omega"))
    assert [data.manifest.documents for data in packed.values()] == [80, 80]
    alone = prepare(corpus / "train", tmp_path / "alone", vocab_size=280, special_tokens=["eos=</s>"], workers=1)
    assert np.array_equal(alone.tokens, packed["train"].tokens)


def test_files_of_several_kinds_are_one_set(corpus: Path, tmp_path: Path) -> None:
    files = sorted((corpus / "train").iterdir())
    data = prepare(files, tmp_path / "out", tokenizer="bytes", workers=2, shard_mb=0.0002)
    tokenizer = load_tokenizer(data.folder)
    texts = [text for text in tokenizer.decode(data.tokens.tolist()).split("<|endoftext|>") if text]
    assert texts == [f"alpha alpha {number}" for _ in files for number in range(20)]


def test_named_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named_sources(["a.txt", "hub:x/y"]) is None
    assert named_sources(["train=a.txt", "dev=b=c.txt", "train=d"]) == {"train": ["a.txt", "d"], "dev": ["b=c.txt"]}
    with pytest.raises(BraidError, match="this source has no name, and others have"):
        named_sources(["train=a.txt", "b.txt"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train=a.txt").write_text("x")
    assert named_sources(["train=a.txt"]) is None


def test_command_line(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "prepare",
        f"train={corpus}/train",
        f"dev={corpus}/dev",
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    command += ["--vocab-size", "270", "--separator", "a*=file", "--separator", "lines"]
    assert main(command) == 0
    assert PackedData(tmp_path / "out/dev").manifest.documents == 61
    shown = capsys.readouterr().out
    assert "train" in shown
    assert "dev" in shown
    assert main([*command, "--name", "x"]) == 2
    one_set = ["prepare", f"a={corpus}/dev", "--out", str(tmp_path / "out/dev")]
    assert main(one_set) == 2
    assert "this is one data set, and several were to be put into it" in capsys.readouterr().err
