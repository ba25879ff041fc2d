"""The files of a data set: plain ones, and no more of them than memory holds."""

import gzip
import os
from functools import partial
from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.core.reading import read_bounded
from braidlm.evals import rows


def test_what_unpacks_to_more_than_memory_and_what_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "read_bounded", partial(read_bounded, max_bytes=1000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(bytes(1000)))
    assert rows.files_of(tmp_path, below=True)[0].content == bytes(1000)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(bytes(1001)))
    with pytest.raises(BraidError, match="holds more than 1,000 bytes"):
        rows.files_of(tmp_path, below=True)
    os.mkfifo(tmp_path / "b.jsonl")
    for path in (tmp_path, tmp_path / "b.jsonl"):
        with pytest.raises(BraidError, match="this is not a plain file"):
            rows.files_of(path)
