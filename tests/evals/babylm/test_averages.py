"""The BabyLM suites: their tasks, averages, and answers from which the pipeline's own sums give our scores."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import braidlm
from braidlm.core.errors import BraidError
from braidlm.evals.babylm.averages import babylm_average, babylm_averages
from braidlm.evals.babylm.predictions import COLLATED, write_babylm_results
from braidlm.evals.babylm.reading import EYE_TRACKING, SELF_PACED
from braidlm.evals.evaluate import evaluate
from braidlm.evals.results import Evaluation, ModelResults, Part, TaskResult
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.task import SUITES, expand


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def babylm(tmp_path: Path) -> Path:
    """A little of everything, laid out as the challenge does."""
    rng, root = random.Random(0), tmp_path / "challenge"

    def text(least: int = 3) -> str:
        return "".join(rng.choice("abcdef ") for _ in range(rng.randint(least, 9))).strip() + "."

    for kind, blimp, supplement, boxes, ewok in (
        ("full_eval", "blimp_filtered", "supplement_filtered", "entity_tracking", "ewok_filtered"),
        ("fast_eval", "blimp_fast", "supplement_fast", "entity_tracking_fast", "ewok_fast"),
    ):
        folder = root / "evaluation_data" / kind
        for name in ("agreement", "binding"):
            pairs = [{"sentence_good": text(), "sentence_bad": text(), "field": "x", "UID": name} for _ in range(6)]
            lines(folder / blimp / f"{name}.jsonl", pairs)
        lines(
            folder / supplement / "turn_taking.jsonl",
            [{"sentence_good": text(), "sentence_bad": text()} for _ in "abcd"],
        )
        items = [{"numops": at % 2, "input_prefix": f"{text()} ", "options": [text(), text()]} for at in range(8)]
        lines(folder / boxes / "regular.jsonl", items)
        situations = [
            {"Domain": "made-up", "Context1": text(), "Target1": f"so {text()}", "Target2": f"so {text()}"}
            for _ in range(5)
        ]
        lines(folder / ewok / "made-up.jsonl", situations)
        words = [{"sentences": f"{text()}\t{text()}", "ratio": rng.random()} for _ in range(9)]
        lines(folder / "wug_adj_nominalization" / "wug_adj_nominalization.jsonl", words)
        lines(folder / "wug_past_tense" / "wug_past_tense.jsonl", words[:6])
        names = ["item", "word", "sent_id", "context_length", "Subtlex_log10", "length", "prev_item", "prev_word"]
        table = [[*names, "prev_length", *EYE_TRACKING, SELF_PACED]]
        for at in range(40):
            known = [
                "cab",
                rng.choice(("ace", "bed", "face")),
                at // 4,
                at % 4,
                rng.random(),
                rng.randint(2, 6),
                "a",
                "bad",
            ]
            table.append([*known, rng.randint(2, 6), *(rng.gauss(200, 30) for _ in range(5))])
        (folder / "reading").mkdir()
        (folder / "reading" / "reading_data.csv").write_text("\n".join(",".join(map(str, row)) for row in table))
    comps = [{"prefix_acceptable": text(), "prefix_unacceptable": text(), "property_phrase": text()} for _ in range(5)]
    lines(root / "evaluation_data" / "full_eval" / "comps" / "comps_base.jsonl", comps)
    return root


def test_suites_hold_tasks_that_exist() -> None:
    assert set(SUITES) >= {"babylm_fast", "babylm_full", "glue_babylm"}
    for name, tasks in SUITES.items():
        assert name not in TASKS
        assert not [task for task in tasks if task not in TASKS]
    names = expand(["reading", "babylm_fast", "nonsense", "blimp_fast"])
    assert names[:3] == ["reading", "blimp_fast", "supplement_fast"]
    assert (len(names), names[-1]) == (8, "nonsense")


def test_a_suite_is_evaluated_and_its_answers_give_the_same_scores_in_the_pipeline(
    runs: Path, babylm: Path, tmp_path: Path
) -> None:
    found = evaluate(runs / "one", "babylm_full", data=babylm, device="cpu", out=tmp_path / "out")
    assert list(found.models[0].tasks) == list(SUITES["babylm_full"])
    written = write_babylm_results(found, tmp_path / "answers", ewok_text=True)
    main = tmp_path / "answers" / "one" / "main" / "zero_shot" / "causal"
    data, scores = babylm / "evaluation_data" / "full_eval", found.models[0].tasks

    def answers(*path: str) -> dict[str, Any]:
        return json.loads(main.joinpath(*path, "predictions.json").read_text())

    def rows(*path: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in data.joinpath(*path).with_suffix(".jsonl").read_text().splitlines()]

    def share(preds: list[dict[str, Any]], right: list[str]) -> float:
        assert len(preds) == len(right)
        return 100 * np.mean([pred["pred"].strip() == one.strip() for pred, one in zip(preds, right, strict=True)])

    for task, folder in (("blimp_filtered", "blimp_filtered"), ("blimp_supplement", "supplement_filtered")):
        sets = answers("blimp", folder)
        each = [
            share(some["predictions"], [row["sentence_good"] for row in rows(folder, uid)])
            for uid, some in sets.items()
        ]
        assert np.mean(each) == pytest.approx(scores[task].score)
    sets = answers("ewok", "ewok_filtered")
    assert list(sets) == ["made-up"]
    right = [row["Target1"] for row in rows("ewok_filtered", "made-up")]
    assert share(sets["made-up"]["predictions"], right) == pytest.approx(scores["ewok"].score)
    sets, each = answers("entity_tracking", "entity_tracking"), []
    for moves in (0, 1):
        right = [row["options"][0] for row in rows("entity_tracking", "regular") if row["numops"] == moves]
        each.append(share(sets[f"regular_{moves}_ops"]["predictions"], right))
    assert np.mean(each) == pytest.approx(scores["entity_tracking"].score)
    right = [f"{row['prefix_acceptable']} {row['property_phrase']}" for row in rows("comps", "comps_base")]
    assert share(answers("comps", "comps")["base"]["predictions"], right) == pytest.approx(scores["comps"].score)
    stats = pytest.importorskip("scipy.stats", reason="the eval extra is not installed")
    for task, folder in (("wug_adj", "wug_adj_nominalization"), ("wug_past", "wug_past_tense")):
        preds = answers(task, folder)[task]["predictions"]
        people = [row["ratio"] for row in rows(folder, folder)]
        rho = stats.spearmanr([pred["prob"] for pred in preds], people)[0]
        assert 100 * rho == pytest.approx(scores[task].score)
    assert [pred["id"] for pred in answers("reading")["reading"]["predictions"]] == list(range(40))

    collated = json.loads((tmp_path / "answers" / "one" / COLLATED).read_text())
    assert collated["blimp"] == answers("blimp", "blimp_filtered")
    assert set(collated) == {
        *("glue", "fast_eval_results", "blimp", "blimp_supplement", "ewok", "entity_tracking"),
        *("wug_adj", "wug_past", "comps", "reading"),
    }
    assert written.missing["one"] == [
        "aoa",
        *SUITES["glue_babylm"],
        *(f"checkpoint chck_{millions}M" for millions in (*range(1, 10), *range(10, 101, 10))),
    ]
    assert written.collated == [tmp_path / "answers" / "one" / COLLATED]
    facts = json.loads((tmp_path / "out" / "babylm.json").read_text())["one"]
    assert facts["missing"] == [*SUITES["glue_babylm"], "aoa"]
    assert facts["challenge"] == pytest.approx(babylm_averages(found)["one"]["challenge"], abs=0.01)


def test_checkpoints_are_collated_by_their_fast_scores(runs: Path, babylm: Path, tmp_path: Path) -> None:
    names = [*SUITES["babylm_fast"]]
    found = evaluate(runs / "one", names, data=babylm, all_checkpoints=True, device="cpu")
    whole = evaluate(runs / "one", "blimp_filtered", data=babylm, device="cpu")
    write_babylm_results([whole, found], tmp_path)
    collated = json.loads((tmp_path / "one" / COLLATED).read_text())
    fast = collated["fast_eval_results"]
    assert set(fast) == {"blimp", "blimp_supplement", "ewok", "entity_tracking", "wug_adj", "wug_past", "reading"}
    assert {len(scores) for scores in fast.values()} == {4}
    second = found.models[1].tasks
    assert found.models[1].name == "one/chck_2M"
    assert fast["blimp"][1] == {name: part.score / 100 for name, part in second["blimp_fast"].parts.items()}
    assert fast["wug_adj"][1] == {"wug_adj": second["wug_adj"].score / 100}
    assert fast["reading"][1]["rt"] == second["reading"].parts["eye_tracking"].score / 100
    assert fast["reading"][1]["spr"] == second["reading"].parts["self_paced"].score / 100
    assert list(fast["entity_tracking"][1]) == ["regular_0_ops", "regular_1_ops"]
    assert "blimp" in collated, "the finished model's answers are in the same file"
    assert (
        tmp_path / "one" / "chck_2M" / "zero_shot" / "causal" / "blimp" / "blimp_fast" / "predictions.json"
    ).is_file()


def test_the_text_of_ewok_is_not_written_unasked(runs: Path, babylm: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = evaluate(runs / "one", ["ewok", "wug_past"], data=babylm, device="cpu", out=out)
    written = write_babylm_results(found, tmp_path / "answers")
    assert "ewok" in written.missing["one"]
    texts = [path.read_text() for folder in (out, tmp_path / "answers") for path in folder.rglob("*") if path.is_file()]
    assert len(texts) > 4
    targets = (babylm / "evaluation_data" / "full_eval" / "ewok_filtered" / "made-up.jsonl").read_text().splitlines()
    for target in (json.loads(line)["Target1"] for line in targets):
        assert not [text for text in texts if target in text]


def test_data_that_changed_and_answers_that_were_not_kept(runs: Path, babylm: Path, tmp_path: Path) -> None:
    found = evaluate(runs / "one", "wug_past", data=babylm, device="cpu")
    path = babylm / "evaluation_data" / "full_eval" / "wug_past_tense" / "wug_past_tense.jsonl"
    path.write_text(path.read_text().split("\n")[0] + "\n")
    with pytest.raises(BraidError, match="this data is not what was evaluated"):
        write_babylm_results(found, tmp_path)
    found.models[0].tasks["wug_past"].items.clear()
    with pytest.raises(BraidError, match="the answers of 'wug_past' were not kept"):
        write_babylm_results(found, tmp_path)


def test_missing_data_of_a_suite_is_named_at_once(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(BraidError) as error:
        braidlm.eval(runs / "one", "babylm_full", data=tmp_path)
    for name in SUITES["babylm_full"]:
        assert f"{name}: its data is not in {tmp_path}." in str(error.value)
    assert "https://osf.io/ryjfm/" in str(error.value)
    assert "https://huggingface.co/datasets/ewok-core/ewok-core-1.0" in str(error.value)
    assert "There is data for" not in str(error.value)


def test_where_some_data_of_a_suite_is_missing_the_rest_is_named_as_one_would_write_it(
    runs: Path, babylm: Path
) -> None:
    shutil.rmtree(babylm / "evaluation_data" / "full_eval" / "comps")
    with pytest.raises(BraidError, match=r"There is data for blimp_filtered (\w+ )+reading\.") as error:
        braidlm.eval(runs / "one", "babylm_full", data=babylm)
    assert "comps" not in str(error.value).partition("There is data for")[2]


def result(task: str, score: float, parts: dict[str, float] | None = None, **more: Any) -> TaskResult:
    found = {name: Part(value, 1) for name, value in (parts or {}).items()}
    return TaskResult(task, "m", score, 1, None, parts=found, **more)


def test_the_average_is_that_of_published_rows() -> None:
    """GPT-2 and GPT-BERT of the challenge in Table 1 of MoEP; both halves of a joint column are given its value."""
    tasks = ["blimp_filtered", "ewok", "entity_tracking", "wug_adj", "comps", "reading", *SUITES["glue_babylm"]]
    rows = {
        46.60: (61.75, 49.90, 13.90, 30.55, 51.70, 6.50, 52.10, 33.10, 67.60, 57.50, 63.60, 56.10, 61.50),
        54.10: (67.45, 49.50, 34.60, 36.05, 52.80, 6.70, 68.10, 46.90, 74.50, 68.30, 76.70, 56.10, 65.40),
    }
    for printed, scores in rows.items():
        results = {task: result(task, score) for task, score in zip(tasks, scores, strict=True)}
        reading = results["reading"].score
        results["reading"] = result("reading", reading, {"eye_tracking": reading + 1, "self_paced": reading - 1})
        results["blimp_supplement"] = result("blimp_supplement", results["blimp_filtered"].score)
        results["wug_past"] = result("wug_past", results["wug_adj"].score)
        found = babylm_average(results)
        assert found["by_column"] == pytest.approx(printed, abs=0.05)
        assert found["missing"] == ["aoa"]
        assert found["by_column_with_aoa"] is None
        aoa = result("aoa", 11.7)
        with_aoa = babylm_average(results, aoa)
        assert with_aoa["by_column_with_aoa"] == pytest.approx((13 * found["by_column"] + 11.7) / 14, abs=0.02)
        glue = np.mean(scores[6:])
        benchmarks = [*scores[:1] * 2, *scores[1:3], *scores[3:4] * 2, scores[4], reading + 1, reading - 1, glue]
        assert found["challenge"] == pytest.approx(np.mean(benchmarks), abs=0.01)
        assert with_aoa["challenge_with_aoa"] == pytest.approx(np.mean([*benchmarks, 11.7]), abs=0.01)


def test_glue_counts_by_accuracy_and_its_labels_are_written(tmp_path: Path) -> None:
    mrpc = result("glue_mrpc", 80.0, also={"accuracy": 70.0}, items={"mrpc": [1, 0, 1]})
    rte = result("glue_rte", 60.0, items={"rte": [0, 0]})
    model = ModelResults("a/b", "folder", "0", tasks={"glue_mrpc": mrpc, "glue_rte": rte})
    assert babylm_average(model.tasks)["challenge"] == 65.0
    found = Evaluation([model], {}, "float32", {})
    write_babylm_results(found, tmp_path)
    path = tmp_path / "a-b" / "main" / "finetune" / "mrpc" / "predictions.json"
    expected = [{"id": f"mrpc_{at}", "pred": label} for at, label in enumerate((1, 0, 1))]
    assert json.loads(path.read_text()) == {"mrpc": {"predictions": expected}}
    collated = json.loads((tmp_path / "a-b" / COLLATED).read_text())
    assert set(collated["glue"]) == {"mrpc", "rte"}
    assert babylm_averages(found)["a/b"]["scores"] == {"glue_mrpc": 70.0, "glue_rte": 60.0}
    assert not babylm_averages(Evaluation([ModelResults("c", "d", "0", tasks={"blimp": mrpc})], {}, "float32", {}))
    assert babylm_average({})["challenge"] is None
    assert not math.isnan(babylm_average(model.tasks)["by_column"] or math.nan)
