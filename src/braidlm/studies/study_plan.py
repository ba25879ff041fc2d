"""What the trainings of a study are expected to take: words, tokens, epochs, checkpoints and about how long."""

import json
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.data.loading.chunking import chunkings
from braidlm.data.packing.packed_data import Manifest, is_packed, read_manifest
from braidlm.studies.study import Study
from braidlm.training.monitoring.speed import TOKENS_PER_WORD, tokens_of, training_seconds, training_speed


class StudyPlan:
    """The plans of a study's trainings, with what they share looked up once."""

    def __init__(self, study: Study):
        self.study = study
        self.sizes = {domain: _size(study, domain) for domain in study.domains}
        """Words and tokens of the training text of each domain; None where they are known only when it is prepared."""
        self.is_prepared = None not in self.sizes.values()
        words, tokens = map(sum, zip(*(size or (0, 0) for size in self.sizes.values()), strict=True))
        self.tokens_per_word: float = tokens / words if words and self.is_prepared else TOKENS_PER_WORD
        self.flops_per_second = training_speed()

    def training(self, name: str, flops_per_token: int) -> dict[str, Any]:
        """What the training of one step takes; None for what is known only when the data is prepared. `seconds` are
        expected on this machine, within a factor of about two."""
        study = self.study
        if study.steps[name].train is None:
            return {"words": 0, "tokens": 0, "epochs": 0.0, "checkpoints": 0, "seconds": 0.0}
        domains, options, epochs = study.domains_of(name), study.options_of(name), study.epochs_of(name)
        begin, end = study.part_of_text(name)
        budget = study.training_of(name).budget
        per_step = int(options.get("batch", 32) * options.get("accumulation", 1) * study.data.length)
        per_epoch = chunkings.build(study.data.chunking).words_per_epoch
        words: int | None = None
        tokens: int | None = None
        if budget is not None:
            tokens = tokens_of(budget, per_step, self.tokens_per_word)
            words = budget.count if budget.unit == "words" else round(tokens / self.tokens_per_word)
        elif per_epoch is not None:
            words = round(epochs * per_epoch * len(domains))
            tokens = round(words * self.tokens_per_word)
        elif self.is_prepared:
            amounts = zip(*(self.sizes[domain] or (0, 0) for domain in domains), strict=True)
            words, tokens = (round(epochs * (end - begin) * sum(amount)) for amount in amounts)
        checkpoints = seconds = None
        if words is not None and tokens is not None:
            seconds = training_seconds(tokens, flops_per_token, self.flops_per_second)
            pace = study.checkpoints.every
            last = {"words": words, "tokens": tokens, "steps": -(-tokens // per_step)}[pace.unit]
            checkpoints, mark = 1, pace.next_after(0)  # one is made at the end
            while mark is not None and mark < last:
                checkpoints, mark = checkpoints + 1, pace.next_after(mark)
        return {"words": words, "tokens": tokens, "epochs": epochs, "checkpoints": checkpoints, "seconds": seconds}


def _size(study: Study, domain: str) -> tuple[int, int] | None:
    """Words and tokens of the training text of a domain, if it is packed or was prepared before."""
    spec = study.domains[domain]
    packed = [Path(spec.path)] if spec.path else sorted(Path(study.data.cache).glob(f"{domain}-[0-9a-f]*/"))
    manifests = [read_manifest(folder) for folder in packed if is_packed(folder)]
    if spec.path is None:
        manifests = [manifest for manifest in manifests if _is_of(manifest, study, domain)]
    if len(manifests) != 1:  # not there, or prepared by several tokenizers of this size
        return None
    kept = (1.0 if spec.has_validation else 1.0 - spec.holdout) * (spec.subset.stop - spec.subset.start)
    return round(kept * manifests[0].words), round(kept * manifests[0].tokens)


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
