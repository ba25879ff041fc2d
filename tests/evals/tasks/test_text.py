"""WikiText by pages: usual spelling, every token once, and the words and bytes of the text as it was."""

import math
import re
from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.scoring.requests import sliding_windows
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.text import detokenized, pages_of
from tests.evals.choice_samples import HUB_ROWS
from tests.evals.plain_scorer import plain_tokens
from tests.tiny_models import tiny_model

TOKENIZER = bytes_tokenizer()
CONTEXT = 24
PAGES = [row["page"] for row in HUB_ROWS["wikitext2"]]


def test_windows_predict_every_token_once_from_as_much_as_there_is() -> None:
    tokens = list(range(100, 110))
    found = sliding_windows(tokens, 0, 4)
    assert [(list(request.ids), request.first) for request in found] == [
        ([0, 100, 101, 102, 103], 1),
        ([103, 104, 105, 106, 107], 1),
        ([105, 106, 107, 108, 109], 3),
    ]
    assert [list(request.ids) for request in sliding_windows(tokens[:4], 0, 4)] == [[0, 100, 101, 102, 103]]
    assert sliding_windows([], 0, 4) == []


def test_pages_begin_with_a_heading_of_the_first_level() -> None:
    text = " \n" + "".join(PAGES)
    pages = pages_of(text)
    assert len(pages) == 2
    assert pages[0].startswith(" = Cats = ")
    assert "= = Food = =" in pages[0]
    assert "".join(page.strip() for page in pages) == "".join(page.strip() for page in PAGES)


def test_the_usual_spelling() -> None:
    assert detokenized(PAGES[0]) == (
        ' = Cats =\n\nCats sleep (a lot), 1,000 hours. The cat\'s "bed" is soft-ish.\n\n== Food ==\n\n'
        "They eat [fish]; always!\n"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test.txt").write_text("".join(PAGES))
    (tmp_path / "valid.txt").write_text(PAGES[1])
    return tmp_path


def evaluated() -> EvaluatedModel:
    return EvaluatedModel(Scorer(tiny_model(vocab_size=TOKENIZER.vocab_size, context=CONTEXT)), TOKENIZER)


def plain_page(model: EvaluatedModel, page: str) -> float:
    """Token by token: in windows of the context, the last one moved back."""
    tokens = list(detokenized(page).encode())
    total, done = 0.0, 0
    while done < len(tokens):
        end = min(done + CONTEXT, len(tokens))
        begin = max(0, end - CONTEXT) if done else 0
        before = tokens[begin - 1] if begin else TOKENIZER.bos_id
        assert before is not None
        scores = plain_tokens(model.model, [before, *tokens[begin:end]])
        total += sum(scores[done - begin :])
        done = end
    return total


def test_bits_per_byte_and_perplexity_per_word_of_the_original(folder: Path) -> None:
    model = evaluated()
    data = TASKS["wikitext2"]().open(folder)
    pages = data.splits["test"]
    sums = [plain_page(model, page) for page in pages]
    size = sum(len(page.encode()) for page in pages)
    result = data.evaluate("wikitext2", model)
    assert result.score == pytest.approx(-sum(sums) / math.log(2) / size, abs=1e-5)
    words = sum(len(re.split(r"\s+", page)) for page in pages)
    assert result.also["perplexity per word, test"] == pytest.approx(math.exp(-sum(sums) / words), rel=1e-4)
    assert result.parts["valid"].score == pytest.approx(
        -plain_page(model, PAGES[1]) / math.log(2) / len(PAGES[1].encode()), abs=1e-5
    )
    assert {name: part.count for name, part in result.parts.items()} == {"test": 2, "valid": 1}
    assert (result.higher_is_better, result.count) == (False, 3)
    assert result.standard_error is not None
    assert result.metric == "bits per byte (test)"


def test_rows_of_pages_and_what_is_missing(folder: Path, tmp_path: Path) -> None:
    import json

    rows = tmp_path / "rows" / "validation.jsonl"
    rows.parent.mkdir()
    rows.write_text("".join(json.dumps(row) + "\n" for row in HUB_ROWS["wikitext2"]))
    data = TASKS["wikitext2"]().open(rows.parent)
    assert data.splits == {"valid": PAGES}
    (tmp_path / "empty").mkdir()
    with pytest.raises(BraidError, match=r"there is no test\.txt and no valid\.txt here"):
        TASKS["wikitext2"]().open(tmp_path / "empty")
