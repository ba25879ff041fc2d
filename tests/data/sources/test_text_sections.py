"""Long documents in sections: no character is lost, and each section but the last has its size."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from braidlm.data.sources.format import Piece, ReadOptions, by_document
from braidlm.data.sources.plan import plan_shards
from braidlm.data.sources.text import in_sections

documents = st.lists(st.lists(st.text("aü \n\r", max_size=20), min_size=1, max_size=4), min_size=1, max_size=4)


def as_pieces(texts: list[list[str]]) -> list[Piece]:
    return [Piece(text, at == len(pieces) - 1) for pieces in texts for at, text in enumerate(pieces)]


def read(pieces: list[Piece], size: int) -> list[str]:
    return ["".join(texts) for texts, _ in by_document(in_sections(pieces, size))]


@given(documents, st.integers(1, 12))
def test_sections_are_the_document(texts: list[list[str]], size: int) -> None:
    whole, remaining = ["".join(pieces) for pieces in texts], read(as_pieces(texts), size)
    for document in whole:
        joined = remaining.pop(0)
        while len(joined) < len(document):
            assert joined.endswith("\n")
            assert len(joined.encode()) >= size
            assert joined.strip()  # or it would be dropped
            assert remaining[0].strip()
            joined += remaining.pop(0)
        assert joined == document
    assert not remaining


@given(documents, st.integers(1, 12))
def test_how_a_document_is_read_does_not_matter(texts: list[list[str]], size: int) -> None:
    assert read(as_pieces(texts), size) == read([Piece("".join(pieces), True) for pieces in texts], size)


def test_text_files(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\nthree\n\nfour\n")
    options = ReadOptions(section_bytes=5)
    (shard,) = plan_shards([file], options).shards
    assert [piece.text for piece in shard.format.pieces(shard, options)] == ["one\ntwo\n", "three", "four"]


def test_earlier_versions_know_no_sections() -> None:
    assert "section_bytes" not in ReadOptions().facts()
    assert ReadOptions(section_bytes=9).facts()["section_bytes"] == 9
