"""What `braid show` tells of a study: every model as it would be built, and what each training is expected to take."""

import json
from collections.abc import Iterator
from contextlib import suppress
from operator import mul
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, errors_at
from braidlm.core.models.accounting import model_facts
from braidlm.core.recipes import list_recipes
from braidlm.data.loading.chunking import chunkings
from braidlm.data.packing.packed_data import Manifest, is_packed, read_manifest
from braidlm.data.packing.tokenizer_choice import DEFAULT_VOCAB_SIZE
from braidlm.edits.edit import Edit
from braidlm.model.config.strict import encode
from braidlm.studies.decoding import decode_study, errors_of, study_models
from braidlm.studies.steps import DistilStep, EditStep, decode_edit
from braidlm.studies.study import Study
from braidlm.training.amounts import Unit
from braidlm.training.monitoring.speed import (
    TOKENS_PER_WORD,
    TRAINING_FLOPS,
    tokens_of,
    training_seconds,
    training_speed,
)

BYTES_PER_TOKEN = 4
"""Bytes of an English token under a tokenizer of 16k tokens: assumed until held-out text is prepared."""


class StudyPlan:
    """What a study's trainings are expected to take, with what they share looked up once."""

    def __init__(self, study: Study):
        self.study = study
        self.sizes = {domain: _size(study, domain) for domain in study.domains}
        """Words and tokens of the training text of each domain; None where they are known only when it is prepared."""
        self.is_prepared = None not in self.sizes.values()
        self.held_out = {domain: _held_out(study, domain) for domain in study.domains}
        """Tokens that a validation reads of each domain; None where they are known only when it is prepared."""
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
            parts = {domain: study.part_of_text(name, domain) for domain in domains}
            amounts = zip(*(self.sizes[domain] or (0, 0) for domain in domains), strict=True)
            shares = [end - begin for begin, end in parts.values()]
            words, tokens = (round(epochs * sum(map(mul, shares, amount))) for amount in amounts)
        checkpoints = seconds = None
        if words is not None and tokens is not None:
            last: dict[Unit, int] = {"words": words, "tokens": tokens, "steps": -(-tokens // per_step)}
            every, held_out = study.checkpoints.every, sum(self.held_out[domain] or 0 for domain in domains)
            checkpoints = every.marks_before(last[every.unit]) + 1  # and at the end
            costs = (flops_per_token, self.flops_per_second)
            seconds = training_seconds(tokens, held_out, last, study.validation.every, *costs)
        return {"words": words, "tokens": tokens, "epochs": epochs, "checkpoints": checkpoints, "seconds": seconds}


def _size(study: Study, domain: str) -> tuple[int, int] | None:
    """Words and tokens of the training text of a domain, if it is packed or was prepared before."""
    spec, manifest = study.domains[domain], _manifest(study, domain)
    if manifest is None:
        return None
    kept = (1.0 if spec.has_validation else 1.0 - spec.holdout) * (spec.subset.stop - spec.subset.start)
    return round(kept * manifest.words), round(kept * manifest.tokens)


def _manifest(study: Study, domain: str) -> Manifest | None:
    """What a domain's text is once it is packed; None before, or if it was prepared by several tokenizers."""
    spec = study.domains[domain]
    packed = [Path(spec.path)] if spec.path else sorted(Path(study.data.cache).glob(f"{domain}-[0-9a-f]*/"))
    manifests = [read_manifest(folder) for folder in packed if is_packed(folder)]
    if spec.path is None:
        manifests = [manifest for manifest in manifests if _is_of(manifest, study, domain)]
    return manifests[0] if len(manifests) == 1 else None


def _held_out(study: Study, domain: str) -> int | None:
    """Tokens that one validation reads: of text that is not prepared as many as its files' bytes make."""
    spec, most, tokens = study.domains[domain], study.validation.tokens, None
    with suppress(BraidError):  # the text is not there
        separate = spec.resolved(domain).validation
        if separate is None and (manifest := _manifest(study, domain)) is not None:
            tokens = round(spec.holdout * (spec.subset.stop - spec.subset.start) * manifest.tokens)
        elif isinstance(separate, str) and is_packed(separate):
            tokens = read_manifest(separate).tokens
        elif isinstance(separate, str) and (place := Path(separate)).exists():
            files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
            tokens = round(sum(path.stat().st_size for path in files) / BYTES_PER_TOKEN)
    half = 1 if study.validation.half is None else 2
    known = [amount for amount in (most, tokens and tokens // half) if amount is not None]
    return min(known, default=None)


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
    """Every model of a study as it would be built; its first composed model gives the study's own figures."""
    study = decode_study(data)
    vocab_size = study.data.tokenizer.vocab_size
    models: dict[str, dict[str, Any]] = {}
    plan = StudyPlan(study)
    with errors_at(name):
        built = study_models(study)
    for own, model in built.items():
        with errors_of(own):
            facts = model_facts(model, length)
        flops, step = facts["flops_per_token"], study.steps[own]
        if isinstance(step, DistilStep):
            epochs = study.epochs_of(own)
            passes = epochs if step.distil.top_k is None else 1.0  # what the teacher says is stored once
            teacher = models[step.distil.teacher]["flops_per_token"] / TRAINING_FLOPS  # it is only run forward
            flops += round(teacher * passes / epochs)
        times = 1 if study.is_once(own) else len(study.seeds_of(own))
        training = {"training": plan.training(own, flops), "times": times}
        models[own] = {"name": own, "kind": study.role(own), **facts, **training}
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
    edited = [written for step in study.steps.values() if isinstance(step, EditStep) for written in step.edit]
    if any(type(decode_edit(written, "edit")[1]).counted is Edit.counted for written in edited):
        yield "Edited models are counted before those edits that need the trained model."
