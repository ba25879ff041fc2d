"""Tasks of lm-evaluation-harness, run through its Python interface on the model in memory: `harness:NAME` in tables.

A task of the harness comes with its package and gets its data from the Hub. Tasks of your own, or copies of its tasks
that read local files, are YAML files in a folder, which is then searched first.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.results import Part, TaskResult
from braidlm.evals.scoring.scorer import ProgressCallback

PREFIX = "harness:"
PERCENT = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "f1", "em")
"""Metrics that the harness gives as fractions and that are shown in percent, like all accuracies here."""
PREFERRED = "acc_norm"
"""The metric that is the score where a task has it; else the score is the first of its metrics."""
RESAMPLES = 1000
"""Bootstrap samples for the standard errors of metrics that have no formula."""
Values = dict[str, tuple[float, float | None]]
"""The value and the standard error of each metric."""
FEWSHOT_SEED = 1234
"""The harness's own default."""


@dataclass
class HarnessTask:
    """One task (or group, or tag) of the harness with its data open."""

    name: str
    loaded: Any
    """The tasks and groups that its TaskManager loaded for the name."""
    sha256: str
    """The hash of all requests: prompts with their examples, options, generation settings."""

    @property
    def tasks(self) -> dict[str, Any]:
        return self.loaded["tasks"]

    @property
    def count(self) -> int:
        return sum(len(task.eval_docs) for task in self.tasks.values())

    @property
    def about(self) -> dict[str, Any]:
        import lm_eval

        task = next(iter(self.tasks.values()))
        kinds = sorted({str(each.OUTPUT_TYPE) for each in self.tasks.values()})
        return {
            "description": f"lm-evaluation-harness {lm_eval.__version__}, {', '.join(kinds)}",
            "metric": shown_name(headline(list(task.higher_is_better()))),
            "licence": "that of its data set",
            "version": f"{lm_eval.__version__}/{task.VERSION}",
        }

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        from lm_eval import evaluator

        from braidlm.evals.harness.model import HarnessModel

        os.environ["DISABLE_MULTIPROC"] = "1"  # the harness would fork a pool, with the model, for its bootstrap
        with silenced() as unsilenced:
            harness_model = HarnessModel(model, advance, unsilenced)
            output = evaluator.evaluate(harness_model, self.loaded, bootstrap_iters=RESAMPLES, log_samples=False)
        each = {name: _values(output["results"][name]) for name in self.tasks}
        own = _values(output["results"].get(self.name, {})) or _mean(list(each.values()))
        chosen = headline(list(own))
        kind = chosen.partition(",")[0]
        counts = {name: int(output["n-samples"][name]["effective"]) for name in self.tasks}
        parts = {name: Part(values[chosen][0], counts[name]) for name, values in each.items() if chosen in values}
        return TaskResult(
            task=task,
            metric=shown_name(chosen),
            score=own[chosen][0],
            count=sum(counts.values()),
            standard_error=own[chosen][1],
            higher_is_better=all(one.higher_is_better().get(kind, True) for one in self.tasks.values()),
            chance=self._chance() if kind in ("acc", "acc_norm", "acc_bytes") else None,
            parts=parts if len(each) > 1 else {},
            also={shown_name(name): value for name, (value, _) in own.items() if name != chosen},
            notes={"shots": max(int(shots) for shots in output["n-shot"].values()), **harness_model.too_long},
        )

    def _chance(self) -> float | None:
        """The score of guessing among the options, over all questions."""
        if any(task.OUTPUT_TYPE != "multiple_choice" for task in self.tasks.values()):
            return None
        counts = [Counter(instance.doc_id for instance in task.instances) for task in self.tasks.values()]
        guesses = [1 / count for options in counts for count in options.values()]
        return 100 * sum(guesses) / len(guesses)


def open_harness(name: str, folder: Path | str | None = None, shots: int | None = None) -> HarnessTask:
    """Load a task of the harness, its data and its requests; `folder` holds task files of your own."""
    where = f"{PREFIX}{name}"
    manager, state = _manager_for(name, folder, where), random.getstate()
    random.seed(0)  # for tasks that use Python's random numbers
    try:
        with silenced():
            loaded = manager.load([name])
            for task in loaded["tasks"].values():  # examples and requests, as the harness's own command sets them up
                default = task.get_config("num_fewshot")
                if default is None or (shots is not None and default != 0):
                    task.set_config("num_fewshot", shots or 0)
                task.set_fewshot_seed(seed=FEWSHOT_SEED)
                task.build_all_requests()
    except Exception as error:  # a task may run the code of any package
        what = next(iter(str(error).strip().splitlines()), type(error).__name__)
        todo = "Its data comes from the Hub. Offline, give a folder with a task file that reads local files "
        todo += "(`dataset_path: json`): `--harness-tasks FOLDER`."
        raise BraidError(f"this task of lm-evaluation-harness cannot be opened: {what}", where, todo) from error
    finally:
        random.setstate(state)
    digest = hashlib.sha256()
    for task_name, task in sorted(loaded["tasks"].items()):
        if getattr(task, "UNSAFE_CODE", False):
            what = "this task of lm-evaluation-harness runs programs that the model writes, without a sandbox"
            raise BraidError(what, where, "Braid's own tasks run them in a sandbox: `braid list tasks`.")
        digest.update(f"{task_name} {task.VERSION}\n".encode())
        for instance in task.instances:
            request = [instance.request_type, list(instance.args), str(task.doc_to_target(instance.doc))]
            digest.update(json.dumps(request, sort_keys=True, default=str).encode())
    return HarnessTask(name, loaded, digest.hexdigest())


def headline(metrics: list[str]) -> str:
    """The metric that is the score; metrics may have a filter behind a comma."""
    return next((name for name in metrics if name.partition(",")[0] == PREFERRED), metrics[0])


def shown_name(metric: str) -> str:
    """`acc,none` as `acc, %`."""
    name, _, of = metric.partition(",")
    return name + (f" ({of})" if of not in ("", "none") else "") + (", %" if name in PERCENT else "")


@contextlib.contextmanager
def silenced() -> Iterator[Callable[[], contextlib.AbstractContextManager]]:
    """Suppress the harness's output; yields a context manager in which output is shown again."""
    out, error = sys.stdout, sys.stderr

    @contextlib.contextmanager
    def unsilenced() -> Iterator[None]:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            yield

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield unsilenced


def _manager_for(name: str, folder: Path | str | None, where: str) -> Any:
    """A TaskManager that has the task: with the folder's tasks alone if that is enough."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        todo = "`pip install 'braidlm[eval]'` gets it."
        raise BraidError("lm-evaluation-harness is not installed", where, todo) from None
    if folder is not None and not Path(folder).is_dir():
        raise BraidError("there is no such folder of task files", str(folder))
    for defaults in (False, True) if folder is not None else (True,):
        manager = _manager(None if folder is None else str(Path(folder).absolute()), defaults)
        if name in (known := manager.all_tasks):
            return manager
    similar = [each for each in known if each[:2] == name[:2]]  # there are thousands of names
    nearest = did_you_mean(name, similar) if len(known) < 50 or similar else ""
    raise BraidError(f"lm-evaluation-harness has no task '{name}'.{nearest}", where)


@functools.lru_cache(maxsize=4)
def _manager(folder: str | None, defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    with silenced():
        return TaskManager(include_path=folder, include_defaults=defaults)


def _values(results: dict[str, Any]) -> Values:
    """The value and the standard error of each metric, in percent where `PERCENT` says so."""
    values: Values = {}
    for key, value in results.items():
        name, comma, of = key.partition(",")
        if comma and not name.endswith("_stderr") and isinstance(value, (int, float)):
            scale, error = 100.0 if name in PERCENT else 1.0, results.get(f"{name}_stderr,{of}")
            values[key] = (scale * value, scale * error if isinstance(error, (int, float)) else None)
    return values


def _mean(each: list[Values]) -> Values:
    """The means over the tasks of a tag, for which the harness has no aggregate."""
    if len(each) == 1:
        return each[0]
    shared = [key for key in each[0] if all(key in values for values in each)]
    return {key: (sum(values[key][0] for values in each) / len(each), None) for key in shared}
