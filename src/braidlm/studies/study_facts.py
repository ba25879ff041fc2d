"""What `braid show` tells of a study: every model as it would be built, and how long each training takes."""

from collections.abc import Iterator
from typing import Any

from braidlm.core.errors import BraidError, errors_at
from braidlm.core.models.accounting import model_facts
from braidlm.core.recipes import list_recipes
from braidlm.data.packing.tokenizer_choice import DEFAULT_VOCAB_SIZE
from braidlm.model.config.strict import encode
from braidlm.studies.decoding import decode_study, errors_of, study_models
from braidlm.studies.steps import DistilStep, EditStep
from braidlm.studies.study import Study
from braidlm.studies.study_plan import StudyPlan
from braidlm.training.monitoring.speed import TOKENS_PER_WORD, TRAINING_FLOPS


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
    if any(isinstance(step, EditStep) for step in study.steps.values()):
        yield "Edited models are counted before their edits, which need the trained model."
