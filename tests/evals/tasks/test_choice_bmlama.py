"""Multilingual facts: the sentence of least perplexity, by language."""

from pathlib import Path

import numpy as np
import pytest

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.tasks import TASKS
from tests.evals.plain_scorer import plain_sum
from tests.tiny_models import tiny_model

TOKENIZER = bytes_tokenizer()
HEADING = "Prompt\tAns\tCandidate Ans\tSubject\n"
FACTS = {
    "en": [("Ann was born in <mask>.", "Rome", "Paris, Rome, Ulm"), ("<mask> is a city.", "Ulm", "Ulm, Tea")],
    "de": [("Ann wurde in <mask> geboren.", "Rom", "Paris, Rom, Ulm"), ("<mask> ist eine Stadt.", "Ulm", "Tee, Ulm")],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for language, facts in FACTS.items():
        lines = "".join(f"{prompt}\t{answer}\t{candidates}\tAnn\n" for prompt, answer, candidates in facts)
        (tmp_path / f"{language}.tsv").write_text(HEADING + lines, encoding="utf-8")
    return tmp_path


def test_it_agrees_with_the_plain_way(folder: Path) -> None:
    model = EvaluatedModel(Scorer(tiny_model(vocab_size=TOKENIZER.vocab_size, context=64)), TOKENIZER)
    assert TOKENIZER.bos_id is not None
    right: dict[str, list[bool]] = {"de": [], "en": []}
    for language, facts in FACTS.items():
        for prompt, answer, candidates in facts:
            scores = {}
            for candidate in candidates.split(", "):
                ids = list(prompt.replace("<mask>", candidate).encode())
                scores[candidate] = plain_sum(model.model, [TOKENIZER.bos_id, *ids]) / len(ids)
            right[language].append(max(scores, key=lambda name: scores[name]) == answer)
    for name in ("bmlama17", "bmlama53"):
        result = TASKS[name]().open(folder).evaluate(name, model)
        assert {part: found.score for part, found in result.parts.items()} == {
            language: pytest.approx(100 * np.mean(hits)) for language, hits in right.items()
        }
        assert result.score == result.also["per token"]
        assert result.chance == pytest.approx(100 * (1 / 3 + 1 / 2) / 2)
        assert (result.count, result.metric) == (4, "accuracy, % (per token)")


def test_of_many_candidates_two_wrong_ones_are_drawn(folder: Path) -> None:
    path = folder / "en.tsv"
    path.write_text(path.read_text() + "Ann was born in <mask>.\tRome\tUlm, Bonn, Rome, Kiel, Jena\tAnn\n")
    drawn, again = (TASKS["bmlama53_of_3"]().open(folder).items for _ in range(2))
    assert drawn == again
    assert [len(item.options) for item in drawn] == [3, 2, 3, 2, 3]
    assert drawn[-1].options[drawn[-1].answer] == ("", "Ann was born in Rome.")
    assert {option for _, option in drawn[-1].options} < {
        f"Ann was born in {town}." for town in ("Ulm", "Bonn", "Rome", "Kiel", "Jena")
    }


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("Ann was born.\tRome\tRome, Ulm\tAnn", "the sentence is to have one gap, <mask>"),
        ("Ann was born in <mask>.\tRom\tRome, Ulm\tAnn", "the answer 'Rom' is not among the candidates"),
        ("Ann was born in <mask>.\tRome", "this line has 2 columns, not 4"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(line: str, what: str, folder: Path) -> None:
    path = folder / "en.tsv"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(BraidError, match=what) as caught:
        TASKS["bmlama17"]().open(folder)
    assert caught.value.where == f"{path}, line 4"


def test_other_files_are_refused(folder: Path) -> None:
    (folder / "fr.tsv").write_text("a\tb\n")
    with pytest.raises(BraidError, match="there is no column 'Prompt'"):
        TASKS["bmlama17"]().open(folder)
    with pytest.raises(BraidError, match=r"nowhere: this file does not exist"):
        TASKS["bmlama17"]().open(folder.parent / "nowhere")
