"""What a study expects of its trainings is counted by the data that it will be given, once that was prepared."""

from pathlib import Path

import pytest

from braidlm.data.loading.open_data import open_data
from braidlm.studies.decoding import load_study
from braidlm.studies.study import Study
from braidlm.studies.study_facts import BYTES_PER_TOKEN, StudyPlan


def text(folder: Path, line: str) -> Path:
    for split, lines in (("train", 40), ("dev", 4)):
        (folder / split).mkdir(parents=True)
        (folder / split / "a.txt").write_text(f"{line}\n\n" * lines)
    return folder


def study_of(corpus: Path, *changes: str) -> Study:
    own = [f"domains.english.folder={corpus}", f"data.cache={corpus.parent / 'cache'}"]
    return load_study("best/strict-small", [*own, "data.tokenizer.vocab_size=264", "data.length=8", *changes])


def test_the_size_is_that_of_the_same_text_in_the_same_tokens(tmp_path: Path) -> None:
    long, short = text(tmp_path / "long", "four words a line"), text(tmp_path / "short", "two words")
    assert StudyPlan(study_of(long)).sizes == {"english": None}
    packed = open_data(study_of(long).data_config).train[0].data.manifest
    assert packed.words == 160
    assert StudyPlan(study_of(long)).sizes == {"english": (160, packed.tokens)}
    for other in (
        study_of(short),
        study_of(long, "data.tokenizer.vocab_size=300"),
        study_of(long, "+domains.english.separator=lines"),
        study_of(tmp_path / "removed"),
    ):
        assert StudyPlan(other).sizes == {"english": None}


def test_the_expected_time_counts_validations(tmp_path: Path) -> None:
    corpus = text(tmp_path / "corpus", "four words a line")
    often, at_end = (f"validation.every='{every} words'" for every in (10_000_000, 200_000_000))
    expected = {}
    for tokens in ("null", "7"):
        plans = [StudyPlan(study_of(corpus, every, f"validation.tokens={tokens}")) for every in (often, at_end)]
        trainings = [plan.training("dense", 1000) for plan in plans]
        (held_out,) = {plan.held_out["english"] for plan in plans}
        nine = trainings[0]["seconds"] * plans[0].flops_per_second - trainings[1]["seconds"] * plans[1].flops_per_second
        expected[tokens] = held_out
        assert nine == pytest.approx(9 * held_out * 1000, rel=1e-6), "of ten of which one is at the end"
    size = (corpus / "dev/a.txt").stat().st_size
    assert expected == {"null": round(size / BYTES_PER_TOKEN) // 2, "7": 7}, "one half of the text, or a limit"
