"""`braid train --multirun`: one run for each combination of `key=a,b,c`, by Hydra's own sweeper and launchers.

Lists, `range(1,5)` and `choice(a,b)` mean what Hydra says they mean, and `hydra/launcher=NAME` runs the combinations
elsewhere. Each run has its own folder, so the same command again resumes what is not finished. The table of all runs in
the sweep's folder is written anew after every run, so that a crash loses nothing and later combinations add rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from braidlm.core import console
from braidlm.core.errors import BraidError, collecting
from braidlm.core.files import LockedError, make_folder, write_json
from braidlm.core.hydra_changes import hydra_in
from braidlm.core.jobs import Jobs, open_jobs
from braidlm.core.recipes import compose_recipe, hydra_overrides, is_study, quoted, recipe_root
from braidlm.model.config.strict import encode
from braidlm.studies.decoding import decode_study
from braidlm.studies.gather import PAGE, gather_runs, show_runs
from braidlm.studies.report import study
from braidlm.studies.results import FAILURES, ModelResult, has_runs, read_runs
from braidlm.studies.running import check_one_process, check_variants, train_to_end
from braidlm.studies.study import Study
from braidlm.training.recipe import decode_recipe

NUMBER = "combination"
"""The only key of what Hydra composes for its launchers: the number of a combination, whose recipe is composed here."""


@dataclass
class SweepRun:
    """One combination."""

    label: str
    """Its varied overrides: `key=value,key=value`."""
    folder: Path
    """`<the recipe's folder>/<label>`."""
    recipe: dict[str, Any]
    failed: bool = False


def sweep(
    recipe: str, overrides: list[str], device: str | None = None, fresh: bool = False, cluster: str | None = None
) -> list[SweepRun]:
    """Run every combination, one after another unless a launcher or a `cluster` (`ray` or `ray:ADDRESS`) says
    otherwise; one that fails stops no other."""
    check_one_process("--multirun does not run under torchrun", "Start torchrun once for each combination.")
    runs = plan_sweep(recipe, overrides)
    check_variants({run.label: run.recipe for run in runs}, fresh, "out=DIR is another folder for the sweep.")
    own = [override.input_line for override in _parsed(overrides) if override.is_hydra_override()]
    launcher = next((line for line in own if line.startswith(("hydra/launcher", "hydra.launcher"))), None)
    if cluster is not None and launcher is not None:
        what = f"jobs go to a cluster or to Hydra's launcher: {launcher}"
        raise BraidError(what, "--cluster", "Leave out one of them.")

    def one(number: int, fresh: bool, jobs: Jobs) -> Any:
        title = f"Run {number + 1} of {len(runs)}: {runs[number].label}"
        return jobs.start(title, _run, number, runs[number], title, device, jobs.is_remote, fresh=fresh)

    if cluster is None:
        failed = _launch(own, runs, lambda config: one(config[NUMBER], fresh, Jobs()))
    else:
        sweep_folder = runs[0].folder.parent
        with open_jobs(cluster, sweep_folder, device) as jobs:
            failed = set(jobs.results([one(number, fresh, jobs) for number in range(len(runs))])) - {None}
        gather_runs([sweep_folder], sweep_folder)
    for number in failed:
        runs[number].failed = True
    return runs


def _run(number: int, run: SweepRun, title: str, device: str | None, remote: bool, fresh: bool) -> int | None:
    """Train one combination; returns its number if the training failed."""
    console.say(title)
    sweep_folder = run.folder.parent
    failure = sweep_folder / FAILURES / f"{run.label}.json"
    try:
        if is_study(run.recipe):
            study(decode_study(run.recipe), device=device, fresh=fresh)
        else:
            train_to_end(run.recipe, device, fresh)
        failure.unlink(missing_ok=True)
        return None
    except BraidError as error:
        if remote and isinstance(error, LockedError):
            raise  # a lost process may hold the folder for a while
        console.error([f"{run.label}: {error.lines()[0]}", *error.lines()[1:]])
        make_folder(failure.parent)
        write_json(failure, {"error": error.what.split("\n")[0], "recipe": run.recipe})
        return number
    finally:
        if has_runs(sweep_folder):
            gather_runs([sweep_folder], sweep_folder)  # those of earlier sweeps too


def plan_sweep(recipe: str, overrides: list[str]) -> list[SweepRun]:
    """Every combination, with its recipe composed and checked before any run begins."""
    try:
        parsed = [override for override in _parsed(overrides) if not override.is_hydra_override()]
        (combinations,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise BraidError(f"these overrides cannot be swept: {str(error).splitlines()[0]}") from error
    varied = {override.get_key_element() for override in parsed if override.is_sweep_override()}
    if not varied:
        todo = "Give several values: training.optimizer.lr=0.001,0.003"
        raise BraidError("--multirun needs something to vary", todo=todo)
    runs: list[SweepRun] = []
    problems: list[str] = []
    for combination in combinations:
        values = OverridesParser.create().parse_overrides(combination)
        named = [f"{one.key_or_group}={one.value()}" for one in values if one.get_key_element() in varied]
        label = quote(",".join(named), safe="=,+ ")
        with collecting(problems, f"{label}: "):
            data = compose_recipe(recipe, combination)
            loaded = decode_study(data) if is_study(data) else decode_recipe(data, recipe)
            folder = Path((loaded if isinstance(loaded, Study) else loaded.recipe).folder) / label
            content = encode(loaded) if isinstance(loaded, Study) else loaded.as_dict()
            runs.append(SweepRun(label, folder, content | {"out": str(folder)}))
    if problems:
        raise BraidError("\n".join(problems), todo="Nothing was started.")
    return runs


def _parsed(overrides: list[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(hydra_overrides(overrides, sweeps=True))


def _launch(own: list[str], runs: list[SweepRun], one: Callable[[Any], int | None]) -> set[int]:
    """Pass the numbers of the combinations to Hydra's launcher; returns the numbers of those that failed. Hydra
    composes a configuration of the number alone, so that no recipe can name what launchers and callbacks run."""
    settings = [
        f"hydra.sweep.dir={quoted(str(runs[0].folder.parent))}",
        "hydra.sweep.subdir='.'",  # a run creates its own folder after its checks
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
        *own,
        f"+{NUMBER}={','.join(map(str, range(len(runs))))}",
    ]
    with hydra_in(recipe_root(), {NUMBER}):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        returned = hydra.multirun(None, one, settings, with_log_configuration=False)
    return {job.return_value for batch in returned or [] for job in batch} - {None}


def swept(runs: list[SweepRun]) -> list[ModelResult]:
    """What the runs of a sweep have recorded, the runs of its studies included."""
    records = read_runs(list(dict.fromkeys(run.folder.parent for run in runs)))  # several where names are varied
    return [one for one in records if any(one.folder.is_relative_to(run.folder) for run in runs)]


def show_sweep(runs: list[SweepRun]) -> None:
    """The table at the end of a sweep: its own runs; the files have the runs of earlier sweeps too."""
    folder = runs[0].folder.parent
    show_runs(swept(runs), f"Runs in {folder}")
    console.show(f"{folder}/{PAGE}")
