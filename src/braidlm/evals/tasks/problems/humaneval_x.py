"""HumanEval-X: the problems of HumanEval in five languages."""

import functools
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.evals.files.json_rows import Row, rows_of
from braidlm.evals.files.text_files import unpacked_files
from braidlm.evals.formats.code_problems import CodeProblems, Problem
from braidlm.evals.formats.code_texts import FUNCTIONS, x_code, x_is_finished
from braidlm.evals.sandbox.languages import LANGUAGES
from braidlm.evals.tasks.problems.humaneval import CODE_SETTINGS
from braidlm.evals.tasks.task import TASKS, Task

EXAMPLE = '{"task_id": "CPP/0", "prompt": "int f(int x){\\n", "test": "int main(){ ... }"}'
PREFIX = "humaneval_"
OWN_KEYS = {"go": ("import", "test_setup")}
"""Fields of a language's rows beside prompt and test; their values may be empty."""


@TASKS.register("humaneval_x")
class HumanEvalX(Task):
    """Zheng and others (2023), "CodeGeeX": code generation, cut and tested as in its repository."""

    description = "HumanEval in Python, C++, Java, JavaScript and Go, run against tests (needs --allow-code-execution)"
    size = "164 problems in each of 5 languages"
    licence = "Apache 2.0"
    metric = "pass@1, % (mean over the languages that could be run)"
    locations = ("maths-and-code/humaneval-x", "humaneval-x", "CodeGeeX/codegeex/benchmark/humaneval-x")
    fetch = "`git clone https://github.com/THUDM/CodeGeeX DATA/CodeGeeX` gets it."
    version = 2  # tests run apart from programs
    uses = CODE_SETTINGS

    def open(self, path: Path) -> CodeProblems:
        files = unpacked_files(path, f"{PREFIX}*.jsonl")
        known = [file for file in files if file.stem.removeprefix(PREFIX) in LANGUAGES]
        if not known:
            raise BraidError(
                f"none of these files is of a language that can be run: {', '.join(file.name for file in files)}",
                str(path),
                f"Files are {PREFIX}NAME.jsonl, with NAME one of {', '.join(LANGUAGES)}.",
            )
        rows = rows_of(known, path, EXAMPLE)
        return CodeProblems([_problem(row, row.stem.removeprefix(PREFIX)) for row in rows], rows.sha256)


def _problem(row: Row, language: str) -> Problem:
    fields = {key: row.text(key) for key in ("task_id", "prompt", "test")}
    for key in OWN_KEYS.get(language, ()):
        if not isinstance(row.fields.get(key), str):
            raise row.error(f"there is no text '{key}'")
        fields[key] = row.fields[key]
    if language in FUNCTIONS and not FUNCTIONS[language].search(fields["prompt"]):
        raise row.error("there is no beginning of a function in 'prompt'")
    return Problem(
        name=fields["task_id"],
        language=language,
        prompt=lambda shots: fields["prompt"],
        is_finished=functools.partial(x_is_finished, language),
        code=functools.partial(x_code, language, fields),
    )
