"""Running a study: every run in order, each resumed where the last call left it."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.open_data import OpenData, open_data
from braidlm.data.loading.streams import Subset
from braidlm.edits.compose import compose
from braidlm.model.config.strict import decode, encode
from braidlm.opening.names import find_model, title_of
from braidlm.studies.averaging import average_models
from braidlm.studies.editing import apply_edits, check_texts, is_made_of, is_taught_by, is_trained_from, remove_made
from braidlm.studies.members import distilled_domains, distilled_model
from braidlm.studies.models import check_study_fits, errors_of
from braidlm.studies.phases import ComposedSpec, Domains, Phase, VariantSpec, edit_step
from braidlm.studies.study import Study
from braidlm.studies.trained_model import TrainedModel
from braidlm.training.amounts import Amount
from braidlm.training.train import Run, train


def run_study(
    study: Study, device: str | None = None, fresh: bool = False, data: OpenData | None = None
) -> list[TrainedModel]:
    """Train and compose whatever is not there yet; returns every model in order.

    `data` is the study's data where it is open already; otherwise it is prepared and opened.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BraidError(
            "a study runs in one process", todo="Its runs can be trained on several GPUs one by one, each a recipe."
        )
    check_study_fits(study, device)
    check_texts(study)
    if study.tasks is not None:
        study.tasks.check()
    opened = open_data(study.data_config, study.validation.half) if data is None else data

    def runs(seed: int) -> _SeedRuns:
        return _SeedRuns(study, seed, opened, device, fresh)

    def distil(name: str, teacher: TrainedModel, seed: int) -> TrainedModel:
        return runs(seed).distilled(name, teacher)

    models = [model for seed in study.seeds for model in runs(seed).with_variants()]
    return [*models, *average_models(study, models, distil)]


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
        if study.paths is not None and self.seed in study.seeds_of(next(iter(study.domains))):
            for domain in study.domains:
                sets = self._sets([domain], 0.0, study.paths.share)
                with errors_of("path", domain):
                    run = self._train(domain, sets, study.paths, model=study.paths.model)
                paths.append(TrainedModel(domain, "path", self.seed, run.model, run))
            yield from paths
            for name, spec in study.composed.items():
                if spec.members is None:
                    yield self._composed(name, spec, paths)
        for name, whole in study.whole.items():
            if self.seed not in study.seeds_of(name):
                continue
            with errors_of("whole", name):
                sets = self._sets(study.domains_of(whole), study.begin_of(whole), 1.0)
                run = self._train(name, sets, whole, domains=whole.domains, model=whole.model)
            yield TrainedModel(name, "whole", self.seed, run.model, run)

    def with_variants(self) -> Iterator[TrainedModel]:
        """Every model, then the variants, each after what it is made of, then what is composed of any of these."""
        made: dict[str, TrainedModel] = {}
        for model in self.models():
            made[model.name] = model
            yield model
        for name, spec in self.study.variants.items():
            if self.seed not in self.study.seeds_of(name):
                continue
            if spec.start not in made:
                folder = find_model(spec.start)
                made[spec.start] = TrainedModel(title_of(folder), "given", self.seed, folder)
                yield made[spec.start]
            with errors_of("variant", name):
                made[name] = self._variant(name, spec, made[spec.start])
            yield made[name]
        for name, composed in self.study.composed.items():
            if composed.members is not None and self.seed in self.study.seeds_of(name):
                yield self._composed(name, composed, [made[part] for part in self.study.parts_of(name)])

    def _variant(self, name: str, spec: VariantSpec, start: TrainedModel) -> TrainedModel:
        """A model edited, then trained; where it is not trained, the last edit's folder has its name."""
        steps = [edit_step(step, f"edits[{at}]") for at, step in enumerate(spec.edits)]
        outs = [self.folder / f"{name}-{at}-{step.kind}" for at, step in enumerate(steps, 1)]
        if not spec.domains:
            outs[-1] = self.folder / name
        texts = {stream.name: stream.data.folder for stream in self.data.train}
        model = apply_edits(start.model, steps, outs, texts, self.seed, self.fresh)
        if not spec.domains:
            return TrainedModel(name, "variant", self.seed, model)
        sets = self._sets(list(spec.domains), 0.0, 1.0)
        fresh = not is_trained_from(self.folder / name, model)
        run = self._train(name, sets, spec, domains=spec.domains, fresh=fresh, start_from=str(model))
        return TrainedModel(name, "variant", self.seed, run.model, run)

    def distilled(self, name: str, teacher: TrainedModel) -> TrainedModel:
        """One model that learns from an average; from one that was made anew, it learns anew."""
        spec = self.study.distilled[name]
        # At temperature 1 members of equal shares teach what their average does, and kernels know them.
        is_equal = self.study.averages[spec.teacher].join.kind == "average" and spec.temperature == 1
        teachers = [part.model for part in teacher.parts] if is_equal else [teacher.model]
        named = [str(model) for model in teachers]
        distill = {"teachers": named, **{key: getattr(spec, key) for key in ("weight", "temperature", "top_k")}}
        taught = replace(spec, training={**spec.training, "distill": distill})
        with errors_of("distilled", name):
            sets = self._sets(distilled_domains(self.study, name), self.study.begin_of(spec), 1.0)
            fresh = not is_taught_by(self.folder / name, teachers)
            run = self._train(name, sets, taught, fresh=fresh, model=distilled_model(self.study, name))
        return TrainedModel(name, "distilled", self.seed, run.model, run, [teacher])

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
        phase: Phase,
        domains: Domains | None = None,
        freeze: Sequence[str] = (),
        fresh: bool = False,
        **model: Any,
    ) -> Run:
        study = self.study
        alike = {name: encode(getattr(study.data, name)) for name in ("length", "chunking", "order")}
        data = {"sets": sets, **alike}
        if isinstance(domains, dict) and len(domains) > 1:
            data["mix"] = {"weights": domains}
        budget, amount = self._budget(phase, data)
        training = study.training_of(phase)
        recipe = {
            "name": f"{study.name} {name} (seed {self.seed})",
            "out": str(self.folder / name),
            "seed": self.seed,
            "licence": study.licence,
            "data": data,
            "training": {
                **training,
                "freeze": [*training.get("freeze", []), *freeze],
                "budget": str(budget),
            },
            "checkpoints": encode(study.checkpoints),
            "validation": encode(study.validation),
            "samples": encode(study.samples),
            "log": encode(study.log),
            **model,
        }
        console.say(f"\n{name}, seed {self.seed}: {amount}")
        run = train(recipe, device=self.device, fresh=self.fresh or fresh)
        if run.stopped_by is not None:  # the user stopped it, and it has saved; the study stops too
            raise run.stopped_by
        return run

    def _budget(self, phase: Phase, data: dict[str, Any]) -> tuple[Amount, str]:
        """How much a phase is trained, and the same in words."""
        if phase.budget is not None:
            return phase.budget, f"{console.count(phase.budget.count)} {phase.budget.unit}"
        epochs, epoch = self.study.epochs_of(phase), self._epoch(data)
        words = f"{epochs:g} x {console.count(epoch.count)} {epoch.unit}"
        return Amount(max(1, round(epochs * epoch.count)), epoch.unit), words

    def _epoch(self, data: dict[str, Any]) -> Amount:
        """The size of one epoch of these data sets: all their tokens, or as many words as the chunking says."""
        streams = open_data(decode(DataConfig, data)).train
        words = chunkings.build(self.study.data.chunking).words_per_epoch
        return Amount(sum(map(len, streams)), "tokens") if words is None else Amount(words * len(streams), "words")

    def _composed(self, name: str, spec: ComposedSpec, parts: list[TrainedModel]) -> TrainedModel:
        """Models composed, then trained on the text that is left to all."""
        with errors_of("composed", name):
            start = self._joined(name, spec, parts)
            fresh = not is_trained_from(self.folder / name, start)
            sets = self._sets(list(self.study.domains), self.study.shared_from, 1.0)
            run = self._train(name, sets, spec, start_from=str(start), freeze=spec.freeze, fresh=fresh)
        return TrainedModel(name, "composed", self.seed, run.model, run, parts)

    def _joined(self, name: str, spec: ComposedSpec, parts: list[TrainedModel]) -> Path:
        """The composed model before its training; one of the same parts is used again."""
        out = self.folder / f"{name}-composed"
        sources = [part.model for part in parts]
        options = {"join": encode(spec.join), "seed": self.seed}
        options |= {} if spec.is_averaged else {"blocks": spec.blocks, "start": spec.start}
        options |= {} if spec.layers is None else {"layers": spec.layers}
        if out.is_dir():
            if is_made_of(out, sources, options):
                return out
            remove_made(out)  # its parts were trained again since, or the recipe changed
        names = [part.name for part in parts]
        console.say(f"\n{name}, seed {self.seed}: composed of {', '.join(names)}, joined by {spec.join.kind}")
        with console.silence():  # its account of every tensor is in the lineage, and the study trains what is fresh
            compose(sources, out, names=names, **options)
        return out
