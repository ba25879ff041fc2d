"""Generated code, run against tests: sample, truncate, run in a sandbox, count what passes."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from braidlm.core.console import say, warn
from braidlm.core.errors import BraidError
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.formats.options import TaskItems
from braidlm.evals.results import Part, TaskResult
from braidlm.evals.sandbox.languages import LANGUAGES, CodeEnvironment, TestedCode, open_code_environment
from braidlm.evals.scoring.scorer import ProgressCallback
from braidlm.evals.statistics import INFLUENCE, set_influences

if TYPE_CHECKING:  # `braid list tasks` does not import torch
    from braidlm.core.decoding.decoder import Sampling
    from braidlm.evals.scoring.completions import Completion

KS = (1, 10, 100)
MAX_TOKENS = 512
SEED = 0
MAX_FAILURE_KINDS = 8
"""Kinds of failure in a result's notes."""


@dataclass(frozen=True)
class Problem:
    """A prompt, and how its completion becomes a program with tests."""

    name: str
    language: str
    prompt: Callable[[int | None], str]
    """The prompt with this many examples before it; None for the default number."""
    is_finished: Callable[[str], bool]
    code: Callable[[str], TestedCode]


@dataclass
class CodeProblems(TaskItems[Problem]):
    def check(self, settings: Settings) -> None:
        """Refuse settings that would fail later, before any model runs."""
        if not settings.allow_code_execution:
            what = "this task runs programs that the model writes, and that has not been allowed"
            todo = "Say `--allow-code-execution`: they run in a sandbox, and the documentation says what it enforces."
            raise BraidError(what, "code execution", todo)
        self.items[0].prompt(settings.shots)
        _sampling(settings)
        if settings.code_temperature == 0 and settings.code_samples > 1:
            what = f"at temperature 0 all {settings.code_samples} samples of a problem are the same"
            raise BraidError(what, todo="Take one sample (`--code-samples 1`), or a temperature above 0.")

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """pass@1 in percent, the mean over languages; pass@10 and pass@100 beside it where there are samples enough."""
        self.check(model.settings)
        languages = list(dict.fromkeys(problem.language for problem in self.items))
        with open_code_environment(languages, model.settings.code_isolation) as environment:
            sandbox = environment.sandbox
            say(f"programs run in a sandbox of {sandbox.name}")
            if sandbox.failures:
                warn(f"the sandbox does not prevent {', '.join(sandbox.failures)}")
            if shared := [language.name for language in environment.languages.values() if not language.tests_apart]:
                say(f"tests of {', '.join(shared)} run in the program's process: a program made to cheat could pass")
            problems = [problem for problem in self.items if problem.language in environment.languages]
            completions, truncated = _completions(problems, model, advance)
            failures = _failures(problems, completions, environment)
        return _result(task, problems, failures, completions, environment, model.settings, truncated)


def _sampling(settings: Settings) -> "Sampling":
    from braidlm.core.decoding.decoder import Sampling

    return Sampling(settings.code_temperature, top_p=settings.code_top_p, seed=SEED)


def _completions(
    problems: Sequence[Problem], model: EvaluatedModel, advance: ProgressCallback | None
) -> "tuple[list[list[Completion]], int]":
    """The samples of each problem, and how many prompts were truncated."""
    from braidlm.evals.scoring.completions import complete, prompt_ids, token_budget

    budget, settings = token_budget(model, MAX_TOKENS), model.settings
    prompts = [prompt_ids(model.tokenizer, problem.prompt(settings.shots), settings.pauses) for problem in problems]
    fitted, count = [budget.fit(ids) for ids in prompts], settings.code_samples
    repeated = [ids for ids in fitted for _ in range(count)]
    is_finished = [problem.is_finished for problem in problems for _ in range(count)]
    completions = complete(model, repeated, budget.new, is_finished, _sampling(settings), advance)
    truncated = sum(len(ids) < len(before) for ids, before in zip(fitted, prompts, strict=True))
    return [completions[start : start + count] for start in range(0, len(completions), count)], truncated


def _failures(
    problems: Sequence[Problem], completions: "Sequence[Sequence[Completion]]", environment: CodeEnvironment
) -> list[list[str]]:
    """Why each sample of each problem failed; empty where it passed. Equal programs are run once."""
    pairs = zip(problems, completions, strict=True)
    sources = [[(problem.language, problem.code(each.text)) for each in samples] for problem, samples in pairs]
    distinct = list(dict.fromkeys(source for samples in sources for source in samples))
    tests = [environment.languages[language].test(code) for language, code in distinct]
    outcomes = environment.sandbox.run_all([test.program for test in tests])
    failure = {key: test.failure(out) for key, test, out in zip(distinct, tests, outcomes, strict=True)}
    return [[failure[source] for source in samples] for samples in sources]


def _result(
    task: str,
    problems: Sequence[Problem],
    failures: Sequence[Sequence[str]],
    completions: "Sequence[Sequence[Completion]]",
    environment: CodeEnvironment,
    settings: Settings,
    truncated_prompts: int,
) -> TaskResult:
    samples = settings.code_samples
    languages = [problem.language for problem in problems]
    passed = [sum(not reason for reason in reasons) for reasons in failures]
    rates: dict[int, dict[str, np.ndarray]] = {}
    for k in [k for k in KS if k <= samples]:
        each = np.array([100 * pass_at_k(samples, count, k) for count in passed])
        rates[k] = {name: each[[other == name for other in languages]] for name in dict.fromkeys(languages)}
    means = {k: float(np.mean([values.mean() for values in rates[k].values()])) for k in rates}
    errors = [values.var(ddof=1) / len(values) for values in rates[1].values() if len(values) > 1]
    parts = {
        LANGUAGES[name].name + ("" if k == 1 else f", pass@{k}"): Part(float(values.mean()), len(values))
        for k in (rates if len(rates[1]) > 1 or environment.missing else ())
        for name, values in rates[k].items()
    }
    kinds = Counter(kind(reason) for reasons in failures for reason in reasons if reason)
    notes = {
        "samples": samples,
        "temperature": settings.code_temperature,
        "top_p": settings.code_top_p,
        "failures": dict(kinds.most_common(MAX_FAILURE_KINDS)),
        "unfinished": sum(completion.stopped == "limit" for some in completions for completion in some),
        "prompts cut": truncated_prompts,
        "not run": environment.missing,
        "sandbox": environment.sandbox.statement,
        "tests": {LANGUAGES[name].name: LANGUAGES[name].trust(environment.sandbox) for name in rates[1]},
    }
    weights = dict.fromkeys(rates[1], 1 / len(rates[1]))
    influences = set_influences([100 * count / samples for count in passed], languages, weights)
    items = {"problem": [problem.name for problem in problems], "failures": list(map(list, failures))}
    # The error of the mean over languages of means over problems.
    error = math.sqrt(sum(errors) / len(errors) ** 2) if len(errors) == len(rates[1]) else None
    also = {f"pass@{k}": mean for k, mean in means.items() if k > 1}
    fields: dict[str, Any] = {"parts": parts, "also": also, "notes": notes, "items": {**items, INFLUENCE: influences}}
    return TaskResult(task, "pass@1, %", means[1], len(problems), error, chance=0.0, **fields)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """1 - C(samples - passed, k) / C(samples, k): the unbiased estimate of pass@k (Chen and others, 2021).

    It is computed as a product of ratios below 1, because the binomials themselves overflow.
    """
    if not 0 <= passed <= samples:
        raise ValueError(f"{passed} of {samples} samples cannot have passed")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples")
    if samples - passed < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - passed + 1, samples + 1)))


def kind(reason: str) -> str:
    """The kind of a failure: the exception's name for Python's, else the first words."""
    head, _, rest = reason.partition(": ")
    return rest.partition(":")[0].strip() if head.startswith("ended with") and rest else head
