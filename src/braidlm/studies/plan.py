"""What a study will take: the words, epochs and checkpoints of each of its trainings, and about how long they last."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, errors_at
from braidlm.core.models.accounting import model_facts
from braidlm.core.recipes import list_recipes
from braidlm.data.loading.chunking import chunkings
from braidlm.data.packing.packed_data import Manifest, PackedData, is_packed
from braidlm.data.packing.tokenizer_choice import DEFAULT_VOCAB_SIZE
from braidlm.model.config.strict import encode
from braidlm.studies.decoding import decode_study, errors_of, study_models
from braidlm.studies.steps import DistilStep, EditStep
from braidlm.studies.study import Study
from braidlm.training.monitoring.speed import (
    TOKENS_PER_WORD,
    TRAINING_FLOPS,
    tokens_of,
    training_seconds,
    training_speed,
)


@dataclass(frozen=True)
class TrainingPlan:
    """What one training of a study takes; None for what is known only when the data is prepared."""

    words: int | None
    tokens: int | None
    epochs: float
    checkpoints: int | None
    seconds: float | None
    """Expected on this machine, within a factor of about two."""


@dataclass(frozen=True)
class DomainSize:
    """How much training text a domain has."""

    words: int
    tokens: int


class StudyPlan:
    """The plans of a study's trainings, with what they share looked up once."""

    def __init__(self, study: Study):
        self.study = study
        self.sizes = {domain: _size(study, domain) for domain in study.domains}
        self.flops_per_second = training_speed()

    @property
    def is_prepared(self) -> bool:
        """Whether the size of every domain is known."""
        return None not in self.sizes.values()

    @property
    def tokens_per_word(self) -> float:
        sizes = [size for size in self.sizes.values() if size is not None]
        words = sum(size.words for size in sizes)
        return sum(size.tokens for size in sizes) / words if words and self.is_prepared else TOKENS_PER_WORD

    def training(self, name: str, flops_per_token: int) -> TrainingPlan:
        """The plan of one step's training; of a step that is not trained it is empty."""
        study = self.study
        if study.steps[name].train is None:
            return TrainingPlan(0, 0, 0.0, 0, 0.0)
        domains, options, epochs = study.domains_of(name), study.options_of(name), study.epochs_of(name)
        begin, end = study.part_of_text(name)
        budget = study.training_of(name).budget
        per_epoch = chunkings.build(study.data.chunking).words_per_epoch
        words: int | None = None
        tokens: int | None = None
        if budget is not None:
            tokens = tokens_of(budget, self._tokens_per_step(options), self.tokens_per_word)
            words = budget.count if budget.unit == "words" else round(tokens / self.tokens_per_word)
        elif per_epoch is not None:
            words = round(epochs * per_epoch * len(domains))
            tokens = round(words * self.tokens_per_word)
        elif self.is_prepared:
            sizes = [size for domain in domains if (size := self.sizes[domain]) is not None]
            words = round(epochs * (end - begin) * sum(size.words for size in sizes))
            tokens = round(epochs * (end - begin) * sum(size.tokens for size in sizes))
        seconds = None if tokens is None else training_seconds(tokens, flops_per_token, self.flops_per_second)
        return TrainingPlan(words, tokens, epochs, self._checkpoints(words, tokens, options), seconds)

    def _tokens_per_step(self, training: dict[str, Any]) -> int:
        return int(training.get("batch", 32) * training.get("accumulation", 1) * self.study.data.length)

    def _checkpoints(self, words: int | None, tokens: int | None, training: dict[str, Any]) -> int | None:
        """How many checkpoints are made, the end included."""
        if words is None or tokens is None:
            return None
        pace = self.study.checkpoints.every
        steps = -(-tokens // self._tokens_per_step(training))
        end = {"words": words, "tokens": tokens, "steps": steps}[pace.unit]
        count, mark = 0, pace.next_after(0)
        while mark is not None and mark < end:
            count, mark = count + 1, pace.next_after(mark)
        return count + 1


def _size(study: Study, domain: str) -> DomainSize | None:
    """The training text of a domain, if it is packed or was prepared before."""
    spec = study.domains[domain]
    packed = [Path(spec.path)] if spec.path else sorted(Path(study.data.cache).glob(f"{domain}-[0-9a-f]*/"))
    manifests = [PackedData(folder).manifest for folder in packed if is_packed(folder)]
    if spec.path is None:
        manifests = [manifest for manifest in manifests if _is_of(manifest, study, domain)]
    if len(manifests) != 1:  # not there, or prepared by several tokenizers of this size
        return None
    kept = (1.0 if spec.has_validation else 1.0 - spec.holdout) * (spec.subset.stop - spec.subset.start)
    return DomainSize(round(kept * manifests[0].words), round(kept * manifests[0].tokens))


def _is_of(manifest: Manifest, study: Study, domain: str) -> bool:
    """Whether what was prepared is a domain's text, read as the study reads it, in tokens of as large a vocabulary."""
    try:
        spec = study.domains[domain].resolved(domain)
    except BraidError:  # the text is not there
        return False
    sources = [spec.source] if isinstance(spec.source, str) else spec.source
    reading = json.loads(json.dumps(spec.read_options().facts()))
    same_text = (manifest.source.get("sources"), manifest.source.get("reading")) == (sources, reading)
    return same_text and study.data.tokenizer.vocab_size in (None, manifest.vocab_size)


def study_facts(name: str, data: dict[str, Any], length: int | None = None) -> dict[str, Any]:
    """Every model of a study as it would be built; the study's own figures are those of its first composed model."""
    study = decode_study(data)
    vocab_size = study.data.tokenizer.vocab_size
    models: dict[str, dict[str, Any]] = {}
    plan = StudyPlan(study)
    with errors_at(name):
        built = study_models(study)
    for model in built:
        with errors_of(model.name):
            facts = model_facts(model.skeleton, length)
        flops, step = facts["flops_per_token"], study.steps[model.name]
        if isinstance(step, DistilStep):
            epochs = study.epochs_of(model.name)
            passes = epochs if step.distil.top_k is None else 1.0  # what the teacher says is stored once
            teacher = models[step.distil.teacher]["flops_per_token"] / TRAINING_FLOPS  # it is only run forward
            flops += round(teacher * passes / epochs)
        training, times = asdict(plan.training(model.name, flops)), len(study.seeds_of(model.name))
        times = 1 if study.is_once(model.name) else times
        models[model.name] = {"name": model.name, "kind": model.kind, **facts, "training": training, "times": times}
    seconds = [row["training"]["seconds"] for row in models.values()]
    total = None if None in seconds else sum(row["times"] * row["training"]["seconds"] for row in models.values())
    main = next((row for row in models.values() if row["kind"] == "composed"), next(iter(models.values())))
    problems: list[str] = []
    for domain, spec in study.domains.items():
        try:
            spec.resolved(domain)
        except BraidError as error:
            problems.append(str(error))  # with what to do
    return {
        **main,
        "kind": "study",
        "name": name,
        "about": dict(list_recipes()).get(name),
        "models": list(models.values()),
        "seeds": study.seeds,
        "expected_seconds": total,
        "domains": {domain: spec.source or spec.path or spec.folder for domain, spec in study.domains.items()},
        "vocab_size_assumed": vocab_size is None,
        "lineage": None,
        "tokenizer": None,
        "recipe": encode(study),
        "notes": list(_notes(study, plan, main["training"]["words"] is not None)),
        "problems": problems,
    }


def _notes(study: Study, plan: StudyPlan, words_are_known: bool) -> Iterator[str]:
    """What the figures of a study rest on."""
    if not plan.is_prepared and words_are_known:
        yield f"Time is counted with {TOKENS_PER_WORD} tokens per word until the data is prepared."
    elif not plan.is_prepared:
        yield "Words, checkpoints and time are known when the data is prepared, which `braid train` begins with."
    if study.data.tokenizer.vocab_size is None:
        yield f"The vocabulary comes from the tokenizer; counted here with {DEFAULT_VOCAB_SIZE:,} tokens."
    if any(isinstance(step, EditStep) for step in study.steps.values()):
        yield "Edited models are counted before their edits, which need the trained model."
