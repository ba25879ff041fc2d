"""MBPP: short Python programs from one sentence and three tests."""

import functools
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row, rows_of
from braidlm.evals.files.unpacked_files import read_files
from braidlm.evals.formats.code_problems import CodeProblems, Problem
from braidlm.evals.formats.code_texts import MBPP_STOPS, mbpp_program, mbpp_prompt
from braidlm.evals.scoring.stops import has_any
from braidlm.evals.tasks.humaneval import CODE_SETTINGS
from braidlm.evals.tasks.task import TASKS, Task

EXAMPLE = '{"task_id": 11, "text": "Write ...", "code": "def f(): ...", "test_list": ["assert f() == 1"]}'
SHOWN = (2, 3, 4)
"""The tasks whose solutions stand before a question, as in the data set's own description."""
TESTED = range(11, 511)


@TASKS.register("mbpp")
class Mbpp(Task):
    """Austin and others (2021), "Program synthesis with large language models": their prompt with three examples."""

    description = (
        "MBPP: short Python programs from a sentence and tests, after 3 examples (needs --allow-code-execution)"
    )
    size = "500 problems (tasks 11 to 510)"
    licence = "CC BY 4.0"
    metric = "pass@1, %"
    places = ("maths-and-code/mbpp.jsonl", "mbpp.jsonl", "mbpp")
    hub = HubSource("google-research-datasets/mbpp", "full", ("prompt", "test"))
    fetch = "It is `mbpp/mbpp.jsonl` of https://github.com/google-research/google-research, or " + hub.command.format(
        task="mbpp"
    )
    uses = (*CODE_SETTINGS, "shots")

    def open(self, place: Path) -> CodeProblems:
        read = rows_of(read_files(place), place, EXAMPLE)
        rows = {int(row.number("task_id")): _facts(row) for row in read}
        tested = [rows[number] for number in TESTED if number in rows]
        if not tested:
            raise BraidError(
                f"no task of the test set is here (task_id {TESTED.start} to {TESTED.stop - 1})",
                str(place),
                f"A line is {EXAMPLE}.",
            )
        examples = [rows[number] for number in SHOWN if number in rows]
        return CodeProblems([_problem(facts, examples, place) for facts in tested], read.sha256)


def _facts(row: Row) -> dict[str, Any]:
    tests = row.facts.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise row.wrong(f"'test_list' is to be a list of tests, not {str(tests)[:40]}")
    setup = row.facts.get("test_setup_code") or ""
    if not isinstance(setup, str):
        raise row.wrong(f"'test_setup_code' is to be text, not {str(setup)[:40]}")
    texts = {key: row.text(key) for key in ("text", "code")}
    return {**texts, "task_id": int(row.number("task_id")), "test_list": tests, "test_setup_code": setup}


def _problem(facts: dict[str, Any], examples: list[dict[str, Any]], place: Path) -> Problem:
    def prompt(shots: int | None) -> str:
        wanted = len(SHOWN) if shots is None else shots
        if wanted > len(examples):
            raise BraidError(
                f"{wanted} examples are asked for, and there are {len(examples)}",
                str(place),
                f"They are the tasks {', '.join(map(str, SHOWN))}; `--shots 0` asks without examples.",
            )
        return mbpp_prompt(facts, examples[:wanted])

    return Problem(
        name=f"MBPP/{facts['task_id']}",
        language="python",
        prompt=prompt,
        is_finished=functools.partial(has_any, stops=MBPP_STOPS),
        program=functools.partial(mbpp_program, facts),
    )
