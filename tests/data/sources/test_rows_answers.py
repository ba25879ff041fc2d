"""Rows as questions with answers: the template, and sources that have none."""

import json
from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.data.corpora.builtin import PROBLEMS, document
from braidlm.data.packing.prepare import prepare
from braidlm.data.sources.format import ReadOptions
from braidlm.data.sources.plan import plan_shards
from braidlm.data.sources.rows import document_of

ROW = {"story": "Tom has 2 {answer}.", "ask": " How many? ", "solution": "\n2\n", "none": None}
ASKED = ReadOptions(fields=("story", "ask"), joiner=" ", answer="solution")


def test_the_template_makes_the_document_and_its_prompt() -> None:
    piece = document_of(ROW, ASKED, "here")
    assert piece.text == "Question: Tom has 2 {answer}.  How many?\nAnswer: 2"
    assert piece.text[: piece.prompt] == "Question: Tom has 2 {answer}.  How many?\nAnswer: "
    other = document_of(ROW, ReadOptions(fields=("ask",), answer="solution", template="{question} -> {answer}"), "")
    assert other == ("How many? -> 2", True, len("How many? -> "))


@pytest.mark.parametrize(("field", "answer"), [("none", "solution"), ("ask", "none")])
def test_a_row_without_question_or_answer_is_empty(field: str, answer: str) -> None:
    assert document_of(ROW, ReadOptions(fields=(field,), answer=answer), "here").text == ""


@pytest.mark.parametrize(
    "template", ["{answer}", "{question}", "{question} {answer} end", "{answer} {question} {answer}"]
)
def test_a_template_has_one_question_and_ends_with_the_answer(template: str) -> None:
    with pytest.raises(BraidError, match="ends with"):
        ReadOptions(answer="a", template=template)


def test_a_missing_answer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    with pytest.raises(BraidError, match="no field 'solutoin'") as error:
        prepare(path, tmp_path / "out", tokenizer="bytes", fields="story", answer="solutoin")
    assert "line 1" in str(error.value)


def test_text_has_no_answers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for source in (tmp_path / "a.txt", "stories"):
        with pytest.raises(BraidError, match="no fields"):
            prepare(source, tmp_path / "out", tokenizer="bytes", answer="answer")


@pytest.mark.parametrize("corpus", PROBLEMS)
def test_built_in_problems_have_fields(corpus: str) -> None:
    options = ReadOptions(fields=("question",), answer="answer", documents=5, first=3, seed=2)
    (shard,) = plan_shards([corpus], options).shards
    pieces = list(shard.format.pieces(shard, options))
    assert len(pieces) == 5
    for number, piece in enumerate(pieces, 3):
        question, answer = piece.text[: piece.prompt], piece.text[piece.prompt :]
        assert question.startswith("Question: ")
        assert question.endswith("?\nAnswer: ")
        assert answer.rpartition("#### ")[2].isdigit()
        assert question.splitlines()[0] == document(corpus, 2, number).splitlines()[0]
    plain = ReadOptions(documents=5, first=3, seed=2)
    assert list(shard.format.documents(shard, plain)) == [document(corpus, 2, number) for number in range(3, 8)]


def test_rows_of_a_hub_data_set_as_orca_maths(tmp_path: Path) -> None:
    """The fields of microsoft/orca-math-word-problems-200k, from a folder in the Hub's layout."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    rows = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}."} for n in range(5)]
    (tmp_path / "orca" / "data").mkdir(parents=True)
    file = tmp_path / "orca" / "data" / "train-00000-of-00001.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    options = ReadOptions(fields=("question",), answer="answer")
    for source in (f"hub:{tmp_path / 'orca'}", str(file)):
        (shard,) = plan_shards([source], options).shards
        assert list(shard.format.pieces(shard, options)) == [document_of(row, options, "") for row in rows]
    with pytest.raises(BraidError, match="no field 'solution'"):
        plan_shards([f"hub:{tmp_path / 'orca'}"], ReadOptions(fields=("question",), answer="solution"))
