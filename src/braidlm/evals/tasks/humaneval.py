"""HumanEval: functions in Python from their signature and description, tested."""

import functools
from pathlib import Path

from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row, rows_of
from braidlm.evals.files.unpacked_files import read_files
from braidlm.evals.formats.code_problems import CodeProblems, Problem
from braidlm.evals.formats.code_texts import HUMANEVAL_STOPS, humaneval_program
from braidlm.evals.scoring.stops import has_any
from braidlm.evals.tasks.task import TASKS, Task

EXAMPLE = '{"task_id": "x/0", "prompt": "def f(x):\\n", "entry_point": "f", "test": "def check(candidate): ..."}'
CODE_SETTINGS = ("code_samples", "code_temperature", "code_top_p")


@TASKS.register("humaneval")
class HumanEval(Task):
    """Chen and others (2021), "Evaluating large language models trained on code": prompts and stops as there."""

    description = "HumanEval: Python functions from their description, run against tests (needs --allow-code-execution)"
    size = "164 problems"
    licence = "MIT"
    metric = "pass@1, %"
    places = (
        "maths-and-code/HumanEval.jsonl.gz",
        "human-eval/data/HumanEval.jsonl.gz",
        "HumanEval.jsonl.gz",
        "humaneval",
    )
    hub = HubSource("openai/openai_humaneval", "openai_humaneval", ("test",))
    fetch = f"`git clone https://github.com/openai/human-eval DATA/human-eval`, or {hub.command}".format(
        task="humaneval"
    )
    uses = CODE_SETTINGS

    def open(self, place: Path) -> CodeProblems:
        rows = rows_of(read_files(place), place, EXAMPLE)
        return CodeProblems([_problem(row) for row in rows], rows.sha256)


def _problem(row: Row) -> Problem:
    facts = {key: row.text(key) for key in ("task_id", "prompt", "entry_point", "test")}
    return Problem(
        name=facts["task_id"],
        language="python",
        prompt=lambda shots: facts["prompt"],
        is_finished=functools.partial(has_any, stops=HUMANEVAL_STOPS),
        program=functools.partial(humaneval_program, facts),
    )
