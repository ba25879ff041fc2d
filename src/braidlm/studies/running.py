"""Running a study: every run in order, each resumed where the last call left it."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.folders import WEIGHTS, load_lineage
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.open_data import OpenData, open_data
from braidlm.data.loading.streams import Subset
from braidlm.edits.compose import compose
from braidlm.model.config.strict import decode, encode
from braidlm.studies.models import Kind, check_study_fits, errors_of
from braidlm.studies.study import ComposedSpec, Phase, Study
from braidlm.training.amounts import Amount
from braidlm.training.train import Run, train


@dataclass
class TrainedModel:
    """One model of a study, trained with one seed."""

    name: str
    kind: Kind
    seed: int
    run: Run
    parts: list["TrainedModel"] = field(default_factory=list)
    """Of a composed model: its paths."""


def run_study(study: Study, device: str | None = None, fresh: bool = False) -> list[TrainedModel]:
    """Prepare the data, then train and compose whatever is not there yet; returns every model in order."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BraidError(
            "a study runs in one process", todo="Its runs can be trained on several GPUs one by one, each a recipe."
        )
    check_study_fits(study, device)
    data = open_data(study.data_config)
    return [model for seed in study.seeds for model in _SeedRuns(study, seed, data, device, fresh).models()]


@dataclass
class _SeedRuns:
    """A study with one seed."""

    study: Study
    seed: int
    data: OpenData
    device: str | None
    fresh: bool

    @property
    def folder(self) -> Path:
        return self.study.folder / f"seed-{self.seed}"

    def models(self) -> Iterator[TrainedModel]:
        study = self.study
        paths: list[TrainedModel] = []
        if study.paths is not None:
            share = study.paths.share
            for domain in study.domains:
                sets = self._sets([domain], 0.0, share)
                with errors_of("path", domain):
                    run = self._train(domain, sets, study.paths, model=study.paths.model)
                paths.append(TrainedModel(domain, "path", self.seed, run))
            yield from paths
            for name, spec in study.composed.items():
                with errors_of("composed", name):
                    start, is_new = self._composed(name, spec, paths)
                    sets = self._sets(list(study.domains), share, 1.0)
                    run = self._train(name, sets, spec, start_from=str(start), freeze=spec.freeze, fresh=is_new)
                yield TrainedModel(name, "composed", self.seed, run, paths)
        for name, model in study.whole.items():
            with errors_of("whole", name):
                run = self._train(name, self._sets(list(study.domains), 0.0, 1.0), model=model)
            yield TrainedModel(name, "whole", self.seed, run)

    def _sets(self, domains: list[str], begin: float, end: float) -> dict[str, Any]:
        """Parts of the prepared domains; the held-out documents are the same for every run."""
        streams = {stream.name: stream for stream in self.data.train}
        sets = {}
        for domain in domains:
            spec = self.study.domains[domain]
            own = spec.subset
            width = own.stop - own.start
            part = Subset(own.start + begin * width, own.start + end * width, own.seed)
            held_out = {"holdout": spec.holdout, "validation": spec.validation}
            if spec.has_validation:
                held = next(s for s in self.data.validation if s.name == domain)
                held_out = {"holdout": 0.0, "validation": str(held.data.folder)}
            sets[domain] = {"path": str(streams[domain].data.folder), "subset": encode(part), **held_out}
        return sets

    def _train(
        self,
        name: str,
        sets: dict[str, Any],
        phase: Phase | None = None,
        freeze: Sequence[str] = (),
        fresh: bool = False,
        **model: Any,
    ) -> Run:
        study = self.study
        epochs = study.epochs_of(phase)
        data = {"sets": sets, "length": study.data.length, "chunking": encode(study.data.chunking)}
        epoch = self._epoch(data)
        recipe = {
            "name": f"{study.name} {name} (seed {self.seed})",
            "out": str(self.folder / name),
            "seed": self.seed,
            "data": data,
            "training": {
                **study.training_of(phase),
                "freeze": list(freeze),
                "budget": f"{max(1, round(epochs * epoch.count))} {epoch.unit}",
            },
            "checkpoints": encode(study.checkpoints),
            "validation": encode(study.validation),
            "samples": encode(study.samples),
            "log": encode(study.log),
            **model,
        }
        console.say(f"\n{name}, seed {self.seed}: {epochs:g} x {console.count(epoch.count)} {epoch.unit}")
        run = train(recipe, device=self.device, fresh=self.fresh or fresh)
        if run.stopped_by is not None:  # the user stopped it, and it has saved; the study stops too
            raise run.stopped_by
        return run

    def _epoch(self, data: dict[str, Any]) -> Amount:
        """The size of one epoch of these data sets: all their tokens, or as many words as the chunking says."""
        streams = open_data(decode(DataConfig, data)).train
        words = chunkings.build(self.study.data.chunking).words_per_epoch
        return Amount(sum(map(len, streams)), "tokens") if words is None else Amount(words * len(streams), "words")

    def _composed(self, name: str, spec: ComposedSpec, paths: list[TrainedModel]) -> tuple[Path, bool]:
        """The composed model, and whether it is new: one of the same paths and options is used again."""
        out = self.folder / f"{name}-composed"
        sources = [path.run.model for path in paths]
        options = {"join": encode(spec.join), "blocks": spec.blocks, "start": spec.start, "seed": self.seed}
        options |= {} if spec.layers is None else {"layers": spec.layers}
        if out.is_dir():
            lineage = load_lineage(out) or {}
            same_paths = [s.get("sha256") for s in lineage.get("sources", [])] == [
                sha256_of(source / WEIGHTS) for source in sources
            ]
            if same_paths and options.items() <= lineage.get("options", {}).items():
                return out, False
            shutil.rmtree(out)  # its paths were trained again since, or the recipe changed
        compose(sources, out, names=[path.name for path in paths], **options)
        return out, True
