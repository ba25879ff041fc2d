"""MBPP: short Python programs from one sentence and three tests."""

import functools
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row, rows_of
from braidlm.evals.files.text_files import unpacked_files
from braidlm.evals.formats.code_problems import CodeProblems, Problem
from braidlm.evals.formats.code_texts import MBPP_STOPS, mbpp_code, mbpp_prompt, undefined_names
from braidlm.evals.scoring.stop_strings import contains_any
from braidlm.evals.tasks.problems.humaneval import CODE_SETTINGS
from braidlm.evals.tasks.task import TASKS, Task

EXAMPLE = '{"task_id": 11, "text": "Write ...", "code": "def f(): ...", "test_list": ["assert f() == 1"]}'
EXAMPLE_TASKS = (2, 3, 4)
"""The tasks whose solutions precede a question, as in the data set's own description."""
TEST_TASKS = range(11, 511)


@TASKS.register("mbpp")
class Mbpp(Task):
    """Austin and others (2021), "Program synthesis with large language models": their prompt with three examples."""

    description = (
        "MBPP: short Python programs from a sentence and tests, after 3 examples (needs --allow-code-execution)"
    )
    size = "500 problems (tasks 11 to 510)"
    licence = "CC BY 4.0"
    metric = "pass@1, %"
    locations = ("maths-and-code/mbpp.jsonl", "mbpp.jsonl", "mbpp")
    hub = HubSource("google-research-datasets/mbpp", "full", ("prompt", "test"))
    fetch = f"It is `mbpp/mbpp.jsonl` of https://github.com/google-research/google-research, or {hub.command}"
    version = 2  # tests run apart from programs
    uses = (*CODE_SETTINGS, "shots")

    def open(self, path: Path) -> CodeProblems:
        rows = rows_of(unpacked_files(path), path, EXAMPLE)
        tasks = {int(row.number("task_id")): _fields(row) for row in rows}
        tested = [tasks[number] for number in TEST_TASKS if number in tasks]
        if not tested:
            raise BraidError(
                f"no task of the test set is here (task_id {TEST_TASKS.start} to {TEST_TASKS.stop - 1})",
                str(path),
                f"A line is {EXAMPLE}.",
            )
        examples = [tasks[number] for number in EXAMPLE_TASKS if number in tasks]
        return CodeProblems([_problem(fields, examples, path) for fields in tested], rows.sha256)


def _fields(row: Row) -> dict[str, Any]:
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


def _problem(fields: dict[str, Any], examples: list[dict[str, Any]], path: Path) -> Problem:
    def prompt(shots: int | None) -> str:
        count = len(EXAMPLE_TASKS) if shots is None else shots
        if count > len(examples):
            raise BraidError(
                f"{count} examples are asked for, and there are {len(examples)}",
                str(path),
                f"They are the tasks {', '.join(map(str, EXAMPLE_TASKS))}; `--shots 0` asks without examples.",
            )
        return mbpp_prompt(fields, examples[:count])

    return Problem(
        name=f"MBPP/{fields['task_id']}",
        language="python",
        prompt=prompt,
        is_finished=functools.partial(contains_any, stops=MBPP_STOPS),
        code=functools.partial(mbpp_code, fields),
    )
