"""Reading times: surprisals and gains of the definition, the trap of the space, spreads, files that are wrong."""

import csv
import math
import random
from pathlib import Path

import numpy as np
import pytest

from braidlm.core.errors import BraidError
from braidlm.evals import statistics
from braidlm.evals.babylm.reading import EYE_TRACKING, SELF_PACED, read_reading_times
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.scoring.scorer import Scorer
from tests.evals.babylm_plain import explained, fast, gpt2, small_tokenizer, word_chance

TOKENIZER = small_tokenizer()
MODEL = gpt2(TOKENIZER, 2)
WORDS = ("cat", "dog", "contains", "noun", "blickability", "home", "the", "nothing", "there")
NAMES = [
    "item",
    "word",
    "sent_id",
    "context_length",
    "Subtlex_log10",
    "length",
    "prev_item",
    "prev_word",
    "prev_length",
]


def write_times(path: Path, sentences: int = 12) -> list[dict[str, str]]:
    """A table as the published one: a row for each word but a sentence's first."""
    rng = random.Random(0)
    rows = []
    for sentence in range(sentences):
        first = "None" if sentence == 3 else "The"
        words = [first, *(rng.choice(WORDS) for _ in range(6))]
        for at in range(1, len(words)):
            times = {name: f"{rng.gauss(200, 40):.4f}" for name in (*EYE_TRACKING, SELF_PACED)}
            row = {
                "item": " ".join(words[:at]),
                "word": words[at],
                "sent_id": str(sentence),
                "context_length": str(at),
                "Subtlex_log10": "" if rng.random() < 0.05 else f"{rng.uniform(4, 14):.4f}",
                "length": str(len(words[at])),
                "prev_item": " ".join(words[: at - 1]),
                "prev_word": words[at - 1] if at > 1 else "",
                "prev_length": str(len(words[at - 1]) if at > 1 else -1),
                **times,
            }
            if row["item"] == "None":
                row["item"] = ""  # as the published table has it
            rows.append(row)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["", *NAMES, *EYE_TRACKING, SELF_PACED])
        writer.writeheader()
        writer.writerows({"": str(at), **row} for at, row in enumerate(rows))
    return rows


def test_it_is_the_definition(tmp_path: Path) -> None:
    rows = write_times(tmp_path / "reading_data.csv")
    data = read_reading_times(tmp_path)
    found = data.evaluate("reading", EvaluatedModel(Scorer(MODEL), TOKENIZER))
    tokenizer = fast(TOKENIZER)
    surprisal = np.array([-math.log(word_chance(MODEL, tokenizer, row["item"] or "None", row["word"])) for row in rows])
    before = np.array(
        [
            -math.log(word_chance(MODEL, tokenizer, row["prev_item"], row["prev_word"]))
            if row["prev_item"] not in ("", "None")
            else math.nan
            for row in rows
        ]
    )
    np.testing.assert_allclose(found.items["surprisal"], surprisal, atol=1e-4)
    np.testing.assert_allclose([math.nan if x is None else x for x in found.items["before"]], before, atol=1e-4)
    assert len({len(TOKENIZER.encode(word)) for word in WORDS}) > 2, "some words have several pieces"

    table = {name: np.array([float(row[name] or "nan") for row in rows]) for name in (*EYE_TRACKING, SELF_PACED)}
    table |= {name: np.array([float(row[name] or "nan") for row in rows]) for name in NAMES[3:6]}
    table |= {"prev_length": np.array([float(row["prev_length"]) for row in rows]), "before": before}

    def percent(target: str, names: list[str]) -> float:
        use = ~np.isnan(np.column_stack([table[name] for name in (target, *names)])).any(1)
        columns = [table[name][use] for name in names]
        columns += [columns[i] * columns[j] for i in range(len(names)) for j in range(i + 1, len(names))]
        base = explained(columns, table[target][use])
        more = explained([*columns, surprisal[use]], table[target][use])
        return 100 * (more - base) / (1 - base)

    frequency, length, position = "Subtlex_log10", "length", "context_length"
    gains = {name: percent(name, [frequency, length, position]) for name in EYE_TRACKING}
    paced = percent(SELF_PACED, [frequency, length, position, "prev_length", "before"])
    for name, value in gains.items():
        assert found.parts[name].score == pytest.approx(value, abs=1e-3)
    assert found.parts["eye_tracking"].score == pytest.approx(np.mean(list(gains.values())), abs=1e-3)
    assert found.parts["self_paced"].score == pytest.approx(paced, abs=1e-3)
    assert found.score == pytest.approx((np.mean(list(gains.values())) + paced) / 2, abs=1e-3)
    assert found.parts["self_paced"].score > 0.01
    assert found.count == len(rows)


def test_scores_do_not_depend_on_what_runs_together(tmp_path: Path) -> None:
    write_times(tmp_path / "reading_data.csv", 5)
    data = read_reading_times(tmp_path / "reading_data.csv")
    scorers = [Scorer(MODEL, tokens_per_pass=1, share=False), Scorer(MODEL, tokens_per_pass=64), Scorer(MODEL)]
    scores = [data.evaluate("reading", EvaluatedModel(scorer, TOKENIZER)).score for scorer in scorers]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3) == pytest.approx(scores[2], abs=1e-3)


def test_words_with_their_space_stand_beside(tmp_path: Path) -> None:
    rows = write_times(tmp_path / "reading_data.csv", 6)
    data = read_reading_times(tmp_path)
    model = EvaluatedModel(Scorer(MODEL), TOKENIZER)
    found = data.evaluate("reading", model)
    assert sorted(found.also) == ["eye tracking, words with their space", "self-paced, words with their space"]
    spaced, _ = data.surprisals(model, space=" ")
    tokenizer = fast(TOKENIZER)
    expected = [-math.log(word_chance(MODEL, tokenizer, row["item"] or "None", " " + row["word"])) for row in rows]
    np.testing.assert_allclose(spaced, expected, atol=1e-4)
    assert np.abs(spaced - found.items["surprisal"]).max() > 0.1


def test_answers_as_the_pipeline_writes_them(tmp_path: Path) -> None:
    write_times(tmp_path / "reading_data.csv", 5)
    data = read_reading_times(tmp_path)
    result = data.evaluate("reading", EvaluatedModel(Scorer(MODEL), TOKENIZER))
    answers = data.predictions(result)["reading"]["predictions"]
    assert [answer["id"] for answer in answers] == list(range(30))
    assert math.isnan(answers[0]["prev_pred"]), "a sentence's first word has no surprisal"
    assert answers[2] == {"id": 2, "pred": result.items["surprisal"][2], "prev_pred": result.items["before"][2]}
    # After "None" too: the pipeline's reader of tables takes it for nothing.
    assert [at for at, answer in enumerate(answers) if math.isnan(answer["prev_pred"])] == [0, 6, 12, 18, 19, 24]


def test_spread_over_sentences() -> None:
    groups = np.repeat(np.arange(10), 2)
    values = np.repeat(np.random.default_rng(0).normal(size=10), 2)
    error = statistics.jackknife_error({"x": values}, groups, lambda table: float(table["x"].mean()))
    assert error == pytest.approx(values[::2].std(ddof=1) / 10**0.5)
    assert statistics.jackknife_error({"x": values}, np.zeros(20), lambda table: 0.0) is None


def test_tables_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "reading_data.csv"
    write_times(path, 2)
    text = path.read_text()
    path.write_text(text.replace("RTgopast", "RTgoPast"))
    with pytest.raises(BraidError, match=r"there is no column 'RTgopast'\. Did you mean 'RTgoPast'\?"):
        read_reading_times(tmp_path)
    lines = text.split("\n")
    cells = lines[2].split(",")
    path.write_text("\n".join([*lines[:2], ",".join([*cells[:-1], "slow\r"]), *lines[3:]]))
    with pytest.raises(
        BraidError, match=r"reading_data\.csv, line 3: 'self_paced_reading_time' is to be a number, not 'slow'"
    ):
        read_reading_times(tmp_path)
    path.write_text(lines[0])
    with pytest.raises(BraidError, match="the file is empty"):
        read_reading_times(tmp_path)
    (tmp_path / "other.csv").write_text("x")
    with pytest.raises(BraidError, match=r"there are 2 \.csv files here"):
        read_reading_times(tmp_path)
    with pytest.raises(BraidError, match=r"nowhere: this file does not exist"):
        read_reading_times(tmp_path / "nowhere")
