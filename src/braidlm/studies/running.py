"""Running a study: every step a job that waits for those that it reads, each resumed where the last call left it.

A folder that was made of the same models in the same way is used again.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from braidlm.core import console
from braidlm.core.devices import check_training_fits
from braidlm.core.errors import BraidError, collecting
from braidlm.core.files import locked_folder, write_yaml
from braidlm.core.jobs import Jobs
from braidlm.core.models.accounting import CountedModel
from braidlm.core.models.folders import load_lineage
from braidlm.core.models.integrity import model_hash
from braidlm.core.models.runs import RECIPE, is_run, newest_checkpoint
from braidlm.core.reading import read_yaml
from braidlm.core.recipes import is_study
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.open_data import OpenData, open_data
from braidlm.data.loading.streams import Subset
from braidlm.data.packing.tokenizer_choice import DEFAULT_VOCAB_SIZE
from braidlm.edits.compose import compose
from braidlm.edits.edit import edit
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.strict import decode, encode
from braidlm.opening.names import find_model, title_of
from braidlm.opening.open import open_model
from braidlm.studies.decoding import TrainedModel, check_study, errors_of
from braidlm.studies.steps import AverageStep, ComposeStep, DistilStep, EditStep, decode_edit
from braidlm.studies.study import Study
from braidlm.training.amounts import Amount
from braidlm.training.features.distill.teachers import TEACHER
from braidlm.training.recipe import decode_recipe
from braidlm.training.run_folder import check_folder
from braidlm.training.train import Run, train

SCORES = "scores"
"""The folder, in that of a study, of what each model costs and reaches."""
REPORTED = ("report.html", "results.json", "tables", "routes", SCORES)
"""What is said of models that `fresh` removes: a study that is stopped before its end would be read as finished."""


def check_one_process(what: str, todo: str) -> None:
    """Refuse to run several trainings as one of several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BraidError(what, todo=todo)


def run_study(
    study: Study,
    device: str | None = None,
    fresh: bool = False,
    data: OpenData | None = None,
    jobs: Jobs | None = None,
    score: Callable[[TrainedModel], Any] | None = None,
) -> list[TrainedModel]:
    """Do whatever steps are not done yet; returns every model in order. `data` is the study's data where it is open
    already; otherwise it is prepared and opened. `jobs` are where the steps run, here unless given. Each model is given
    to `score` as soon as it is there."""
    todo = "Its runs can be trained on several GPUs one by one, each a recipe; --cluster trains each on a node."
    check_one_process("a study runs in one process", todo)
    jobs = jobs or Jobs()
    check_study(study, device, here=not jobs.is_remote)
    for name, step in study.steps.items():
        jobs.check_gpus(step.gpus or 0, f"steps.{name}.gpus")
    with locked_folder(study.folder, "train", "with out=DIR"):
        for entry in (study.folder / name for name in REPORTED if fresh):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        return _do_steps(study, device, fresh, data, jobs, score)


def _do_steps(
    study: Study,
    device: str | None,
    fresh: bool,
    data: OpenData | None,
    jobs: Jobs,
    score: Callable[[TrainedModel], Any] | None,
) -> list[TrainedModel]:
    """Start every step that is not done yet, and wait for what they make; the study's folder is locked."""
    opened = open_data(study.data_config, study.validation.half) if data is None else data
    runner = _Runner(study, device, opened, jobs.is_remote, fresh)
    late = [name for name in study.order if study.is_late(name)]  # they need all seeds of others
    steps = [(n, s) for s in study.seeds for n in study.order if n not in late and s in study.seeds_of(n)]
    for name in late:
        steps += [(name, seed) for seed in study.seeds_of(name)[: 1 if study.is_once(name) else None]]
    made: dict[tuple[str, int | None], Any] = {}  # by step and seed (None for an average of all), what jobs will return
    scores: list[Any] = []
    for name, seed in steps:
        step, is_once = study.steps[name], study.is_once(name)
        for other in step.reads:
            if other not in study.steps and (other, seed) not in made:
                with errors_of(name):
                    folder = find_model(other)
                made[other, seed] = TrainedModel(title_of(folder), "given", seed, folder)
        read = study.members(name) if is_once else [(other, seed) for other in step.reads]
        parts = [made[key if key in made else (key[0], None)] for key in read]
        cpus = None if step.train is None else study.options_of(name).get("threads")
        asked = {"gpus": step.gpus if step.train is not None else 0, "cpus": cpus}
        title = f"{name}, seed {seed}"
        model = jobs.start(title, runner.do, name, seed, *parts, fresh=fresh, **asked)
        made[name, None if is_once else seed] = model
        if score is not None:
            scores.append(jobs.start(f"scoring {title}", score, model))  # a job runs once under its name
    return jobs.results([*made.values(), *scores])[: len(made)]


POLL_SECONDS = 0.5
"""A job that is cancelled notices it so often: Ray interrupts Python code, and no system call that waits."""


@dataclass
class _Runner:
    study: Study
    device: str | None
    opened: OpenData | None
    remote: bool
    fresh: bool

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"opened": None}  # its files are mapped into memory; another process opens them itself

    @property
    def data(self) -> OpenData:
        if self.opened is None:
            with console.silence():
                self.opened = open_data(self.study.data_config, self.study.validation.half)
        return self.opened

    def do(self, name: str, seed: int, *models: TrainedModel, fresh: bool) -> TrainedModel:
        """Make the model that a step begins with from the models that it reads, then train it, or leave it as it is."""
        self.fresh = fresh  # False where a job is begun again
        with errors_of(name):
            return self._do(name, seed, list(models))

    def _do(self, name: str, seed: int, parts: list[TrainedModel]) -> TrainedModel:
        step, is_once = self.study.steps[name], self.study.is_once(name)
        folder = self.study.folder / name if is_once else self.study.folder / f"seed-{seed}" / name
        start = None
        if isinstance(step, (ComposeStep, AverageStep)):
            out = folder if step.train is None else folder.with_name(f"{name}-composed")
            names, options, sources = self.study.path_names(name), step.options(seed), [part.model for part in parts]
            said = f"{out.name}: {', '.join(names)}, joined by {options['join']['kind']}"
            start = _made(out, sources, options, said, lambda: compose(sources, out, names=names, **options))
        elif isinstance(step, EditStep):
            edits = [decode_edit(one, f"edit[{at}]") for at, one in enumerate(step.edit)]
            outs = [folder.with_name(f"{name}-{at}-{kind}") for at, (kind, _) in enumerate(edits, 1)]
            outs[-1] = folder if step.train is None else outs[-1]
            start = parts[0].model
            for (kind, chosen), out in zip(edits, outs, strict=True):
                start = self._edited(start, kind, chosen, out, seed)
        elif parts and not isinstance(step, DistilStep):
            start = parts[0].model
        if step.train is None:
            assert start is not None
            return TrainedModel(name, self.study.role(name), seed, start, parts=parts)
        run = self._train(name, folder, seed, start, parts)
        return TrainedModel(name, self.study.role(name), seed, run.model, run, parts)

    def _edited(self, start: Path, kind: str, chosen: Any, out: Path, seed: int) -> Path:
        """A model after one edit; a text that is a domain's name stands for the packed domain."""
        texts = {stream.name: stream.data.address for stream in self.data.train}
        chosen = replace(chosen, **{key: texts.get(text, text) for key, text in chosen.texts.items()})
        options = json.loads(json.dumps(asdict(chosen)))  # as the lineage has them
        is_same = not self.fresh and (load_lineage(out) or {}).get("made_by") == f"braid edit {kind}"
        said, known = f"{out.name}, seed {seed}: braid edit {kind}", {"seed": seed, **options}
        return _made(out, [start], known, said, lambda: edit(kind, start, out, **known), is_same)

    def _train(self, name: str, folder: Path, seed: int, start: Path | None, parts: list[TrainedModel]) -> Run:
        """Train what a step begins with; from models that were made anew it is trained anew."""
        study, step = self.study, self.study.steps[name]
        data: dict[str, Any] = {key: encode(getattr(study.data, key)) for key in ("length", "chunking", "order")}
        domains = study.domains_of(name)
        data["sets"] = {domain: self._set(domain, *study.part_of_text(name, domain)) for domain in domains}
        shares = study.training_of(name).domains
        if isinstance(shares, dict) and len(shares) > 1:
            data["mix"] = {"weights": shares}
        training, fresh, teachers = study.options_of(name), self.fresh, list[Path]()
        begin: dict[str, Any] = {"start_from": str(start)} if start is not None else {"model": study.model_of(name)}
        if isinstance(step, DistilStep):
            # At temperature 1 the members of an average of equal shares teach what the average does, and kernels know
            # them.
            average = study.steps[step.distil.teacher]
            is_equal = isinstance(average, AverageStep) and average.join.kind == "average"
            teachers = [parts[0].model]
            if is_equal and step.distil.temperature == 1:
                teachers = [part.model for part in parts[0].parts]
            training["distill"] = vars(step.distil) | {"teachers": list(map(str, teachers))}
            del training["distill"]["teacher"]
            fresh = fresh or not is_taught_by(folder, teachers)
        elif start is not None:
            fresh = fresh or not is_trained_from(folder, start)
        budget, amount = self._budget(name, data)
        recipe = {
            "name": f"{study.name} {name} (seed {seed})",
            "out": str(folder),
            "seed": seed,
            "licence": study.licence,
            "data": data,
            "training": {**training, "budget": str(budget)},
            **{key: encode(getattr(study, key)) for key in ("checkpoints", "validation", "samples", "log")},
            **begin,
        }
        console.say(f"\n{name}, seed {seed}: {amount}")
        if not fresh and is_run(folder):
            _follow_models(folder, start, teachers)
        if self.remote and (step.gpus or 0) > 1:
            _train_together(recipe, round(step.gpus or 0), self.device, fresh)
            fresh = False
        return train_to_end(recipe, self.device, fresh)

    def _set(self, domain: str, begin: float, end: float) -> dict[str, Any]:
        """A part of a prepared domain; the held-out documents are the same for every run."""
        spec = self.study.domains[domain]
        stream = next(one for one in self.data.train if one.name == domain)
        width = spec.subset.stop - spec.subset.start
        part = Subset(spec.subset.start + begin * width, spec.subset.start + end * width, spec.subset.seed)
        held_out = {"holdout": spec.holdout, "validation": spec.validation}
        if spec.has_validation:
            held = next(one for one in self.data.validation if one.name == domain)
            held_out = {"holdout": 0.0, "validation": held.data.address}
        return {"path": stream.data.address, "subset": encode(part), **held_out}

    def _budget(self, name: str, data: dict[str, Any]) -> tuple[Amount, str]:
        """How much a step is trained, and the amount in words: all tokens of an epoch, or the chunking's words."""
        budget, epochs = self.study.training_of(name).budget, self.study.epochs_of(name)
        if budget is not None:
            return budget, f"{console.count(budget.count)} {budget.unit}"
        streams = open_data(decode(DataConfig, data)).train
        chunking, length = chunkings.build(self.study.data.chunking), self.study.data.length
        words, tokens = chunking.words_per_epoch, sum(chunking.tokens(stream, length) for stream in streams)
        epoch = Amount(tokens, "tokens") if words is None else Amount(words * len(streams), "words")
        amount = Amount(max(1, round(epochs * epoch.count)), epoch.unit)
        return amount, f"{epochs:g} x {console.count(epoch.count)} {epoch.unit}"


def _follow_models(run: Path, start: Path | None, teachers: Sequence[Path]) -> None:
    """Write where the models are now that a run began with and learns from: a study may be moved."""
    before = read_yaml(run / RECIPE)
    now = deepcopy(before)
    if start is not None:
        now["start_from"] = str(start)
    if teachers:
        now["training"]["distill"]["teachers"] = [{"model": str(one), "weight": 1.0} for one in teachers]
    if now != before:
        write_yaml(run / RECIPE, now)


def _train_together(recipe: dict[str, Any], processes: int, device: str | None, fresh: bool) -> None:
    """Train on several GPUs of this node, in a process for each, as `torchrun` starts them."""
    with tempfile.TemporaryDirectory(prefix="braid-") as scratch:
        path = Path(scratch) / "recipe.yaml"
        write_yaml(path, encode(recipe))
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        braid = ["-m", "braidlm", "train", str(path), *(["--fresh"] if fresh else [])]
        braid += [] if device is None else ["--device", device]
        running = subprocess.Popen([sys.executable, "-m", *torchrun, *braid])
        try:
            while running.poll() is None:
                time.sleep(POLL_SECONDS)
        except BaseException:  # torchrun tells its processes to save, and ends them after half a minute
            running.terminate()
            running.wait()
            raise
        if running.returncode:
            raise BraidError(f"the training in {processes} processes failed", recipe["out"], "Its lines are above.")


def train_to_end(recipe: dict[str, Any], device: str | None, fresh: bool) -> Run:
    """Train; where the user stopped the run, which has saved, the study stops too."""
    run = train(recipe, device=device, fresh=fresh)
    if run.stopped_by is not None:
        raise run.stopped_by
    return run


def check_variants(variants: Mapping[str, dict[str, Any]], fresh: bool, todo: str, device: str | None = None) -> None:
    """Find, before the first variant of a study of one step begins, what would stop any of them. Variants are resolved
    recipes with folders of their own; memory is checked where the `device` is known."""
    problems: list[str] = []
    for name, recipe in variants.items():
        if is_study(recipe):  # whose runs check their folders
            continue
        with collecting(problems, f"{name}: "):
            check_folder(Path(recipe["out"]), recipe, fresh)
        loaded = decode_recipe(recipe)
        if device is not None and loaded.architecture is not None and loaded.recipe.start_from is None:
            with collecting(problems, f"{name}: "):
                config = BraidConfig(loaded.architecture, loaded.vocab_size or DEFAULT_VOCAB_SIZE)
                check_training_fits(CountedModel(config), torch.device(device))
    if problems:
        raise BraidError("\n".join(problems), todo=f"Nothing was started. {todo}")


def _made(
    out: Path, sources: list[Path], options: dict[str, Any], said: str, make: Callable[[], Any], is_same: bool = True
) -> Path:
    """A model folder made of others: the one that is there, if it was made of the same models in the same way."""
    if out.is_dir():
        if is_same and is_made_of(out, sources, options):
            return out
        if is_run(out):  # somebody's training
            what = "a run stands where an edited model should be: this step was trained before, and is not any more"
            raise BraidError(what, str(out), "Remove the folder, or give the step another name.")
        shutil.rmtree(out)  # a model was trained again since, or the recipe changed
    console.say(f"\n{said}")
    with console.silence():  # its account of every tensor is in the lineage, and the study trains what is fresh
        make()
    return out


def is_made_of(folder: Path, sources: Sequence[Path], options: Mapping[str, Any] | None = None) -> bool:
    """Whether a model folder's lineage names exactly the weights of these models, and these options of an edit."""
    lineage = load_lineage(folder) or {}
    before = [source for source in lineage.get("sources", []) if "data" not in source]
    now = [open_model(source, "braid").record() for source in sources]
    same = list(map(_weights, before)) == list(map(_weights, now))
    return same and (options is None or options.items() <= lineage.get("options", {}).items())


def is_trained_from(run: Path, start: Path) -> bool:
    """Whether a run's newest checkpoint began with this model's weights."""
    newest = newest_checkpoint(run)
    return newest is not None and is_made_of(newest, [start])


def is_taught_by(run: Path, teachers: Sequence[Path]) -> bool:
    """Whether a run's newest checkpoint learned from these models as they are now."""
    newest = newest_checkpoint(run)
    sources = [] if newest is None else (load_lineage(newest) or {}).get("sources", [])
    before = [source["sha256"] for source in sources if source.get("role") == TEACHER]
    return before == [model_hash(teacher) for teacher in teachers]


def _weights(record: Mapping[str, Any]) -> Any:
    """What identifies the weights of a source: the hash of Braid's file, or the hashes of another format's files."""
    return record.get("sha256") or record.get("weights")
