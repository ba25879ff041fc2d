"""Data sets: packed folders and plain text give the same, held-out documents, and what cannot be read."""

import json
from pathlib import Path

import pytest

from braidlm.core.decoding.generation import Prompt
from braidlm.core.errors import BraidError
from braidlm.data.loading.streams import Subset
from braidlm.data.packing.packed_data import PackedData
from braidlm.data.packing.prepare import prepare
from braidlm.inspection.routes import routes
from braidlm.inspection.texts import DataSource
from tests.inspection.path_models import TOKENIZER

DOCUMENTS = [f"tale number {'abcdefgh'[n % 8]} " * (1 + n % 3) + "end" for n in range(20)]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "tales.txt"
    path.write_text("\n\n".join(DOCUMENTS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def packed(text_file: Path) -> Path:
    out = text_file.parent / "packed"
    prepare(text_file, out, tokenizer="bytes", workers=1)
    return out


def test_packed_and_plain_text_are_the_same(folders: dict[str, Path], text_file: Path, packed: Path) -> None:
    one, other = (routes(folders["random"], data={"a": path}, tokens=300).models[0] for path in (text_file, packed))
    assert one.data == other.data
    assert one.tallies == other.tallies
    assert one.data[0].tokens == 300
    assert one.prompts == []
    assert one.tallies[-1].what == "all tokens of the data"


def test_documents_without_their_end_cut_at_the_last(packed: Path) -> None:
    texts = DataSource("a", str(packed), 60).texts(TOKENIZER)
    joined = [TOKENIZER.decode(text.ids) for text in texts]
    assert joined[:2] == DOCUMENTS[:2]
    assert sum(len(text.ids) for text in texts) == 60
    assert DOCUMENTS[len(joined) - 1].startswith(joined[-1])
    assert {text.domain for text in texts} == {"a"}


def test_held_out_documents_are_those_a_recipe_holds_out(packed: Path) -> None:
    held = DataSource("a", str(packed), 10_000, held_out=0.2).texts(TOKENIZER)
    chosen = Subset(0.8, 1.0).choose(PackedData(packed).manifest.documents)
    assert [TOKENIZER.decode(text.ids) for text in held] == [DOCUMENTS[n] for n in chosen]
    assert len(held) == 4


def test_shares_of_data(folders: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    digits = tmp_path / "sums.jsonl"
    digits.write_text("\n".join(json.dumps({"text": "12345" * n}) for n in range(1, 5)))
    model = routes(folders["letters"], data={"stories": text_file, "maths": digits}).models[0]
    stories, maths = model.data
    assert maths.shares == [{"stories": 0.0, "maths": 1.0, "combined": 0.0}] * 2
    assert (maths.documents, maths.tokens) == (4, 50)
    assert maths.sample.tokens == list("12345")
    letters = sum(character.isalpha() for text in DOCUMENTS for character in text)
    assert stories.shares[0]["stories"] == pytest.approx(letters / sum(map(len, DOCUMENTS)))
    assert model.tallies[-1].most_informative.p_value < 0.05


def test_prompts_beside_data(folders: dict[str, Path], text_file: Path) -> None:
    model = routes(folders["letters"], [Prompt("a")], {"stories": text_file}, tokens=50).models[0]
    assert [tally.what for tally in model.tallies] == [
        "the last token of each prompt",
        "all tokens of the prompts",
        "all tokens of the data",
    ]


def test_what_cannot_be_read(folders: dict[str, Path], text_file: Path, packed: Path, tmp_path: Path) -> None:
    def error(**options) -> str:
        with pytest.raises(BraidError) as caught:
            routes(folders["letters"], **options)
        return str(caught.value)

    assert "there is no such file, folder or corpus" in error(data={"stories": tmp_path / "none.txt"})
    assert "tokens: expected a whole number from 1 to" in error(data={"stories": text_file}, tokens=0)
    assert "held_out: expected a number above 0 and at most 1, got 2" in error(data={"stories": packed}, held_out=2.0)
    assert "only packed data has a held-out part" in error(data={"stories": text_file}, held_out=0.1)
    assert "the domain 'storys' is no path of this model. Did you mean 'stories'?" in error(data={"storys": text_file})
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n \n")
    assert "there is no text in this data set" in error(data={"stories": empty})
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "x"}\n')
    said = error(data={"stories": rows})
    assert "there is no field 'text'" in said
    assert "braid prepare SOURCE --tokenizer MODEL" in said


def test_packed_with_another_tokenizer(folders: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    prepare(text_file, tmp_path / "bpe", tokenizer="bpe", vocab_size=270, workers=1)
    with pytest.raises(BraidError) as caught:
        routes(folders["letters"], data={"stories": tmp_path / "bpe"})
    assert "packed with another tokenizer than the model's: the vocabularies have 258 and" in str(caught.value)
