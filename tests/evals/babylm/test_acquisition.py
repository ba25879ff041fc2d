"""Age of acquisition: surprisals and ages of the definition, whole runs, what is refused at once."""

import csv
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import braidlm
from braidlm.core.errors import BraidError
from braidlm.evals.babylm.acquisition import AGES, read_acquisition
from braidlm.evals.babylm.curves import sigmoid
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.results import ModelResults, TaskResult
from braidlm.evals.scoring.scorer import Scorer
from tests.evals.babylm_plain import fast, gpt2, phrase_sum, small_tokenizer
from tests.outcome import Outcome

pytest.importorskip("scipy", reason="the eval extra is not installed")
TOKENIZER = small_tokenizer()
MODEL = gpt2(TOKENIZER, 5)
WORDS = ("cat", "dog", "key", "hat", "book", "mat", "noun", "home", "box", "see")


def write_vocabulary(folder: Path, contexts: int = 20) -> Path:
    """Words with contexts, one of them with a single one, one with none, and one that no child knows of."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    some = {word: [{"context": f"The {rng.choice(WORDS)} {at} sat on the"} for at in range(contexts)] for word in WORDS}
    some["rare"] = [{"context": "A"}]
    some["never"] = []
    some["a"] = [{"context": "It is"}] * contexts
    (folder / "cdi_childes.json").write_text(json.dumps(some))
    with open(folder / "cdi_human.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "word", *AGES])
        for at, word in enumerate(WORDS[:-1]):
            shares = sigmoid(np.array(AGES), 1.0, 0.4, 18 + at, 0.0)
            writer.writerow([at, word, *(f"{share:.3f}" for share in shares)])
    return folder


def test_surprisals_are_the_definition(tmp_path: Path) -> None:
    data = read_acquisition(write_vocabulary(tmp_path / "aoa"))
    found = data.evaluate("aoa", EvaluatedModel(Scorer(MODEL), TOKENIZER))
    tokenizer = fast(TOKENIZER)
    facts = json.loads((tmp_path / "aoa" / "cdi_childes.json").read_text())
    expected = [
        -phrase_sum(MODEL, tokenizer, one["context"].strip() + " " + word, word)
        for word in (*WORDS, "rare")
        for one in facts[word]
    ]
    np.testing.assert_allclose(found.items["surprisal"], expected, atol=1e-4)
    assert (found.count, found.notes["words"]) == (201, 11), "words of one letter or without contexts are left out"
    assert found.score == pytest.approx(np.mean(expected), abs=1e-4)
    assert not found.higher_is_better


def learned(after: float, amounts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[amounts, contexts] surprisals of a word that is learned around an amount of training."""
    curve = 12 - sigmoid(np.log10(amounts), 9.0, 6.0, np.log10(after), 0.0)
    return curve[:, None] + rng.normal(0, 0.05, (len(amounts), 20))


def plain_model_age(steps: list[float], surprisals: list[float]) -> float | None:
    """The pipeline's, step by step."""
    from scipy.optimize import curve_fit

    x, y = np.log10(np.array(steps) + 1), -np.array(surprisals)
    threshold = np.log2(300_000) - 0.5 * (np.log2(300_000) - min(surprisals))
    guess = [y.max() - y.min(), 1.0, x.mean(), y.min()]
    (a, b, c, d), _ = curve_fit(lambda x, a, b, c, d: a / (1 + np.exp(-b * (x - c))) + d, x, y, p0=guess, maxfev=1000)
    if b <= 0 or a <= 0 or -threshold <= d or -threshold >= a + d:
        return None
    age = c - np.log(a / (-threshold - d) - 1) / b
    return None if not steps[0] <= 10**age - 1 <= steps[-1] else age


def test_a_run_is_judged_as_the_definition_says(tmp_path: Path) -> None:
    data = read_acquisition(write_vocabulary(tmp_path / "aoa"))
    names = ["chck_10M", "chck_1M", "chck_100M", "chck_3M", "chck_30M", "chck_2M"]
    amounts = np.array([1e6, 2e6, 3e6, 1e7, 3e7, 1e8])
    rng = np.random.default_rng(0)
    after = [2e6, 4e6, 3e6, 8e6, 6e6, 1.5e7, 1e7, 3e7, 2e7, 5e6]
    values = np.stack([learned(each, amounts, rng) for each in after])  # [words, amounts, contexts]
    rare = learned(5e6, amounts, rng)[:, :1]
    checkpoints = []
    for name in names:
        at = int(np.flatnonzero(amounts == int(name[5:-1]) * 1e6)[0])
        surprisals = [*values[:, at].reshape(-1).tolist(), *rare[at].tolist()]
        result = TaskResult("aoa", "nats", 1.0, 201, None, items={"surprisal": surprisals})
        checkpoints.append(ModelResults(f"run/{name}", f"run/{name}", "0", "run", words=7, tasks={"aoa": result}))
    found = data.score_run("aoa", checkpoints)

    ages = {}
    for at, word in enumerate(WORDS[:-1]):
        steps = [float(amount) for amount in amounts for _ in range(20)]
        age = plain_model_age(steps, values[at].reshape(-1).tolist())
        if age is not None:
            ages[word] = (age, 18 + at)  # half of the children know it in the middle of its curve
    assert found.items["word"] == list(ages)
    assert len(ages) > 5
    assert found.items["log10 of words of training"] == pytest.approx([age for age, _ in ages.values()], abs=1e-6)
    assert found.items["month"] == pytest.approx([month for _, month in ages.values()], abs=0.02)
    assert found.score == pytest.approx(100 * np.corrcoef(np.array(list(ages.values())).T)[0, 1], abs=0.1)
    assert found.score > 50
    assert (found.count, found.notes["checkpoints"]) == (len(ages), 6)

    records = data.records("aoa", checkpoints)
    assert len(records) == 6 * 201
    assert [record["target_word"] for record in records[200:202]] == ["rare", "cat"]
    assert records[201] == {
        "step": "chck_2M",
        "word_count": 2_000_000,
        "target_word": "cat",
        "context_id": 0,
        "context": data.contexts["cat"][0],
        "surprisal": values[0, 1, 0],
    }


@pytest.fixture
def vocabulary(data: Path) -> Path:
    write_vocabulary(data / "babylm-2025" / "full_eval" / "aoa")
    return data


def test_the_verb_judges_runs_and_scores_new_checkpoints_only(
    runs: Path, vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    last = shutil.move(runs / "one" / "checkpoints" / "chck_30M", tmp_path / "later")
    options: dict[str, Any] = {"data": vocabulary, "all_checkpoints": True, "out": out, "device": "cpu"}
    with pytest.raises(BraidError, match="one: 'aoa' needs 4 checkpoints or more, and there are 3"):
        braidlm.eval(runs / "one", "aoa", **options)
    shutil.move(last, runs / "one" / "checkpoints" / "chck_30M")
    first = braidlm.eval(runs / "one", "aoa", **options)
    score = first.over_runs["one"]["aoa"]
    assert score.count <= 9
    assert [model.tasks["aoa"].notes["words"] for model in first.models] == [11] * 4
    facts = json.loads((out / "results.json").read_text())
    assert facts["over_runs"]["one"]["aoa"]["score"] == score.score
    assert "items" not in facts["models"][0]["tasks"]["aoa"], "answers are kept, and do not fill the results"
    monkeypatch.setattr(Scorer, "score_trees", lambda *_: pytest.fail("everything was scored before"))
    again = braidlm.eval(runs / "one", "aoa", **options)
    assert again.over_runs["one"]["aoa"] == score


def test_single_models_and_unnamed_amounts_are_refused_at_once(
    runs: Path, vocabulary: Path, eval_verb: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scorer, "score_trees", lambda *_: pytest.fail("something was scored"))
    shown = eval_verb(runs / "one", "aoa", "--data", vocabulary, "--device", "cpu")
    assert shown.code == 2
    assert "'aoa' judges a run by all of its checkpoints" in shown.err
    assert "--all-checkpoints" in shown.err
    folder = runs / "one" / "checkpoints"
    (folder / "chck_1M").rename(folder / "early")
    lineage = json.loads((folder / "early" / "lineage.json").read_text())
    del lineage["training"]["words"]
    (folder / "early" / "lineage.json").write_text(json.dumps(lineage))
    with pytest.raises(BraidError, match="early: this checkpoint does not say on how many words it was trained"):
        braidlm.eval(runs / "one", "aoa", data=vocabulary, all_checkpoints=True, device="cpu")


def test_folders_that_are_wrong(tmp_path: Path) -> None:
    folder = write_vocabulary(tmp_path / "aoa")
    table = (folder / "cdi_human.csv").read_text()
    (folder / "cdi_human.csv").write_text(table.replace(",16,", ",month,", 1))
    with pytest.raises(BraidError, match=r"cdi_human\.csv: there is no column '16'"):
        read_acquisition(folder)
    lines = table.split("\n")
    lines[2] = lines[2].replace("0.", "O.", 1)
    (folder / "cdi_human.csv").write_text("\n".join(lines))
    with pytest.raises(BraidError, match=r"cdi_human\.csv, line 3: a share is not a number"):
        read_acquisition(folder)
    (folder / "cdi_human.csv").write_text(table.replace("cat", "tac").split("\n")[0] + "\n")
    with pytest.raises(BraidError, match="have no word in common"):
        read_acquisition(folder)
    (folder / "cdi_childes.json").write_text('{"cat": ["x"]}')
    with pytest.raises(BraidError, match="the contexts of 'cat' cannot be read"):
        read_acquisition(folder)
    (folder / "cdi_childes.json").write_text('{"cat": []}')
    with pytest.raises(BraidError, match="no word has a context"):
        read_acquisition(folder)
    (folder / "cdi_childes.json").unlink()
    with pytest.raises(BraidError, match=r"there is no cdi_childes\.json here"):
        read_acquisition(folder)
