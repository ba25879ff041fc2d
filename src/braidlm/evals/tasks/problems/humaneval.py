"""HumanEval: functions in Python from their signature and description, tested."""

import functools
from pathlib import Path

from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row, rows_of
from braidlm.evals.files.text_files import unpacked_files
from braidlm.evals.formats.code_problems import CodeProblems, Problem
from braidlm.evals.formats.code_texts import HUMANEVAL_STOPS, humaneval_code
from braidlm.evals.scoring.stop_strings import contains_any
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
    locations = (
        "maths-and-code/HumanEval.jsonl.gz",
        "human-eval/data/HumanEval.jsonl.gz",
        "HumanEval.jsonl.gz",
        "humaneval",
    )
    hub = HubSource("openai/openai_humaneval", "openai_humaneval", ("test",))
    fetch = f"`git clone https://github.com/openai/human-eval DATA/human-eval`, or {hub.command}"
    version = 2  # tests run apart from programs
    uses = CODE_SETTINGS

    def open(self, path: Path) -> CodeProblems:
        rows = rows_of(unpacked_files(path), path, EXAMPLE)
        return CodeProblems([_problem(row) for row in rows], rows.sha256)


def _problem(row: Row) -> Problem:
    fields = {key: row.text(key) for key in ("task_id", "prompt", "entry_point", "test")}
    return Problem(
        name=fields["task_id"],
        language="python",
        prompt=lambda shots: fields["prompt"],
        is_finished=functools.partial(contains_any, stops=HUMANEVAL_STOPS),
        code=functools.partial(humaneval_code, fields),
    )
