"""Programs that a model writes, run against tests: HumanEval, MBPP and HumanEval-X.

Where a completion ends, and how it becomes a program, is as in the original harnesses. HumanEval: the stop sequences of
Chen and others (2021, section 2.3). MBPP: the prompt and `[DONE]` of Austin and others (2021, section 4). HumanEval-X:
CodeGeeX, codegeex/benchmark/utils.py and humaneval-x/evaluate_humaneval_x.py.
"""

import ast
import builtins
import functools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.evals.formats.code_problems import CodeProblems, Problem
from braidlm.evals.rows import Row, files_of, rows_of
from braidlm.evals.sandbox.languages import LANGUAGES, TestedCode
from braidlm.evals.scoring.requests import contains_any, truncate_at
from braidlm.evals.tasks.task import TASKS, HubSource, Task

HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
MBPP_STOPS = ("[DONE]",)
FUNCTIONS = {
    "python": re.compile(r"^def\s+(\w+)", re.MULTILINE),
    "js": re.compile(r"^(?:const|let|var|function)\s+(\w+)", re.MULTILINE),
}
"""Where a function begins in the languages whose tests run apart from the program; the last in a prompt is tested."""
HUMANEVAL_EXAMPLE = (
    '{"task_id": "x/0", "prompt": "def f(x):\\n", "entry_point": "f", "test": "def check(candidate): ..."}'
)


class _CodeTask(Task):
    metric = "pass@1, %"
    version = 2  # tests run apart from programs
    uses: tuple[str, ...] = ("code_samples", "code_temperature", "code_top_p")


@TASKS.register("humaneval")
class HumanEval(_CodeTask):
    """Chen and others (2021), "Evaluating large language models trained on code": prompts and stops as there."""

    description = "HumanEval: Python functions from their description, run against tests (needs --allow-code-execution)"
    size = "164 problems"
    licence = "MIT"
    locations = (
        *("maths-and-code/HumanEval.jsonl.gz", "human-eval/data/HumanEval.jsonl.gz"),
        *("HumanEval.jsonl.gz", "humaneval"),
    )
    hub = HubSource("openai/openai_humaneval", "openai_humaneval", ("test",))
    fetch = f"`git clone https://github.com/openai/human-eval DATA/human-eval`, or {hub.command}"

    def open(self, path: Path) -> CodeProblems:
        rows = rows_of(files_of(path, below=True), path, HUMANEVAL_EXAMPLE)
        return CodeProblems([self.problem(row) for row in rows], rows.sha256)

    def problem(self, row: Row) -> Problem:
        fields = {key: row.text(key) for key in ("task_id", "prompt", "entry_point", "test")}
        is_finished = functools.partial(contains_any, stops=HUMANEVAL_STOPS)
        code = functools.partial(humaneval_code, fields)
        return Problem(fields["task_id"], "python", lambda shots: fields["prompt"], is_finished, code)


def humaneval_code(row: Mapping[str, str], completion: str) -> TestedCode:
    """The function, and its tests with the call of them."""
    prompt, name = row["prompt"], row["entry_point"]
    given, _ = _split_prompt("python", prompt)
    program = prompt + truncate_at(completion, HUMANEVAL_STOPS)
    return TestedCode(program, f"{row['test']}\ncheck({name})", given, (name,))


MBPP_EXAMPLE = '{"task_id": 11, "text": "Write ...", "code": "def f(): ...", "test_list": ["assert f() == 1"]}'
MBPP_QUESTION = (
    "You are an expert Python programmer, and here is your task: {} Your code should pass these tests:\n\n{}\n[BEGIN]\n"
)
EXAMPLE_TASKS = (2, 3, 4)
"""The tasks whose solutions precede a question, as in the data set's own description."""
TEST_TASKS = range(11, 511)


@TASKS.register("mbpp")
class Mbpp(_CodeTask):
    """Austin and others (2021), "Program synthesis with large language models": their prompt with three examples."""

    description = (
        "MBPP: short Python programs from a sentence and tests, after 3 examples (needs --allow-code-execution)"
    )
    size = "500 problems (tasks 11 to 510)"
    licence = "CC BY 4.0"
    locations = ("maths-and-code/mbpp.jsonl", "mbpp.jsonl", "mbpp")
    hub = HubSource("google-research-datasets/mbpp", "full", ("prompt", "test"))
    fetch = f"It is `mbpp/mbpp.jsonl` of https://github.com/google-research/google-research, or {hub.command}"
    uses = (*_CodeTask.uses, "shots")

    def open(self, path: Path) -> CodeProblems:
        rows = rows_of(files_of(path, below=True), path, MBPP_EXAMPLE)
        tasks = {int(row.number("task_id")): _mbpp_fields(row) for row in rows}
        tested = [tasks[number] for number in TEST_TASKS if number in tasks]
        if not tested:
            what = f"no task of the test set is here (task_id {TEST_TASKS.start} to {TEST_TASKS.stop - 1})"
            raise BraidError(what, str(path), f"A line is {MBPP_EXAMPLE}.")
        examples = [tasks[number] for number in EXAMPLE_TASKS if number in tasks]
        return CodeProblems([_mbpp_problem(fields, examples, path) for fields in tested], rows.sha256)


def _mbpp_fields(row: Row) -> dict[str, Any]:
    tests = row.fields.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise row.error(f"'test_list' is to be a list of tests, not {str(tests)[:40]}")
    setup = row.fields.get("test_setup_code") or ""
    if not isinstance(setup, str):
        raise row.error(f"'test_setup_code' is to be text, not {str(setup)[:40]}")
    try:
        undefined_names("\n".join([setup, *tests]))
    except SyntaxError as error:
        raise row.error(f"the tests are not Python ({error.msg})") from None
    texts = {key: row.text(key) for key in ("text", "code")}
    return {**texts, "task_id": int(row.number("task_id")), "test_list": tests, "test_setup_code": setup}


def _mbpp_problem(fields: dict[str, Any], examples: list[dict[str, Any]], path: Path) -> Problem:
    def prompt(shots: int | None) -> str:
        count = len(EXAMPLE_TASKS) if shots is None else shots
        if count > len(examples):
            todo = f"They are the tasks {', '.join(map(str, EXAMPLE_TASKS))}; `--shots 0` asks without examples."
            raise BraidError(f"{count} examples are asked for, and there are {len(examples)}", str(path), todo)
        return mbpp_prompt(fields, examples[:count])

    is_finished = functools.partial(contains_any, stops=MBPP_STOPS)
    return Problem(f"MBPP/{fields['task_id']}", "python", prompt, is_finished, functools.partial(mbpp_code, fields))


def mbpp_prompt(row: Mapping, examples: Sequence[Mapping]) -> str:
    """Examples with their code, then the task; each with its tests."""
    asked = [MBPP_QUESTION.format(each["text"], "\n".join(each["test_list"])) for each in (*examples, row)]
    solved = [f"{question}{each['code']}\n[DONE]\n\n" for question, each in zip(asked, examples, strict=False)]
    return "".join([*solved, asked[-1]])


def mbpp_code(row: Mapping, completion: str) -> TestedCode:
    """The code, and its tests."""
    tests = "\n".join([row["test_setup_code"], *row["test_list"]])
    undefined = undefined_names(tests)
    names = tuple(name for name in undefined if name not in sys.stdlib_module_names)
    given = "".join(f"import {name}\n" for name in undefined if name not in names)
    return TestedCode(truncate_at(completion, MBPP_STOPS), tests, given, names)


def undefined_names(tests: str) -> list[str]:
    """The names that tests use and neither they nor Python define; if there is none, the functions that they call.

    One of MBPP's tasks is to write a function `sum`.
    """
    defined, used, called = set(dir(builtins)), [], []
    for node in ast.walk(ast.parse(tests)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.append(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.alias():
                defined.add((node.asname or node.name).split(".")[0])
            case ast.Call(func=ast.Name(id=name)):
                called.append(name)
    return list(dict.fromkeys(name for name in used if name not in defined) or dict.fromkeys(called))


X_EXAMPLE = '{"task_id": "CPP/0", "prompt": "int f(int x){\\n", "test": "int main(){ ... }"}'
PREFIX = "humaneval_"
OWN_KEYS = {"go": ("import", "test_setup")}
"""Fields of a language's rows beside prompt and test; their values may be empty."""
PYTHON_IMPORTS = "math re sys copy datetime itertools collections heapq statistics functools hashlib string"
GO_IMPORTS = "math strings fmt strconv time bytes regexp sort math/rand crypto/md5"
CPP_IMPORTS = "stdlib.h algorithm math.h stdio.h vector string climits cstring iostream"


@TASKS.register("humaneval_x")
class HumanEvalX(_CodeTask):
    """Zheng and others (2023), "CodeGeeX": code generation, cut and tested as in its repository."""

    description = "HumanEval in Python, C++, Java, JavaScript and Go, run against tests (needs --allow-code-execution)"
    size = "164 problems in each of 5 languages"
    licence = "Apache 2.0"
    metric = "pass@1, % (mean over the languages that could be run)"
    locations = ("maths-and-code/humaneval-x", "humaneval-x", "CodeGeeX/codegeex/benchmark/humaneval-x")
    fetch = "`git clone https://github.com/THUDM/CodeGeeX DATA/CodeGeeX` gets it."

    def open(self, path: Path) -> CodeProblems:
        files = files_of(path, f"{PREFIX}*.jsonl", below=True)
        known = [file for file in files if file.stem.removeprefix(PREFIX) in LANGUAGES]
        if not known:
            what = f"none of these files is of a language that can be run: {', '.join(file.name for file in files)}"
            raise BraidError(what, str(path), f"Files are {PREFIX}NAME.jsonl, with NAME one of {', '.join(LANGUAGES)}.")
        rows = rows_of(known, path, X_EXAMPLE)
        return CodeProblems([_x_problem(row, row.stem.removeprefix(PREFIX)) for row in rows], rows.sha256)


def _x_problem(row: Row, language: str) -> Problem:
    fields = {key: row.text(key) for key in ("task_id", "prompt", "test")}
    for key in OWN_KEYS.get(language, ()):
        if not isinstance(row.fields.get(key), str):
            raise row.error(f"there is no text '{key}'")
        fields[key] = row.fields[key]
    if language in FUNCTIONS and not FUNCTIONS[language].search(fields["prompt"]):
        raise row.error("there is no beginning of a function in 'prompt'")
    is_finished, code = functools.partial(x_is_finished, language), functools.partial(x_code, language, fields)
    return Problem(fields["task_id"], language, lambda shots: fields["prompt"], is_finished, code)


def x_is_finished(language: str, text: str) -> bool:
    """Whether the function has been closed: in Python by a line that is not indented, elsewhere by its brace."""
    if language == "python":
        return _first_unindented(text) is not None
    return text.count("{") + 1 == text.count("}")


def x_body(language: str, text: str) -> str:
    """The function's body, closed as its language needs it."""
    if language == "python":
        end = _first_unindented(text)
        return text if end is None else text[:end]
    if language == "java":
        main = text.find("public static void main")
        text = text if main < 0 else text[:main] + "}"
    if language == "go":
        for stop in ("\n//", "\nfunc main("):
            text = text[: text.rfind(stop)] if stop in text else text
    if "}" in text:
        text = text[: text.rfind("}") + 1]
    if language == "java" and text.count("{") + 1 == text.count("}"):
        text += "\n}"  # the class around the method
    return text


def x_code(language: str, row: Mapping[str, str], completion: str) -> TestedCode:
    """The whole program, and its tests."""
    body, prompt, test = x_body(language, completion), row["prompt"], row["test"]
    if language == "python":
        imports = "".join(f"import {name}\n" for name in PYTHON_IMPORTS.split())
        imports += "from typing import *\nfrom collections import *\n"
        given, names = _split_prompt(language, prompt)
        return TestedCode(f"{imports}{prompt}{body}", test, imports + given, names)
    if language == "js":
        return TestedCode(f"{prompt}{body}", test, *_split_prompt(language, prompt))
    if language == "cpp":
        imports = "".join(f"#include<{name}>\n" for name in CPP_IMPORTS.split() if f"#include<{name}>" not in prompt)
        return TestedCode(f"{imports}\n{prompt}{body}", test)
    if language == "go":
        setup, prompt = row["test_setup"], prompt.replace(row["import"], "")
        used = [name for name in GO_IMPORTS.split() if name not in setup and f"{name.split('/')[-1]}." in body]
        imports = "import (\n" + "".join(f'    "{name}"\n' for name in used) + ")\n" if used else ""
        return TestedCode(f"{setup}\n{imports}{prompt}{body}", test)
    return TestedCode(f"{prompt}{body}", test)


def _split_prompt(language: str, prompt: str) -> tuple[str, tuple[str, ...]]:
    """What a prompt gives beside the function to be written (imports, functions that tests use too), and its name."""
    begins = list(FUNCTIONS[language].finditer(prompt))
    return (prompt[: begins[-1].start()], (begins[-1][1],)) if begins else ("", ())


def _first_unindented(text: str) -> int | None:
    """Where the first line begins that is neither empty nor indented."""
    match = re.search(r"^\S", text, re.MULTILINE)
    return None if match is None else match.start()
