"""`braid train --multirun`: one run for each combination of `key=a,b,c`, by Hydra's own sweeper and launchers.

Lists, `range(1,5)` and `choice(a,b)` mean what Hydra says they mean, and `hydra/launcher=NAME` runs the combinations
elsewhere. Each run has its own folder, so the same command again resumes what is not finished. The table of all runs in
the sweep's folder is written anew after every run, so that a crash loses nothing and later combinations add rows.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from braidlm.core import console
from braidlm.core.errors import BraidError, collecting
from braidlm.core.files import make_folder, write_json
from braidlm.core.hydra_changes import hydra_in
from braidlm.core.recipes import changed_keys, compose_recipe, find_recipe, hydra_overrides, quoted
from braidlm.model.config.strict import encode
from braidlm.studies.decoding import decode_study, is_study
from braidlm.studies.report import study
from braidlm.studies.variants.run_record import FAILURES, RunRecord, has_runs, read_runs
from braidlm.studies.variants.run_table import PAGE, gather_runs, show_runs
from braidlm.training.recipe import decode_recipe
from braidlm.training.run_folder import check_folder
from braidlm.training.train import train


@dataclass
class SweepRun:
    """One combination."""

    overrides: list[str]
    label: str
    """Its varied overrides: `key=value,key=value`."""
    folder: Path
    """`<the recipe's folder>/<label>`."""
    recipe: dict[str, Any]
    """Resolved."""
    failed: bool = False


def sweep(
    recipe: str,
    overrides: list[str],
    device: str | None = None,
    fresh: bool = False,
) -> list[SweepRun]:
    """Run every combination, one after another unless a launcher says otherwise; one that fails stops no other."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise BraidError("--multirun does not run under torchrun", todo="Start torchrun once for each combination.")
    path = find_recipe(recipe)
    runs = plan_sweep(str(path), overrides)
    _check_folders(runs, fresh)
    planned = {run.label: run for run in runs}
    varied = _varied(overrides)

    def one(config: Any) -> str | None:
        """Train one combination, which was composed when the sweep was planned; returns its label if it failed."""
        hydra = HydraConfig.get()
        label = _label(hydra.overrides.task, varied)
        console.say(f"Run {hydra.job.num + 1} of {len(planned)}: {label}")
        run = planned[label]
        sweep_folder = run.folder.parent
        failure = sweep_folder / FAILURES / f"{label}.json"
        try:
            _train(run.recipe, device, fresh)
            failure.unlink(missing_ok=True)
            return None
        except BraidError as error:
            console.error([f"{label}: {error.lines()[0]}", *error.lines()[1:]])
            make_folder(failure.parent)
            write_json(failure, {"error": error.what.split("\n")[0], "recipe": run.recipe})
            return label
        finally:
            if has_runs(sweep_folder):
                gather_runs([sweep_folder], sweep_folder)  # those of earlier sweeps too

    _check_hydra(path, overrides, runs[0].overrides)
    failed = _launch(path, overrides, runs[0].folder.parent, one)
    for run in runs:
        run.failed = run.label in failed
    return runs


def plan_sweep(recipe: str, overrides: list[str]) -> list[SweepRun]:
    """Every combination, with its recipe composed and checked before any run begins."""
    parser = OverridesParser.create()
    try:
        parsed = [o for o in parser.parse_overrides(hydra_overrides(overrides)) if not o.is_hydra_override()]
        (combinations,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise BraidError(f"these overrides cannot be swept: {str(error).splitlines()[0]}") from error
    varied = _varied(overrides)
    if not varied:
        raise BraidError(
            "--multirun needs something to vary", todo="Give several values: training.optimizer.lr=0.001,0.003"
        )
    runs, problems = [], []
    for combination in combinations:
        label = _label(combination, varied)
        try:
            folder, content = _load(recipe, combination)
            runs.append(SweepRun(combination, label, folder / label, content | {"out": str(folder / label)}))
        except BraidError as error:
            problems += [f"{label}: {line}" for line in error.what.split("\n")]
    if problems:
        raise BraidError("\n".join(problems), todo="Nothing was started.")
    return runs


def _load(recipe: str, overrides: list[str]) -> tuple[Path, dict[str, Any]]:
    """The folder and the content of a checked recipe, of a run or of a study."""
    data = compose_recipe(recipe, overrides)
    if is_study(data):
        loaded = decode_study(data)
        return loaded.folder, encode(loaded)
    run = decode_recipe(data, recipe)
    return Path(run.recipe.folder), run.as_dict()


def _train(content: dict[str, Any], device: str | None, fresh: bool) -> None:
    """Train a run, or run a study and write its report; stopping one stops the sweep."""
    if is_study(content):
        study(decode_study(content), device=device, fresh=fresh)
    elif (stopped_by := train(content, device=device, fresh=fresh).stopped_by) is not None:
        raise stopped_by


def _check_folders(runs: list[SweepRun], fresh: bool) -> None:
    """Refuse combinations whose folders hold other runs: the sweep's own label has only what this command varies."""
    problems: list[str] = []
    for run in runs:
        own: list[str] = []
        with collecting(own):
            if not is_study(run.recipe):  # each run of a study checks its own folder
                check_folder(run.folder, run.recipe, fresh)
        problems += [f"{run.label}: {problem}" for problem in own]
    if problems:
        raise BraidError("\n".join(problems), todo="Nothing was started. out=DIR is another folder for the sweep.")


def show_sweep(runs: list[SweepRun]) -> None:
    """The table at the end of a sweep: its own runs; the files have those of earlier sweeps too."""
    folder = runs[0].folder.parent
    show_runs(swept(runs), f"Runs in {folder}")
    console.show(f"{folder}/{PAGE}")


def swept(runs: list[SweepRun]) -> list[RunRecord]:
    """What the runs of a sweep have recorded; those of studies too."""
    records = read_runs(list(dict.fromkeys(run.folder.parent for run in runs)))  # several where names are varied
    return [one for one in records if any(one.folder.is_relative_to(run.folder) for run in runs)]


def _varied(overrides: list[str]) -> set[str]:
    """The keys, as Hydra writes them, that have several values."""
    parsed = OverridesParser.create().parse_overrides(hydra_overrides(overrides))
    return {o.get_key_element() for o in parsed if o.is_sweep_override()}


def _label(overrides: list[str], varied: set[str]) -> str:
    """The varied overrides of a combination as a unique folder name."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    kept = [f"{o.key_or_group}={o.value()}" for o in parsed if o.get_key_element() in varied]
    return quote(",".join(kept), safe="=,+ ")


def _check_hydra(path: Path, overrides: list[str], combination: list[str]) -> None:
    """Refuse a recipe whose defaults list reaches Hydra's own settings: a launcher or callback names what to run.

    The user's own overrides may set them.
    """
    parsed = OverridesParser.create().parse_overrides(hydra_overrides(overrides))
    own = [override.input_line for override in parsed if override.is_hydra_override()]
    with hydra_in(path.parent, changed_keys(overrides)):
        recipe = _hydra_settings(path.stem, [*own, *combination])
        nothing = _hydra_settings(None, own)
    if recipe != nothing:
        raise BraidError("this recipe configures Hydra", str(path), "Give Hydra's settings on the command line.")


def _hydra_settings(name: str | None, overrides: list[str]) -> dict[str, Any]:
    """Hydra's own settings, without those that say which configuration and overrides they belong to."""
    settings: Any = OmegaConf.to_container(compose(name, overrides, return_hydra_config=True).hydra)
    settings["job"] = {key: value for key, value in settings["job"].items() if not key.startswith(("config", "over"))}
    return {key: value for key, value in settings.items() if key not in ("overrides", "runtime")}


def _launch(path: Path, overrides: list[str], folder: Path, one: Callable[[Any], str | None]) -> set[str]:
    """Pass the combinations to Hydra's launcher; returns the labels of runs that failed."""
    settings = [
        f"hydra.sweep.dir={quoted(str(folder))}",
        "hydra.sweep.subdir='.'",  # a run creates its own folder after its checks
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]
    with hydra_in(path.parent, changed_keys(overrides)):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        returned = hydra.multirun(
            path.stem, one, [*settings, *hydra_overrides(overrides)], with_log_configuration=False
        )
    return {job.return_value for batch in returned or [] for job in batch} - {None}
