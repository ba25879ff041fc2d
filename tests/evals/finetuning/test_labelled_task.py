"""Labelled files: every layout gives the same examples, and whatever is wrong is named by file and line."""

from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.evals.finetuning.data_sets import DATA_SETS, DataSet
from braidlm.evals.finetuning.labelled_task import read_labelled
from tests.evals.labelled_examples import write_rows

BY_NAME = {data_set.name: data_set for data_set in DATA_SETS}
SST2, COLA, STSB, QNLI = (BY_NAME[name] for name in ("sst2", "cola", "stsb", "qnli"))
GOOD, BAD = {"sentence": "fine film", "label": 1}, {"sentence": "dull film", "label": 0}


def sst2_with(folder: Path, *lines: str) -> Path:
    write_rows(folder / "sst2.valid.jsonl", [GOOD])
    (folder / "sst2.train.jsonl").write_text("\n".join(lines))
    return folder


def test_the_challenges_layout(tmp_path: Path) -> None:
    write_rows(tmp_path / "sst2.train.jsonl", [GOOD, BAD])
    write_rows(tmp_path / "sst2.valid.jsonl", [BAD])
    found = read_labelled(SST2, tmp_path)
    assert found.train.texts == [("fine film", None), ("dull film", None)]
    assert found.train.labels.tolist() == [1, 0]
    assert found.valid.texts == [("dull film", None)]
    assert read_labelled(SST2, tmp_path / "sst2.train.jsonl").sha256 == found.sha256
    write_rows(tmp_path / "sst2.valid.jsonl", [GOOD])
    assert read_labelled(SST2, tmp_path).sha256 != found.sha256


@pytest.mark.parametrize("heading", ["", "sentence\tlabel\n"])
def test_a_table_with_or_without_a_heading(tmp_path: Path, heading: str) -> None:
    (tmp_path / "train.tsv").write_text(heading + 'he said "fine\t1\ndull film\t0\n')
    (tmp_path / "dev.tsv").write_text(heading + "dull\t0\n")
    found = read_labelled(SST2, tmp_path)
    assert found.train.texts == [('he said "fine', None), ("dull film", None)]
    assert found.train.labels.tolist() == [1, 0]


def test_colas_own_files(tmp_path: Path) -> None:
    (tmp_path / "in_domain_train.tsv").write_text("gj04\t1\t\tIt is so.\ngj04\t0\t*\tSo it.\n")
    (tmp_path / "in_domain_dev.tsv").write_text("gj04\t1\t\tIt was.\n")
    found = read_labelled(COLA, tmp_path)
    assert found.train.texts == [("It is so.", None), ("So it.", None)]
    assert found.train.labels.tolist() == [1, 0]


def test_numbers_with_commas_and_quotes(tmp_path: Path) -> None:
    (tmp_path / "stsb-en-train.csv").write_text('A man.,A boy.,2.5\n"Yes, he is.","He is ""so""\n too.",5\n')
    (tmp_path / "stsb-en-dev.csv").write_text("A.,B.,0.0\n")
    found = read_labelled(STSB, tmp_path)
    assert found.train.texts == [("A man.", "A boy."), ("Yes, he is.", 'He is "so"\n too.')]
    assert found.train.labels.tolist() == [2.5, 5.0]


def test_names_of_labels_and_of_other_layouts(tmp_path: Path) -> None:
    heading = "index\tquestion\tsentence\tlabel\n"
    (tmp_path / "train.tsv").write_text(heading + "0\tWho?\tHe.\tentailment\n1\tWhy?\tNo.\tnot_entailment\n")
    (tmp_path / "dev.tsv").write_text(heading + "0\tWho?\tHe.\tentailment\n")
    found = read_labelled(QNLI, tmp_path)
    assert found.train.texts[0] == ("Who?", "He.")
    assert found.train.labels.tolist() == [0, 1]
    (tmp_path / "dev.tsv").write_text("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tSo.\tThus.\n")
    (tmp_path / "train.tsv").write_text((tmp_path / "dev.tsv").read_text() + "0\t7\t8\tSo.\tNot.\n")
    assert read_labelled(BY_NAME["mrpc"], tmp_path).train.texts == [("So.", "Thus."), ("So.", "Not.")]


def test_true_and_false_are_labels(tmp_path: Path) -> None:
    rows = [{"question": "is it", "passage": "It is.", "label": label} for label in (True, False)]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "val.jsonl", rows)
    assert read_labelled(BY_NAME["boolq"], tmp_path).train.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("name", "row", "texts"),
    [
        (
            "wsc",
            {"text": "Jim saw him.", "span1_text": "Jim", "span2_text": "him"},
            ('Does "him" refer to "Jim" in this passage?', "Jim saw him."),
        ),
        (
            "multirc",
            {"paragraph": "It rained.", "question": "What fell?", "answer": "{Rain}"},
            ("Question: What fell? Answer: {Rain}", "It rained."),
        ),
        ("boolq", {"question": "does it rain", "passage": "It rains."}, ("does it rain", "It rains.")),
        ("qqp", {"question1": "Why?", "question2": ""}, ("Why?", "")),
    ],
)
def test_texts_are_put_together_as_the_challenge_does(
    tmp_path: Path, name: str, row: dict[str, str], texts: tuple[str, str]
) -> None:
    write_rows(tmp_path / f"{name}.train.jsonl", [{**row, "label": 0}, {**row, "label": 1}])
    write_rows(tmp_path / f"{name}.valid.jsonl", [{**row, "label": 1}])
    assert read_labelled(BY_NAME[name], tmp_path).valid.texts == [texts]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"sentence": "so", "label": 2}', "the label 2 is none of those of sst2: 0 (negative), 1 (positive)"),
        ('{"sentence": "so", "label": -1}', "the label -1 is none of those of sst2"),
        ('{"sentence": "so", "label": "happy"}', 'the label "happy" is none of those of sst2'),
        ('{"sentence": "so", "label": 0.5}', "the label 0.5 is none of those of sst2"),
        ('{"sentence": "so", "label": null}', "the label null is none of those of sst2"),
        ('{"sentence": "so"}', "there is no 'label'."),
        ('{"sentense": "so", "label": 1}', "there is no 'sentence'. Did you mean 'sentense'?"),
        ('{"sentence": 7, "label": 1}', "'sentence' is to be a text, not 7"),
        ('{"sentence": "  ", "label": 1}', "there is no text"),
        ('{"sentence": "so", "label": 1', "this line is not JSON"),
        ("[1, 2]", "this line is not an object but [1, 2]"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    folder = sst2_with(tmp_path, '{"sentence": "so", "label": 1}', "", line)
    with pytest.raises(BraidError) as caught:
        read_labelled(SST2, folder)
    assert message in caught.value.what
    assert caught.value.where == f"{tmp_path / 'sst2.train.jsonl'}, line 3"


@pytest.mark.parametrize("label", ["5.1", "-0.1", "much", "nan"])
def test_a_number_outside_its_range_is_named(tmp_path: Path, label: str) -> None:
    (tmp_path / "stsb-en-train.csv").write_text(f"A.,B.,1\nA.,B.,{label}\n")
    (tmp_path / "stsb-en-dev.csv").write_text("A.,B.,1\n")
    with pytest.raises(BraidError, match=f'the label "{label}" is not a number from 0 to 5') as caught:
        read_labelled(STSB, tmp_path)
    assert caught.value.where is not None
    assert caught.value.where.endswith("stsb-en-train.csv, line 2")


def test_a_line_with_a_column_too_many(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("fine\t1\ndull\t0\tno\n")
    (tmp_path / "dev.tsv").write_text("dull\t0\n")
    with pytest.raises(BraidError, match="this line has 3 columns, not 2"):
        read_labelled(SST2, tmp_path)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match="there is no data of glue_sst2 here") as caught:
        read_labelled(SST2, tmp_path)
    assert caught.value.todo is not None
    assert "sst2.train.jsonl and sst2.valid.jsonl, or train.tsv and dev.tsv" in caught.value.todo
    write_rows(tmp_path / "boolq.valid.jsonl", [{"question": "is it", "passage": "It is.", "label": 1}])
    with pytest.raises(BraidError, match=r"boolq\.valid\.jsonl is here, and boolq\.train\.jsonl is not") as caught:
        read_labelled(BY_NAME["boolq"], tmp_path)
    assert caught.value.todo is not None
    assert "--data superglue_boolq=FOLDER" in caught.value.todo


def test_examples_that_are_all_alike_teach_nothing(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match="every example has the label 'positive'"):
        read_labelled(SST2, sst2_with(tmp_path, '{"sentence": "so", "label": 1}'))
    with pytest.raises(BraidError, match="there are no examples in this file"):
        read_labelled(SST2, sst2_with(tmp_path, ""))


@pytest.mark.parametrize("data_set", DATA_SETS, ids=lambda data_set: data_set.name)
def test_every_data_set_is_whole(data_set: DataSet) -> None:
    assert data_set.text_fields
    assert data_set.task in (f"glue_{data_set.name}", f"superglue_{data_set.name}")
    assert f"glue_filtered/{data_set.name}.train.jsonl" in data_set.locations
    for folder in data_set.other_folders:
        assert any(location.startswith(folder) for location in data_set.locations)
