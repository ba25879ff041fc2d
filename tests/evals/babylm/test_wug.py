"""Made-up words: probabilities and ranks of the definition, near ties of ranks, files that are wrong."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.evals.babylm.wug import MadeUpWords, log_odds, near_ranks, probability_of_first
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.options import pair
from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.statistics import pearson, spearman, spearman_error
from braidlm.evals.tasks import TASKS
from tests.evals.babylm_plain import fast, gpt2, phrase_sum, small_tokenizer

TOKENIZER = small_tokenizer()
MODEL = gpt2(TOKENIZER, 4)


def write_words(place: Path, forms: int, count: int = 40) -> Path:
    rng = random.Random(forms)
    rows = []
    for _ in range(count):
        stem = "".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(2))
        sentences = [f"Make a noun of {stem}able: {stem}{end}" for end in ("ability", "ableness", "abled")[:forms]]
        rows.append({"sentences": "\t".join(sentences), "ratio": rng.random()})
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.mark.parametrize(("task", "forms"), [("wug_adj", 2), ("wug_past", 3)])
@pytest.mark.parametrize("places", [1, 5000])
def test_it_is_the_definition(tmp_path: Path, task: str, forms: int, places: int) -> None:
    place = write_words(tmp_path / "wug.jsonl", forms)
    data = TASKS[task]().open(place)
    found = data.evaluate(task, EvaluatedModel(Scorer(MODEL, tokens_per_pass=places), TOKENIZER))
    rows = [json.loads(line) for line in place.read_text().splitlines()]
    tokenizer, chances, chosen = fast(TOKENIZER), [], []
    for row in rows:
        sums = torch.tensor([phrase_sum(MODEL, tokenizer, s, s) for s in row["sentences"].split("\t")])
        chances.append(float(sums.float().softmax(0)[0]))
        chosen.append(int(sums.argmax()))
    np.testing.assert_allclose(found.items["probability"], chances, rtol=1e-4, atol=1e-7)
    assert found.items["chosen"] == chosen
    stats = pytest.importorskip("scipy.stats", reason="the eval extra is not installed")
    expected = 100 * stats.spearmanr(chances, [row["ratio"] for row in rows])[0]
    assert found.score == pytest.approx(expected, abs=1e-9)
    assert abs(found.score) > 1
    answer = data.predictions(found)[task]["predictions"][3]
    assert answer["id"] == f"{task}_3"
    assert answer["pred"] == rows[3]["sentences"].split("\t")[chosen[3]]
    assert answer["prob"] == found.items["probability"][3]


def test_probabilities_are_rounded_as_the_pipeline_does() -> None:
    assert probability_of_first(np.array([-3.0, -3.0])) == 0.5
    assert probability_of_first(np.array([0.0, -20.0])) == 1.0 == probability_of_first(np.array([0.0, -25.0]))
    assert 0 < probability_of_first(np.array([-60.0, 0.0])) < 1e-25
    assert log_odds(np.array([0.0, 0.0, 0.0])) == pytest.approx(-np.log(2))


def test_near_ranks_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = np.array([-1.0, -2.0, -1.0, -2.0004, -1.0, -3.0, -1.0, -2.0])
    groups = [range(at, at + 2) for at in range(0, 8, 2)]
    assert near_ranks(sums, groups) == [0, 1, 3], "the first and the last are equal, the second lies between"
    scorer = Scorer(MODEL)
    verbs = (("ran", "sat"), ("sat", "ran"), ("did", "was"))
    words = [pair(f"The cat {a}", f"The cat {b}", "one") for a, b in verbs]
    monkeypatch.setattr("braidlm.evals.babylm.wug.NEAR_TIE", 100.0)
    asked: list[Request] = []
    exact = scorer.score_float64
    monkeypatch.setattr(scorer, "score_float64", lambda some: asked.extend(some) or exact(some))
    result = MadeUpWords(words, "0", ratios=np.full(3, 0.5)).evaluate("wug_adj", EvaluatedModel(scorer, TOKENIZER))
    assert len(asked) == 6
    assert result.items["probability"][0] == pytest.approx(1 - result.items["probability"][1], abs=1e-6)


def test_ranks_and_correlations() -> None:
    values, ranks, other_ranks = np.array([3.0, 1.0, 3.0, 2.0]), np.array([3.5, 1.0, 3.5, 2.0]), np.array([4, 1, 2, 3])
    assert spearman(values, other_ranks) == pytest.approx(np.corrcoef(ranks, other_ranks)[0, 1]), "ties share a rank"
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 6, 30), rng.integers(0, 6, 30)
    stats = pytest.importorskip("scipy.stats", reason="the eval extra is not installed")
    assert spearman(one, other) == pytest.approx(stats.spearmanr(one, other)[0])
    assert pearson(one, other) == pytest.approx(np.corrcoef(one, other)[0, 1])
    assert pearson(np.ones(4), np.arange(4)) == 0.0
    assert spearman_error(0.5, 3) is None
    assert spearman_error(0.0, 28) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            {"sentences": "only one", "ratio": 0.5},
            "line 1: 'sentences' is to hold two sentences or more, separated by tabs",
        ),
        ({"sentences": "one\t ", "ratio": 0.5}, "separated by tabs"),
        ({"sentences": "a\tb", "ratio": 1.5}, "'ratio' is to be a share between 0 and 1, not 1.5"),
        ({"sentences": "a\tb", "ratio": "x"}, "'ratio' is to be a number, not \"x\""),
        ({"sentences": "a\tb", "ratio": True}, "'ratio' is to be a number, not true"),
        ({"sentences": "a\tb"}, "there is no 'ratio'. It has: sentences."),
    ],
)
def test_a_malformed_line(tmp_path: Path, line: dict, text: str) -> None:
    place = tmp_path / "wug.jsonl"
    place.write_text(json.dumps(line))
    with pytest.raises(BraidError) as error:
        TASKS["wug_adj"]().open(place)
    assert text in str(error.value)
