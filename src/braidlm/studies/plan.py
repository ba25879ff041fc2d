"""What a study will take: the words, epochs and checkpoints of each of its trainings, and about how long they last."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.data.loading.chunking import chunkings
from braidlm.data.packing.packed_data import Manifest, PackedData, is_packed
from braidlm.studies.phases import Phase
from braidlm.studies.study import Study
from braidlm.training.amounts import Amount
from braidlm.training.monitoring.speed import TOKENS_PER_WORD, tokens_of, training_seconds, training_speed


@dataclass(frozen=True)
class TrainingPlan:
    """What one training of a study takes; None for what is known only when the data is prepared."""

    words: int | None
    tokens: int | None
    epochs: float
    checkpoints: int | None
    seconds: float | None
    """Expected on this machine, within a factor of about two."""

    def facts(self) -> dict[str, Any]:
        return asdict(self)


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

    def training(self, domains: Sequence[str], share: float, phase: Phase, flops_per_token: int) -> TrainingPlan:
        """The plan of one training on a share of these domains; without domains there is none."""
        study, epochs = self.study, self.study.epochs_of(phase)
        per_epoch = chunkings.build(study.data.chunking).words_per_epoch
        words: int | None = None
        tokens: int | None = None
        if not domains:
            return TrainingPlan(0, 0, 0.0, 0, 0.0)
        if phase.budget is not None:
            words, tokens = self._budget(phase.budget, study.training_of(phase))
        elif per_epoch is not None:
            words = round(epochs * per_epoch * len(domains))
            tokens = round(words * self.tokens_per_word)
        elif self.is_prepared:
            sizes = [size for domain in domains if (size := self.sizes[domain]) is not None]
            words = round(epochs * share * sum(size.words for size in sizes))
            tokens = round(epochs * share * sum(size.tokens for size in sizes))
        seconds = None if tokens is None else training_seconds(tokens, flops_per_token, self.flops_per_second)
        return TrainingPlan(words, tokens, epochs, self._checkpoints(words, tokens, study.training_of(phase)), seconds)

    def _budget(self, budget: Amount, training: dict[str, Any]) -> tuple[int, int]:
        """The words and tokens of an amount in any unit."""
        tokens = tokens_of(budget, self._tokens_per_step(training), self.tokens_per_word)
        return budget.count if budget.unit == "words" else round(tokens / self.tokens_per_word), tokens

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


def total_seconds(plans: Sequence[TrainingPlan], times: Sequence[int]) -> float | None:
    """All trainings, each as many times as it has seeds."""
    seconds = [plan.seconds for plan in plans]
    return None if None in seconds else sum(n * (each or 0.0) for n, each in zip(times, seconds, strict=True))
