"""What a report says: bold, baselines, averages, breakdowns, hashes and versions, in every form it is written in."""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import braidlm
from braidlm.core.report.page import html
from braidlm.core.report.rendering import csv_text
from braidlm.core.report.rendering import markdown as as_markdown
from braidlm.core.report.report import Strong
from braidlm.evals.babylm.averages import averages, babylm_average
from braidlm.evals.reports.dynamics import dynamics_report, short_report
from braidlm.evals.reports.scores import explanations, long_table, score_table, scores_report, verdict
from braidlm.evals.results import Evaluation, ModelResults, Part, ResultCache, TaskResult
from braidlm.evals.statistics import compare_best
from tests.outcome import Outcome

FACTS = {"description": "What | it is", "metric": "accuracy, %", "licence": "MIT", "version": 3, "count": 1200}
BY = {"field": {"syntax": Part(75.0, 4), "semantics": Part(50.0, 2)}}


def evaluation(scores: dict[str, tuple[float, float]], **more: Any) -> Evaluation:
    """Models with two scores, on two tasks of which one says what guessing gives."""
    models = []
    for name, (first, second) in scores.items():
        known = TaskResult("known", "accuracy, %", first, 1200, 1.0, chance=25.0, also={"per byte": 31.5}, **more)
        other = TaskResult("other", "bits per byte", second, 1200, 0.01, higher_is_better=False)
        models.append(ModelResults(name, f"folder/{name}", name * 64, tasks={"known": known, "other": other}))
    tasks = {name: {**FACTS, "data": "d", "sha256": name[0] * 64} for name in ("known", "other")}
    return Evaluation(models, tasks, "float32", {"braidlm": "9.9", "torch": "2"}, verdicts=compare_best(models))


def markdown(evaluation: Evaluation) -> str:
    return as_markdown(scores_report(evaluation))


def rows(evaluation: Evaluation) -> list[Any]:
    return list(score_table(evaluation).rows)


def test_the_terminal_shows_what_few_tasks_measure_beside_their_scores() -> None:
    found = evaluation({"a": (0.0, 1.5), "b": (1.0, 1.49)})
    assert "| per byte | 31.50 | 31.50 |" in as_markdown(short_report(found))
    third = replace(found, tasks={**found.tasks, "third": found.tasks["other"]})
    for model in third.models:
        model.tasks["third"] = model.tasks["other"]
    assert "per byte" not in as_markdown(short_report(third))


def test_only_what_is_more_than_noise_is_bold() -> None:
    found = evaluation({"a": (60.0, 1.5), "b": (70.0, 1.49), "c": (50.0, 1.6)})
    assert score_table(found).columns == ["task", "items", "baseline", "a", "b", "c"]
    known, other = rows(found)
    assert known == ["known", "1,200", "25.00", "60.00 ± 1.00", "70.00 ± 1.00", "50.00 ± 1.00"]
    assert [isinstance(cell, Strong) for cell in known] == [False] * 4 + [True, False]
    assert not any(isinstance(cell, Strong) for cell in other), "0.01 is less than two errors of the difference"
    text = markdown(found)
    assert "| known | 1,200 | 25.00 | 60.00 ± 1.00 | **70.00 ± 1.00** | 50.00 ± 1.00 |" in text
    assert "| other | 1,200 | - | 1.5000 ± 0.0100 | 1.4900 ± 0.0100 | 1.6000 ± 0.0100 |" in text
    assert "Bold: the best by more than two standard errors of its difference from the next" in text
    assert "Bold" not in markdown(evaluation({"a": (60.0, 1.5), "b": (60.5, 1.5)}))


def test_an_error_that_is_not_known_is_said_in_words() -> None:
    models = [
        ModelResults(name, "f", "0", tasks={"t": TaskResult("t", "m", at, 1, None)}) for at, name in enumerate("ab")
    ]
    said = verdict(Evaluation(models, {"t": {}}, "float32", {}, verdicts=compare_best(models)))
    assert said.startswith("No model of 2 is clearly the best on t (b is ahead by 1 over a, with an error that is not")


def test_markdown_says_what_was_measured_and_with_what() -> None:
    found = evaluation({"a": (60.0, 1.5)})
    found.models[0].paths = ["stories"]
    found.tasks["known"]["settings"] = {"seeds": 3, "rate": None}
    text = markdown(found)
    line = (
        "What \\| it is. Score: accuracy, % with seeds 3; 1,200 items in all; version 3; licence: MIT; "
        "SHA-256 of the data kkk"
    )
    assert f"| `known` | {line}" in text
    assert "| a | stories | `aaaaaaaaaaaa` |" in text, "no column says that nothing was switched off"
    assert "Computed in float32, with braidlm 9.9, torch 2." in text
    assert "baseline: what guessing gives" in text


def test_a_table_counts_the_items_that_were_scored() -> None:
    found = evaluation({"a": (60.0, 1.5)})
    found.models[0].tasks["known"] = replace(found.models[0].tasks["known"], count=15)
    assert [row[1] for row in rows(found)] == ["15", "1,200"]


def test_items_that_are_too_long_are_told() -> None:
    found = evaluation({"a": (60.0, 1.5), "b": (70.0, 1.4)}, notes={"shortened": 21, "in windows": 0})
    said = "known: of 1,200 items some are longer than the context: 21 read without their beginning"
    assert explanations(found)[2:] == [f"{said}."]
    assert f"\n{said}.\n" in markdown(found)
    other = found.models[1].tasks
    other["known"] = replace(other["known"], notes={"shortened": 0, "in windows": 1_100})
    windows = "known: of 1,200 items some are longer than the context: 1,100 scored in windows (b)."
    assert explanations(found)[2:] == [f"{said} (a).", windows]
    assert len(explanations(evaluation({"a": (60.0, 1.5)}))) == 1


def test_a_task_of_few_parts_has_a_row_for_each() -> None:
    found = evaluation({"a": (60.0, 1.5), "b": (70.0, 1.4)}, parts={"stories": Part(0.3, 7), "maths": Part(12.0, 5)})
    assert [row[0] for row in rows(found)] == ["known", "- stories", "- maths", "other"]
    assert rows(found)[1:3] == [
        ["- stories", "7", "", "0.3000", "0.3000"],
        ["- maths", "5", "", "12.00", "12.00"],
    ]
    one = evaluation({"a": (60.0, 1.5)}, parts={"all of it": Part(60.0, 1200)})
    many = evaluation({"a": (60.0, 1.5)}, parts={str(number): Part(60.0, 9) for number in range(7)})
    assert len(rows(one)) == len(rows(many)) == 2, "the one part is the whole; many are on the page"


def test_csv_has_everything_in_long_form() -> None:
    found = evaluation({"a": (60.0, 1.5), "b": (70.0, 1.4)}, parts={"easy": Part(90.0, 7)}, by=BY)
    lines = list(csv.DictReader(io.StringIO(csv_text(long_table(found)))))
    mine = [line for line in lines if line["model"] == "b" and line["task"] == "known"]
    assert [(line["part"], line["measure"], line["score"], line["count"]) for line in mine] == [
        ("all", "accuracy, %", "70", "1200"),
        ("easy", "accuracy, %", "90", "7"),
        ("field: syntax", "accuracy, %", "75", "4"),
        ("field: semantics", "accuracy, %", "50", "2"),
        ("all", "per byte", "31.5", "1200"),
    ]
    whole = mine[0]
    assert (whole["baseline"], whole["standard_error"], whole["clearly_best"], whole["version"]) == (
        "25",
        "1",
        "yes",
        "3",
    )
    assert (whole["data_sha256"], whole["model_sha256"]) == ("k" * 64, "b" * 64)
    assert not any(line["clearly_best"] for line in lines if line["model"] == "a")


def test_the_page_shows_the_same() -> None:
    found = evaluation({"a": (60.0, 1.5), "<b>": (70.0, 1.49)}, parts={name: Part(1.0, 1) for name in "tuvwxyz"}, by=BY)
    page = html(scores_report(found))
    assert '<td class="number"><strong>70.00 ± 1.00</strong></td>' in page
    assert page.count("<strong>") == 1
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    for text in ("<code>known</code> by field", "Parts of <code>known</code>", "by other measures", "kkkkkkkkkkkk"):
        assert text in page
    assert "Computed in float32, with braidlm 9.9, torch 2." in page
    assert "10.0</td>" in page, "the difference of `known`, to the digits of its error"
    assert '<td class="number">1.4</td>' in page
    assert '<td class="number">0.010</td>' in page, "that of `other`, whose error is 0.014"


def test_the_best_checkpoint_is_bold_only_where_it_is_clear() -> None:
    found = evaluation({"run/a": (60.0, 1.5), "run/b": (61.0, 1.3), "run/c": (61.5, 1.2)})
    for at, model in enumerate(found.models):
        model.run, model.words, model.folder = "run", at + 1, model.name.replace("run", "checkpoints")
    page = html(dynamics_report(found))
    assert page.count("<strong>") == 1
    assert "<strong>1.2000 ± 0.0100</strong>" in page
    assert '<td class="number">61.50 ± 1.00</td>' in page, "half a point is noise"
    assert "<td>baseline</td>" in page
    for text in ("What | it is. Score: accuracy, %", "kkkkkkkkkkkk", "Computed in float32, with braidlm 9.9, torch 2."):
        assert text in page


def test_scores_of_whole_runs_are_shown() -> None:
    found = evaluation({"run/a": (60.0, 1.5), "run/b": (70.0, 1.4)})
    for at, model in enumerate(found.models):
        model.run, model.words = "run", at + 1
    found.tasks["aoa"] = {**FACTS, "data": "d", "sha256": "a" * 64}
    for model in found.models:
        model.tasks["aoa"] = TaskResult("aoa", "surprisal", 5.0, 3, None)
    found.over_runs = {"run": {"aoa": TaskResult("aoa", "Pearson", 33.0, 3, 4.0)}}
    assert "| run | aoa |\n| --- | --- |\n| run | 33.00 ± 4.00 |" in markdown(found)
    assert score_table(found).columns == ["model", "words", "known (1,200)", "other (1,200)", "aoa (3)"]
    last = list(csv.DictReader(io.StringIO(csv_text(long_table(found)))))[-1]
    assert (last["model"], last["run"], last["score"]) == ("", "run", "33")


BENCHMARKS = ("blimp_fast", "supplement_fast", "ewok_fast", "entity_tracking_fast", "wug_adj", "wug_past")


def babylm(score: float) -> dict[str, TaskResult]:
    results = {name: TaskResult(name, "m", score, 10, 1.0) for name in BENCHMARKS}
    parts = {"eye_tracking": Part(score, 10), "self_paced": Part(score, 10)}
    return results | {"reading": TaskResult("reading", "m", score, 10, 1.0, parts=parts)}


def test_averages_stand_under_a_whole_suite_and_only_there() -> None:
    models = [ModelResults(name, "", "", tasks=babylm(score)) for name, score in (("a", 40.0), ("b", 50.0))]
    tasks = {name: {**FACTS, "data": "", "sha256": ""} for name in models[0].tasks}
    found = Evaluation(models, tasks, "float32", {}, averages={m.name: babylm_average(m.tasks) for m in models})
    assert rows(found)[-2:] == [
        ["BabyLM average", "", "", "40.00", "50.00"],
        ["BabyLM average by column", "", "", "40.00", "50.00"],
    ]
    assert "without GLUE, comps." in markdown(found), "what is missing is said"
    for model in models:
        del model.tasks["ewok_fast"]
    found.averages = {model.name: babylm_average(model.tasks) for model in models}
    assert averages(found) == []


@pytest.fixture
def sorted_pairs(tmp_path: Path) -> Path:
    """Two sets of one phenomenon and one of another, in the form of BLiMP's files."""
    of = {"u": ("syntax", "islands"), "v": ("syntax", "islands"), "w": ("semantics", "npi")}
    for name, (field, term) in of.items():
        row = {"UID": name, "field": field, "linguistics_term": term}
        pairs = [{"sentence_good": f"{name} ab{at}", "sentence_bad": f"{name} ba{at}", **row} for at in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return tmp_path


def test_blimp_by_field_and_phenomenon(runs: Path, sorted_pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options: dict[str, Any] = {"data_of": {"blimp": sorted_pairs}, "out": out, "device": "cpu"}
    found = braidlm.eval(runs / "one", "blimp", **options)
    result = found.of("one").tasks["blimp"]
    hits = [option == 0 for option in result.items["chosen"]]
    assert result.by["phenomenon"] == {
        "islands": Part(100 * sum(hits[:6]) / 6, 6),
        "npi": Part(100 * sum(hits[6:]) / 3, 3),
    }
    assert list(result.by["field"]) == ["semantics", "syntax"]
    assert "### `blimp` by phenomenon" in (out / "results.md").read_text()
    again = braidlm.eval(runs / "one", "blimp", **options)
    assert again.of("one").tasks["blimp"] == result, "and comes back from what was kept"
    with open(sorted_pairs / "w.jsonl", "a") as file:
        file.write('{"sentence_good": "a", "sentence_bad": "b"}\n')
    mixed = braidlm.eval(runs / "one", "blimp", **options)
    assert mixed.of("one").tasks["blimp"].by == {}, "not where some pairs do not say"


def test_results_kept_by_older_versions_are_read(tmp_path: Path) -> None:
    kept, facts = ResultCache(tmp_path), {"task": "t"}
    kept.write(facts, TaskResult("t", "m", 1.0, 1, None))
    path = next(kept.folder.iterdir())
    older = json.loads(path.read_text())
    del older["result"]["by"]
    path.write_text(json.dumps(older))
    assert kept.find(facts) == TaskResult("t", "m", 1.0, 1, None)


def test_two_models_end_to_end(eval_verb: Callable[..., Outcome], runs: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = eval_verb(
        runs / "one", runs / "two", "blimp_fast", "bits_per_byte", "--data", data, "--out", out, "--quiet"
    )
    assert (shown.code, shown.err) == (0, "")
    facts = json.loads((out / "results.json").read_text())
    verdict = facts["verdicts"]["blimp_fast"]
    assert verdict["paired"]
    assert {verdict["best"], verdict["next"]} == {"one", "two"}
    assert ("* the best by more than" in shown.out) == any(v["clear"] for v in facts["verdicts"].values())
    assert all("items" not in result for model in facts["models"] for result in model["tasks"].values())
    assert "Differences" in (out / "results.html").read_text()


def test_many_models_have_a_row_each() -> None:
    parts = {"first.txt": Part(1.25, 4), "second.txt": Part(12.5, 2)}
    found = evaluation({name: (60.0 + at, 1.5) for at, name in enumerate("abcd")}, parts=parts)
    table = score_table(found)
    assert table.columns == ["model", "known (1,200)", "other (1,200)", "known, first.txt", "known, second.txt"]
    assert table.rows[1] == ["b", "61.00 ± 1.00", "1.5000 ± 0.0100", "1.2500", "12.50"]
    assert [row[0] for row in table.rows] == ["a", "b", "c", "d", "baseline"]
    assert table.rows[-1][1:] == ["25.00", "-", "", ""]
