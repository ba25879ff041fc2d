"""Tasks of code: read, sampled, run and counted; languages with the toolchains that are here."""

import gzip
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.formats.code_problems import CodeProblems, kind
from braidlm.evals.sandbox import languages
from braidlm.evals.sandbox import sandbox as sandbox_module
from braidlm.evals.sandbox.languages import LANGUAGES, open_code_environment
from braidlm.evals.sandbox.sandbox import Sandbox
from braidlm.evals.scoring import completions
from braidlm.evals.scoring.completions import Completion
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.tasks import TASKS
from tests.tiny_models import tiny_model

TOKENIZER = bytes_tokenizer()
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def add(a, b):\n",
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
MBPP = {"text": "Write f.", "code": "def f(): return 1", "test_list": ["assert f() == 1"], "test_setup_code": ""}
X = {
    "python": {"prompt": "def f(x):\n", "test": "assert f(2) == 4\n"},
    "cpp": {"prompt": "int f(int x){\n", "test": "#undef NDEBUG\n#include<assert.h>\nint main(){ assert(f(2) == 4); }"},
    "java": {
        "prompt": "class Solution {\n    public int f(int x) {\n",
        "test": "public class Main { public static void main(String[] a) {\n"
        "if (new Solution().f(2) != 4) throw new AssertionError(); } }",
    },
    "js": {"prompt": "const f = (x) => {\n", "test": "console.assert(f(2) === 4)"},
    "go": {
        "prompt": "func F(x int) int {\n",
        "import": "",
        "test_setup": 'package main\n\nimport (\n    "testing"\n    "github.com/stretchr/testify/assert"\n)\n',
        "test": 'func TestF(t *testing.T) {\n    assert := assert.New(t)\n    assert.Equal(4, F(2), "four")\n}\n',
    },
}
RIGHT = {
    "python": "    return 2 * x\n",
    "cpp": "  return 2 * x;\n}",
    "java": "        return 2 * x;\n    }",
    "js": "  return 2 * x\n}",
    "go": "    return 2 * x\n}",
}
WRONG = {name: text.replace("2 * x", "x + 1") for name, text in RIGHT.items()}
BROKEN = {name: text.replace("2 * x", "2 * y") for name, text in RIGHT.items()}


@pytest.fixture(autouse=True)
def _isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("programs are run on Linux")
    try:
        Sandbox.open()
    except BraidError as error:
        pytest.skip(error.what)


def jsonl(path: Path, *rows: Any) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def evaluated(**settings: Any) -> EvaluatedModel:
    model = tiny_model(vocab_size=TOKENIZER.vocab_size, context=256)
    return EvaluatedModel(Scorer(model), TOKENIZER, settings=Settings(**{"allow_code_execution": True, **settings}))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model is said to write, sample after sample; prompts are checked to be there."""
    texts: list[str] = []

    def complete(model: Any, prompts: Sequence, max_tokens: int, finished: Sequence, *rest: Any) -> list[Completion]:
        assert len(prompts) == len(finished) == len(texts)
        return [Completion(text, "finished") for text in texts]

    monkeypatch.setattr(completions, "complete", complete)
    return texts


def test_humaneval_from_file_to_score(tmp_path: Path, written: list[str]) -> None:
    other = {**HUMANEVAL, "task_id": "HumanEval/1"}
    data = TASKS["humaneval"]().open(jsonl(tmp_path / "HumanEval.jsonl.gz", HUMANEVAL, other))
    assert data.count == 2
    right, wrong = "    return a + b\n", "    return a - b\n"
    leaves = "    return a + b\nimport os; os._exit(0)"
    written += [right, wrong, wrong, leaves, right + "\ndef g(:", *[wrong] * 5]
    written += [right] * 10
    result = data.evaluate("humaneval", evaluated())
    assert result.score == pytest.approx(100 * (2 / 10 + 1) / 2)
    assert result.also == {"pass@10": 100.0}
    assert result.standard_error == pytest.approx(100 * (0.8 / 2))
    assert (result.metric, result.count, result.parts) == ("pass@1, %", 2, {})
    assert result.notes["failures"] == {"AssertionError": 7, "ended before its tests did": 1}
    assert (result.notes["samples"], result.notes["temperature"]) == (10, 0.2)
    assert result.notes["sandbox"] == Sandbox.open().statement
    assert result.notes["tests"] == {"Python": LANGUAGES["python"].trust(Sandbox.open())}
    assert result.items["problem"] == ["HumanEval/0", "HumanEval/1"]
    assert result.items["influence"] == [-40.0, 40.0]
    assert result.items["failures"][0][:4] == [
        "",
        "ended with 1: AssertionError",
        "ended with 1: AssertionError",
        "ended before its tests did",
    ]


def test_a_model_really_writes_and_is_run(tmp_path: Path) -> None:
    data = TASKS["humaneval"]().open(jsonl(tmp_path / "a.jsonl", HUMANEVAL, {**HUMANEVAL, "prompt": "x" * 300 + "\n"}))
    result = data.evaluate("humaneval", evaluated(code_samples=2, code_temperature=0.9))
    assert (result.score, result.also) == (0.0, {})
    assert result.notes["prompts cut"] == 1
    assert sum(result.notes["failures"].values()) == 4
    assert data.evaluate("humaneval", evaluated(code_samples=2, code_temperature=0.9)) == result


def test_the_isolation_is_said(tmp_path: Path, written: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    data = TASKS["humaneval"]().open(jsonl(tmp_path / "a.jsonl", HUMANEVAL))
    written.append("    return a + b\n")
    data.evaluate("humaneval", evaluated(code_samples=1))
    assert f"programs run in a sandbox of {Sandbox.open().name}" in capsys.readouterr().out


def test_mbpp_is_its_test_set_after_examples(tmp_path: Path, written: list[str]) -> None:
    rows = [{**MBPP, "task_id": number} for number in (1, 2, 3, 4, 11, 510, 511)]
    data = TASKS["mbpp"]().open(jsonl(tmp_path / "mbpp.jsonl", *rows))
    assert [problem.name for problem in data.items] == ["MBPP/11", "MBPP/510"]
    assert data.items[0].prompt(None).count("[BEGIN]") == 4
    assert data.items[0].prompt(0).count("[BEGIN]") == 1
    written += ["def f():\n    return 1\n[DONE]", "def f():\n    return 2\n"]
    result = data.evaluate("mbpp", evaluated(code_samples=1, code_temperature=0.0))
    assert (result.score, result.count) == (50.0, 2)
    with pytest.raises(BraidError, match="5 examples are asked for, and there are 3"):
        data.check(Settings(allow_code_execution=True, shots=5))
    with pytest.raises(BraidError, match=r"no task of the test set is here \(task_id 11 to 510\)"):
        TASKS["mbpp"]().open(jsonl(tmp_path / "other.jsonl", {**MBPP, "task_id": 1}))


def x_data(folder: Path, *names: str) -> CodeProblems:
    for name in names:
        jsonl(folder / f"humaneval_{name}.jsonl.gz", {"task_id": f"{name}/0", **X[name]})
    return TASKS["humaneval_x"]().open(folder)


def test_languages_without_tools_are_not_run(
    tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(languages.shutil, "which", lambda tool: None)
    data = x_data(tmp_path, "python", "cpp", "go")
    written.append(RIGHT["python"])
    result = data.evaluate("humaneval_x", evaluated(code_samples=1))
    assert {name: (part.score, part.count) for name, part in result.parts.items()} == {"Python": (100.0, 1)}
    assert (result.score, result.count) == (100.0, 1)
    assert result.notes["not run"] == {"cpp": "not run: g++ not found", "go": "not run: go not found"}
    with (
        pytest.raises(BraidError, match="no program could be run: cpp not run: g\\+\\+ not found"),
        open_code_environment(["cpp"], "required"),
    ):
        pass


def test_tools_that_do_not_work_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(languages.shutil, "which", lambda tool: "/usr/bin/false")
    with open_code_environment(["python", "js"], "required") as environment:
        assert list(environment.languages) == ["python"]
        assert environment.missing["js"].startswith("not run: node cannot be used in the sandbox (ended with 1")


@pytest.mark.parametrize("name", ["python", "cpp", "js", "java", pytest.param("go", marks=pytest.mark.slow)])
def test_programs_of_each_language(tmp_path: Path, written: list[str], name: str) -> None:
    if not all(tool == "python" or shutil.which(tool) for tool in LANGUAGES[name].tools):
        pytest.skip(f"there is no {' or '.join(LANGUAGES[name].tools)}")
    data = x_data(tmp_path, name)
    written += [RIGHT[name], WRONG[name], BROKEN[name]]
    result = data.evaluate("humaneval_x", evaluated(code_samples=3))
    assert result.notes["not run"] == {}
    assert result.score == pytest.approx(100 / 3)
    right, wrong, broken = result.items["failures"][0]
    assert right == ""
    assert wrong
    if name in ("cpp", "java", "go"):
        assert broken.startswith("does not compile: ")


def test_the_score_is_the_mean_over_languages(tmp_path: Path, written: list[str]) -> None:
    if not shutil.which("node"):
        pytest.skip("there is no node")
    data = x_data(tmp_path, "js", "python")
    written += [RIGHT["js"], WRONG["js"]] * 5 + [RIGHT["python"]] * 10
    result = data.evaluate("humaneval_x", evaluated())
    assert {name: part.score for name, part in result.parts.items()} == {
        "JavaScript": 50.0,
        "Python": 100.0,
        "JavaScript, pass@10": 100.0,
        "Python, pass@10": 100.0,
    }
    assert (result.score, result.also, result.standard_error) == (75.0, {"pass@10": 100.0}, None)


def test_nothing_is_run_unless_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TASKS["humaneval"]().open(jsonl(tmp_path / "a.jsonl", HUMANEVAL))
    monkeypatch.setattr(sandbox_module, "_launch", lambda job, patience: pytest.fail("something was run"))
    with pytest.raises(BraidError, match="runs programs that the model writes, and that has not been allowed") as error:
        data.evaluate("humaneval", evaluated(allow_code_execution=False))
    assert "--allow-code-execution" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"code_samples": 0}, "code_samples: expected a whole number from 1 to 10000, got 0"),
        ({"code_temperature": 0.0}, "at temperature 0 all 10 samples of a problem are the same"),
        ({"code_temperature": -1.0}, "code_temperature: expected a number from 0 to 1000"),
        ({"code_top_p": 2.0}, "code_top_p: expected a number above 0"),
        ({"shots": -1}, "shots: expected a whole number from 0 to"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    data = TASKS["humaneval"]().open(jsonl(tmp_path / "a.jsonl", HUMANEVAL))
    with pytest.raises(BraidError, match=text):
        data.check(Settings(allow_code_execution=True, **settings))


@pytest.mark.parametrize(
    ("task", "row", "text"),
    [
        ("humaneval", {**HUMANEVAL, "test": 3}, "a.jsonl, line 2: 'test' is to be a sentence, not 3"),
        ("humaneval", {"task_id": "x"}, "line 2: there is no 'prompt'"),
        ("humaneval", "{", "line 2: this line is not JSON"),
        ("mbpp", {**MBPP, "task_id": "many"}, "line 2: 'task_id' is to be a number"),
        ("mbpp", {**MBPP, "task_id": 12, "test_list": "assert"}, "line 2: 'test_list' is to be a list of tests"),
        ("mbpp", {**MBPP, "task_id": 12, "test_list": ["assert ("]}, "line 2: the tests are not Python"),
        ("mbpp", {**MBPP, "task_id": 12, "test_setup_code": 1}, "line 2: 'test_setup_code' is to be text, not 1"),
    ],
)
def test_malformed_lines(tmp_path: Path, task: str, row: Any, text: str) -> None:
    first = {"humaneval": HUMANEVAL, "mbpp": {**MBPP, "task_id": 11}}[task]
    with pytest.raises(BraidError) as error:
        TASKS[task]().open(jsonl(tmp_path / "a.jsonl", first, row))
    assert text in str(error.value)
    assert "A line is {" in str(error.value)


def test_files_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match=r"there are no humaneval_\*\.jsonl"):
        TASKS["humaneval_x"]().open(tmp_path)
    jsonl(tmp_path / "humaneval_rust.jsonl", {"task_id": "Rust/0"})
    with pytest.raises(BraidError, match=r"none of these files is of a language.*humaneval_rust\.jsonl"):
        TASKS["humaneval_x"]().open(tmp_path)
    jsonl(tmp_path / "humaneval_go.jsonl", {"task_id": "Go/0", "prompt": "p", "test": "t", "import": ""})
    with pytest.raises(BraidError, match=r"humaneval_go\.jsonl, line 1: there is no text 'test_setup'"):
        TASKS["humaneval_x"]().open(tmp_path)
    jsonl(tmp_path / "humaneval_go.jsonl", {"task_id": "Go/0", **X["go"]})
    jsonl(tmp_path / "humaneval_js.jsonl", {"task_id": "JS/0", "prompt": "p", "test": "t"})
    with pytest.raises(BraidError, match=r"humaneval_js\.jsonl, line 1: there is no beginning of a function"):
        TASKS["humaneval_x"]().open(tmp_path)
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(BraidError, match="this compressed file is damaged or cut off"):
        TASKS["humaneval"]().open(tmp_path / "a.jsonl.gz")


def test_kinds_of_failures() -> None:
    assert kind("ended with 1: NameError: name 'x' is not defined") == "NameError"
    assert kind("ended with 1: AssertionError") == "AssertionError"
    assert kind("ended with 3") == "ended with 3"
    assert kind("does not compile: test.cpp:3: error") == "does not compile"
    assert kind("took longer than 10 seconds") == "took longer than 10 seconds"
