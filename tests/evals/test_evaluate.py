"""`braid eval` end to end: tables, files, resuming, learning dynamics, and what people get wrong."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

import braidlm
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.evals import evaluate as module
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.formats.options import read_pairs
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.tasks import TASKS
from tests.outcome import Outcome
from tests.report_pages import charts_of
from tests.tiny_models import VOCABULARY, ToyTokenizer

Verb = Callable[..., Outcome]
BLIMP = "babylm-2025/fast_eval/blimp_fast"


def test_a_table_of_models_and_tasks(eval_verb: Verb, runs: Path, data: Path, tmp_path: Path) -> None:
    models = (runs / "one", runs / "two" / "checkpoints" / "chck_1M")
    out = tmp_path / "out"
    shown = eval_verb(*models, "blimp_fast", "bits_per_byte", "--data", data, "--out", out, "--quiet")
    assert (shown.code, shown.err) == (0, "")
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    facts = json.loads((out / "results.json").read_text())
    one, two = facts["models"]
    scores = [model["tasks"]["blimp_fast"]["score"] for model in (one, two)]
    assert lines[0] == "task items baseline one two/chck_1M"
    assert re.fullmatch(rf"blimp_fast 24 50.00 {scores[0]:.2f} ± [\d.]+( \*)? {scores[1]:.2f} ± [\d.]+( \*)?", lines[1])
    assert [line.split(" ", 2)[:2] for line in lines[2:4]] == [["-", "agreement"], ["-", "binding"]]
    assert lines[4].startswith("bits_per_byte 2 - ")
    assert lines[-1] == f"{out}/results.html"
    assert one["folder"].endswith("chck_30M"), "a run is its newest checkpoint"
    assert set(one["tasks"]["blimp_fast"]["parts"]) == {"agreement", "binding"}
    assert facts["tasks"]["blimp_fast"]["sha256"] == read_pairs(data / BLIMP).sha256
    assert {"torch", "braidlm"} <= set(facts["versions"])
    assert "| blimp_fast | 24 | 50.00 | " in (out / "results.md").read_text()
    with open(out / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["model"], r["part"]) for r in rows if r["task"] == "blimp_fast"][:3] == [
        ("one", "all"),
        ("one", "agreement"),
        ("one", "binding"),
    ]
    assert not (out / "dynamics.html").exists()


def test_the_score_is_that_of_the_scorer(runs: Path, data: Path) -> None:
    folder = runs / "one" / "checkpoints" / "chck_2M"
    found = braidlm.eval(folder, "blimp_fast", data=data, device="cpu")
    expected = read_pairs(data / BLIMP).evaluate(
        "blimp_fast", EvaluatedModel(Scorer(load_model(folder)), load_tokenizer(folder))
    )
    assert found.of("one/chck_2M").tasks["blimp_fast"] == expected
    with pytest.raises(BraidError, match="no model 'x' was evaluated"):
        found.of("x")


def test_json_for_programs(eval_verb: Verb, runs: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = eval_verb(runs / "one", "blimp_fast", "--data", f"blimp_fast={data / BLIMP}", "--out", out, "--json")
    assert shown.json() == json.loads((out / "results.json").read_text())


def test_a_plain_transformers_folder(data: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    ToyTokenizer().save(tmp_path / "gpt2")
    (tmp_path / "a.jsonl").write_text('{"sentence_good": "w1 w2 w3", "sentence_bad": "w1 w3 w2"}\n')
    found = braidlm.eval(tmp_path / "gpt2", ["blimp"], data_of={"blimp": tmp_path / "a.jsonl"}, device="cpu")
    assert found.of("gpt2").tasks["blimp"].count == 1


def test_models_of_two_tokenizers_are_scored_on_the_same_text(runs: Path, tmp_path: Path, counted: list[str]) -> None:
    folder, text = runs / "one" / "checkpoints" / "chck_1M", tmp_path / "text.txt"
    text.write_text("\n\n".join(f"w{n % 7} w2 w3 and ü" for n in range(40)), encoding="utf-8")
    models, options = [runs / "one", tmp_path / "words"], {"data_of": {"bits_per_byte": text}, "device": "cpu"}
    shutil.copytree(folder, tmp_path / "words")
    ToyTokenizer().save(tmp_path / "words")
    what = "100 tokens are another stretch of the text for each tokenizer of these models"
    with pytest.raises(BraidError, match=f"one, words: {what}\n--max-bytes"):
        braidlm.eval(models, "bits_per_byte", settings=Settings(max_tokens=100), **options)
    assert not counted
    braidlm.eval(runs / "one", "bits_per_byte", settings=Settings(max_tokens=100), **options)
    found = braidlm.eval(models, "bits_per_byte", settings=Settings(max_bytes=100), **options)
    assert [model.tasks["bits_per_byte"].notes["bytes"] for model in found.models] == [6 * 15, 6 * 15]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models and tasks that are really scored."""
    scored: list[str] = []
    plain = module._evaluate_task

    def count(folder: Any, task: Any, scorer: Any) -> Any:
        scored.append(f"{folder.name} {task.name}")
        return plain(folder, task, scorer)

    monkeypatch.setattr(module, "_evaluate_task", count)
    return scored


def test_all_checkpoints_in_the_order_of_training(
    eval_verb: Verb, runs: Path, data: Path, tmp_path: Path, counted: list[str]
) -> None:
    out = tmp_path / "out"
    arguments = (runs / "one", "blimp_fast", "bits_per_byte", "--data", data, "--all-checkpoints", "--out", out)
    shown = eval_verb(*arguments, "--quiet")
    assert (shown.code, shown.err) == (0, "")
    names = ["chck_1M", "chck_2M", "chck_10M", "chck_30M"]
    assert [line.split()[0] for line in shown.out.splitlines()[1:5]] == [f"one/{name}" for name in names]
    dynamics = json.loads((out / "dynamics.json").read_text())["runs"][0]
    assert (dynamics["names"], dynamics["unit"]) == (names, "words")
    assert dynamics["amounts"] == [1e6, 2e6, 1e7, 3e7]
    best = dynamics["best"]
    assert f"one: the best of 4 checkpoints and 2 tasks is {best} (" in shown.out
    page = (out / "dynamics.html").read_text()
    assert f"is <code>{best}</code>" in page
    assert page.count('<figure class="picture">') == 3, "the deviations, and a score for each task"
    assert f"best: {best}" in page
    assert "centred moving average of 3 checkpoints" in page
    assert f'<tr class="best"><td>{best}</td>' in page
    charts = charts_of(out / "dynamics.html")
    assert list(charts) == ["deviation-one", "score-blimp_fast", "score-bits_per_byte"]
    assert len(counted) == 8
    again = eval_verb(*arguments, "--quiet")
    assert again.out == shown.out
    assert len(counted) == 8, "nothing is scored twice"


def test_an_interrupted_evaluation_goes_on(
    runs: Path, data: Path, tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"data": data, "all_checkpoints": True, "out": tmp_path / "out", "device": "cpu"}
    plain = module._evaluate_task

    def interrupted(folder: Any, task: Any, scorer: Any) -> Any:
        if len(counted) == 2:
            raise KeyboardInterrupt
        return plain(folder, task, scorer)

    monkeypatch.setattr(module, "_evaluate_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        braidlm.eval(runs / "one", "blimp_fast", **options)
    assert not (tmp_path / "out" / "results.json").exists()
    monkeypatch.setattr(module, "_evaluate_task", plain)
    braidlm.eval(runs / "one", "blimp_fast", **options)
    assert counted == [f"one/{name} blimp_fast" for name in ("chck_1M", "chck_2M", "chck_10M", "chck_30M")]


def test_what_is_kept_follows_model_data_and_type(
    runs: Path, data: Path, tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRAID_ALLOW_CHANGED_WEIGHTS", "1")
    folder, out = runs / "one" / "checkpoints" / "chck_1M", tmp_path / "out"
    for _ in range(2):
        braidlm.eval(folder, "blimp_fast", data=data, out=out, device="cpu")
    assert len(counted) == 1
    braidlm.eval(folder, "blimp_fast", data=data, out=out, device="cpu", dtype="bfloat16")
    assert len(counted) == 2
    (data / BLIMP / "binding.jsonl").unlink()
    braidlm.eval(folder, "blimp_fast", data=data, out=out, device="cpu")
    assert len(counted) == 3
    other = runs / "one" / "checkpoints" / "chck_2M" / "model.safetensors"
    (folder / "model.safetensors").write_bytes(other.read_bytes())
    braidlm.eval(folder, "blimp_fast", data=data, out=out, device="cpu")
    assert len(counted) == 4
    for path in (out / "kept").iterdir():
        path.write_text("{")
    braidlm.eval(folder, "blimp_fast", data=data, out=out, device="cpu")
    assert len(counted) == 5, "a damaged file is as good as none"


def test_several_runs_are_compared(runs: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    folders = {"first/a": runs / "one", "second": runs / "two"}
    found = braidlm.eval(folders, ["blimp_fast"], data=data, all_checkpoints=True, out=out, device="cpu")
    assert {name: len(models) for name, models in found.runs.items()} == {"first/a": 4, "second": 4}
    charts = charts_of(out / "dynamics.html")
    assert set(charts) == {"deviation-first-a", "deviation-second", "score-blimp_fast", "comparison"}
    page = (out / "dynamics.html").read_text()
    assert "The runs compared" in page
    assert "Highest: <code>" in page


def test_a_folder_of_checkpoints_without_a_run(runs: Path, data: Path) -> None:
    for folder in (runs / "one" / "checkpoints").iterdir():
        (folder / "lineage.json").unlink()
    found = braidlm.eval(runs / "one" / "checkpoints", "blimp_fast", data=data, all_checkpoints=True, device="cpu")
    assert [model.words for model in found.models] == [1_000_000, 2_000_000, 10_000_000, 30_000_000]


def test_data_from_the_environment(runs: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAID_DATA", str(data))
    assert braidlm.eval(runs / "one", "bits_per_byte", device="cpu").of("one").tasks["bits_per_byte"].count == 2


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["{one}", "blimp_fas"], ["there is no model folder and no task 'blimp_fas'. Did you mean 'blimp_fast'?"]),
        (
            ["{tmp}/runs/onee", "blimp_fast"],
            ["{tmp}/runs/onee: there is no such folder. Did you mean '{tmp}/runs/one'?"],
        ),
        (["{one}", "zzz"], ["there is no model folder and no task 'zzz'", "`braid list tasks` lists the tasks."]),
        (["blimp_fast"], ["there is no model", "name a model folder or a run"]),
        (["{one}"], ["there is no task", "bits_per_byte, blimp, blimp_fast, blimp_filtered"]),
        (
            ["{one}", "blimp_fast", "blimp", "--data", "{tmp}/none"],
            [
                "blimp_fast: its data is not in {tmp}/none. It is `fast_eval/blimp_fast` of the BabyLM 2025",
                "{tmp}/none. `git clone https://github.com/alexwarstadt/blimp {tmp}/none/blimp`, or",
                "`pip install osfclient && osf -p ryjfm clone {tmp}/none` gets the BabyLM 2025 data",
                "Say where data is with `--data FOLDER` (or BRAID_DATA=FOLDER), or with `--data TASK=PATH`.",
            ],
        ),
        (["{one}", "blimp", "--data", "blimp={tmp}/none"], ["blimp: there is no file or folder {tmp}/none"]),
        (
            ["{one}", "blimp_fast", "--data", "{data}", "blimp=x"],
            ["data is given for 'blimp', which is not evaluated. Did you mean 'blimp_fast'?"],
        ),
        (["{one}", "blimp_fast", "--data", "a", "b"], ["--data: several data folders are given: a, b"]),
        (["{one}", "blimp_fast", "--data", "{data}", "--device", "toaster"], ["there is no device 'toaster' here"]),
        (["{one}", "{one}", "blimp_fast", "--data", "{data}"], ["this model is given twice"]),
        (["{tmp}", "blimp_fast", "--data", "{data}"], ["{tmp}: this is neither a model folder"]),
        (["{tmp}/runs", "blimp_fast", "--data", "{data}", "--all-checkpoints"], ["there are no checkpoints here"]),
        (
            ["{one}", "blimp_fast", "--data", "{data}", "--out", "{tmp}"],
            ["{tmp}: this exists already and is not a report of `braid eval`"],
        ),
    ],
)
def test_wrong_arguments(
    eval_verb: Verb, runs: Path, data: Path, tmp_path: Path, arguments: list[str], texts: list[str]
) -> None:
    names = {"one": runs / "one", "data": data, "tmp": tmp_path}
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    shown = eval_verb(*(argument.format(**names) for argument in arguments), *out)
    assert (shown.code, shown.out) == (2, "")
    for text in texts:
        assert text.format(**names) in shown.err
    assert not (tmp_path / "out").exists(), "nothing is written before everything is checked"


def test_models_that_cannot_be_evaluated(eval_verb: Verb, runs: Path, data: Path, tmp_path: Path) -> None:
    folder = runs / "one" / "checkpoints" / "chck_1M"
    options = ("blimp_fast", "--data", data, "--out", tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    assert "weights do not fit the configuration" in eval_verb(folder, *options).err
    (folder / "tokenizer.json").unlink()
    shown = eval_verb(folder, *options)
    assert f"{folder}: this model folder has no tokenizer that can be read" in shown.err
    assert "Put the tokenizer.json that the model was trained with into the folder." in shown.err


def test_a_malformed_line_is_found_before_anything_is_scored(
    runs: Path, data: Path, tmp_path: Path, counted: list[str]
) -> None:
    with open(data / BLIMP / "binding.jsonl", "a") as file:
        file.write("{}\n")
    with pytest.raises(BraidError, match=r"binding\.jsonl, line 13: there is no 'sentence_good'"):
        braidlm.eval(runs / "one", ["bits_per_byte", "blimp_fast"], data=data, device="cpu")
    assert not counted


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_says_what_it_is(name: str) -> None:
    task = TASKS[name]
    for fact in ("description", "size", "licence", "metric", "fetch"):
        assert getattr(task, fact)
    assert bool(task.locations or task.texts) != task.built_in
    assert not any(Path(location).is_absolute() for location in task.locations)


def test_unknown_tasks_in_python(runs: Path) -> None:
    with pytest.raises(BraidError, match=r"unknown task 'blimp_slow'\. Did you mean 'blimp"):
        braidlm.eval(runs / "one", "blimp_slow")
    with pytest.raises(BraidError, match="there is no task"):
        braidlm.eval(runs / "one", [])


def test_data_of_single_tasks_says_what_it_is_called(runs: Path, data: Path):
    with pytest.raises(BraidError) as caught:
        braidlm.eval(runs / "one", "bits_per_byte", data={"bits_per_byte": "dev.txt"}, device="cpu")  # type: ignore[arg-type]
    assert "data_of={'bits_per_byte': 'dev.txt'}" in str(caught.value)


def test_a_study_is_all_its_models_and_one_by_name(runs: Path, data: Path, tmp_path: Path):
    study = tmp_path / "study"
    shutil.copytree(runs, study / "seed-1")
    options: dict[str, Any] = {"data_of": {"bits_per_byte": data / "dev" / "a.txt"}, "device": "cpu"}
    assert [model.name for model in braidlm.eval(study, "bits_per_byte", **options).models] == ["one", "two"]
    (one,) = braidlm.eval(study / "two", "bits_per_byte", **options).models
    assert one.folder == str(study / "seed-1" / "two" / "checkpoints" / "chck_30M")
