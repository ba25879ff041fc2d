"""`braid eval --leaderboard`: the BabyLM leaderboard's file from the command line, evaluation by evaluation."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braidlm.evals.babylm.predictions import CHECKPOINTS, COLLATED, OURS, collate, missing_entries
from braidlm.evals.tasks.task import SUITES
from tests.outcome import Outcome

Verb = Callable[..., Outcome]


def pairs(path: Path, name: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    rows = [{"sentence_good": f"a b{at}", "sentence_bad": f"b{at} a"} for at in range(4)]
    (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def challenge(tmp_path: Path) -> Path:
    """Some of the challenge's data, as it is cloned from OSF; EWoK's items are made up."""
    root = tmp_path / "challenge"
    inside = root / "osfstorage" / "evaluation_data"
    for kind, blimp, ewok in (
        ("full_eval", "blimp_filtered", "ewok_filtered"),
        ("fast_eval", "blimp_fast", "ewok_fast"),
    ):
        pairs(inside / kind / blimp, "agreement")
        row = {"Domain": "made-up", "Context1": "a.", "Target1": "secret b.", "Target2": "secret c."}
        (inside / kind / ewok).mkdir()
        (inside / kind / ewok / "made-up.jsonl").write_text(json.dumps(row) + "\n")
    glue = inside / "full_eval" / "glue_filtered"
    glue.mkdir()
    rows = [{"sentence1": "a b", "sentence2": f"b {at}", "label": at % 2} for at in range(8)]
    for part in ("train", "valid"):
        (glue / f"rte.{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def collated(board: Path) -> dict[str, Any]:
    return json.loads((board / "one" / COLLATED).read_text())


def test_a_finished_model_and_its_checkpoints_come_together(
    eval_verb: Verb, runs: Path, challenge: Path, tmp_path: Path
) -> None:
    board = tmp_path / "submission"
    options = ("--data", challenge, "--leaderboard", board, "--quiet")
    shown = eval_verb(
        runs / "one", "blimp_filtered", "ewok", "glue_rte", *options, "--out", tmp_path / "a", "--finetune-epochs", 1
    )
    assert (shown.code, shown.err) == (0, "")
    assert str(board / "one" / COLLATED) in shown.out
    said = " ".join(shown.out.split())
    assert "it still lacks blimp_supplement, ewok, entity_tracking, wug_adj, wug_past, comps, reading, aoa" in said
    assert "superglue_wsc, 19 checkpoints (chck_1M to chck_100M)" in said
    assert "glue_rte" not in said.partition("it still lacks")[2]
    assert "written only with --ewok-text" in said
    first = collated(board)
    assert set(first) == {"blimp", "glue", "fast_eval_results"}
    answers = first["blimp"]["agreement"]["predictions"]
    assert [answer["id"] for answer in answers] == [f"agreement_{at}" for at in range(4)]
    assert {answer["pred"] for answer in answers} <= {f"a b{at}" for at in range(4)} | {f"b{at} a" for at in range(4)}
    assert [set(answer) for answer in first["glue"]["rte"]["predictions"]] == [{"id", "pred"}] * 8
    assert not [path for path in board.rglob("*") if path.is_file() and "secret" in path.read_text()]

    arguments = (runs / "one", "blimp_fast", "ewok_fast", "--all-checkpoints", *options, "--out", tmp_path / "b")
    shown = eval_verb(*arguments, "--ewok-text")
    assert (shown.code, shown.err) == (0, "")
    second = collated(board)
    assert {key: second[key] for key in ("blimp", "glue")} == {key: first[key] for key in ("blimp", "glue")}
    assert {key: len(scores) for key, scores in second["fast_eval_results"].items()} == {"blimp": 4, "ewok": 4}
    path = board / "one" / "chck_10M" / "zero_shot" / "causal" / "ewok" / "ewok_fast" / "predictions.json"
    assert json.loads(path.read_text())["made-up"]["predictions"][0]["pred"].strip().startswith("secret")


def test_answers_of_another_model_give_way(eval_verb: Verb, runs: Path, challenge: Path, tmp_path: Path) -> None:
    board = tmp_path / "submission"
    options = ("--data", challenge, "--leaderboard", board, "--quiet", "--out", tmp_path / "a")
    assert eval_verb(runs / "one", "blimp_filtered", *options).code == 0
    assert eval_verb(runs / "one", "ewok", "--ewok-text", *options).code == 0
    assert {"blimp", "ewok"} <= set(collated(board)), "evaluations of one model add up"
    last = runs / "one" / "checkpoints" / "chck_30M"
    shutil.rmtree(last)
    shutil.copytree(runs / "two" / "checkpoints" / "chck_30M", last)
    assert eval_verb(runs / "one", "ewok", "--ewok-text", *options).code == 0
    assert "blimp" not in collated(board), "what another model of this name answered is gone"
    assert "ewok" in collated(board)


def test_checkpoints_stand_in_the_order_of_training(tmp_path: Path) -> None:
    for words in (10, 2, 100):
        path = tmp_path / f"chck_{words}M" / OURS
        path.parent.mkdir()
        path.write_text(json.dumps({"sha256": "x", "fast_scores": {"blimp": {"all": words}}}))
    assert [scores["all"] for scores in collate(tmp_path)["fast_eval_results"]["blimp"]] == [2, 10, 100]


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (
            ["bits_per_byte", "--leaderboard", "{tmp}/board"],
            [
                "--leaderboard: none of these tasks is for the BabyLM leaderboard: bits_per_byte",
                "Of a finished model it wants babylm_full and glue_babylm.",
            ],
        ),
        (
            ["blimp_filtered", "--all-checkpoints", "--leaderboard", "{tmp}/board"],
            ["Of the checkpoints of a run it wants babylm_fast and aoa."],
        ),
        (["blimp_filtered", "--ewok-text"], ["--ewok-text: this is of use only with --leaderboard"]),
        (["blimp_filtered", "--leaderboard", "{tmp}/file"], ["{tmp}/file: this is not a folder"]),
    ],
)
def test_what_people_get_wrong(
    eval_verb: Verb, runs: Path, tmp_path: Path, arguments: list[str], texts: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    shown = eval_verb(runs / "one", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert (shown.code, shown.out) == (2, "")
    for text in texts:
        assert text.format(tmp=tmp_path) in shown.err
    assert not (tmp_path / "board").exists()


def aoa_rows(counts: dict[str, int]) -> dict[str, Any]:
    return {"aoa": {"results": [{"step": step} for step, count in counts.items() for _ in range(count)]}, "glue": {}}


@pytest.mark.parametrize(
    ("rows", "complete"),
    [(8005, True), (6560, False), (0, False)],
    ids=["all contexts", "those of words with 20, as it was once", "a checkpoint is missing"],
)
def test_age_of_acquisition_is_counted_as_the_collation_counts_it(tmp_path: Path, rows: int, complete: bool) -> None:
    counts = {**dict.fromkeys(CHECKPOINTS, 8005), "chck_7M": rows}
    assert ("aoa" not in missing_entries(tmp_path, aoa_rows(counts))) == complete


def test_what_is_missing_is_named_as_tasks_are(tmp_path: Path) -> None:
    tasks = [name for name in missing_entries(tmp_path, {"glue": {}}) if not name.startswith("checkpoint ")]
    assert sorted(tasks) == sorted([*SUITES["babylm_full"], *SUITES["glue_babylm"], "aoa"])
