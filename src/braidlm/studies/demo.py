"""The demo: two paths trained apart become one model, compared with a dense model of its size on one page."""

import time
from pathlib import Path

from braidlm.core import console
from braidlm.core.models.folders import load_model
from braidlm.core.report.rendering import show_report, write
from braidlm.data.corpora.stories import pronoun_pairs
from braidlm.data.loading.open_data import OpenData, open_data
from braidlm.data.loading.validation import validation_windows
from braidlm.evals.formats.held_out_text import bits_per_byte
from braidlm.evals.formats.options import pronoun_accuracy
from braidlm.evals.scoring.ngrams import fit_ngrams
from braidlm.serving.generate import Continuation, generate
from braidlm.studies.decoding import load_study
from braidlm.studies.demo_page import PROBLEM, PRONOUNS, DemoFacts, demo_report
from braidlm.studies.measure import ROUTES, measure, study_routes
from braidlm.studies.results import Bits, StudyResults
from braidlm.studies.running import run_study
from braidlm.studies.study import Study
from braidlm.studies.tables import inactive_paths, quality, training_time

RECIPE = "demo/paths"
PROMPTS = {"stories": "Once upon a time, there was a", "maths": f"Question: {PROBLEM.question}\nSolution:"}
"""The beginnings of the samples, by domain."""


def demo(out: str | Path = "demo", overrides: list[str] | None = None) -> Path:
    """Run the demo into `out` and return the page's path. The same call again resumes, or shows what is there."""
    out = Path(out)
    study = load_study(RECIPE, [f"out={out}", f"data.cache={out / 'data'}", *(overrides or [])])
    clock = _Clock()
    data = open_data(study.data_config, study.validation.half)
    clock.note("stories and word problems written, and cut into tokens")
    models = run_study(study, data=data)
    clock.note(trained := "paths, composed model and dense model trained")
    results = measure(study, models)
    clock.at_least(trained, sum(model.wall_seconds for model in results.models))
    clock.note("scored on held-out text, with and without each path")
    facts = DemoFacts(
        results=results,
        ngrams=_ngrams(study, data),
        samples=_samples(results),
        pronouns=_pronouns(results, data) if "stories" in study.domains else {},
        seconds=clock.seconds,
        vocab_size=data.tokenizer.vocab_size,
        routes=study_routes(results, data, out / ROUTES, tokens=10_000),
    )
    clock.note("compared, and routes of tokens collected")
    for table in (quality(results), training_time(results), inactive_paths(results)):
        console.show("")
        show_report(table)
    return write(demo_report(facts), out, "report")


def _ngrams(study: Study, data: OpenData) -> dict[str, Bits]:
    """N-gram models of each domain's own training tokens: they have the advantage of knowing the domain."""
    scores: dict[str, Bits] = {"unigram": {}, "trigram": {}}
    for train, held in zip(data.train, data.validation, strict=True):
        text = validation_windows(held, study.data.length, study.validation.tokens)
        training_tokens, tokens = train.read(0, len(train))[0], text.stream.read(0, text.tokens)[0]
        for name, order in (("unigram", 1), ("trigram", 3)):
            model = fit_ngrams(order, training_tokens, data.tokenizer.vocab_size)
            scores[name][train.name] = bits_per_byte(float(model.log_probabilities(tokens).sum()), text.bytes)
    return scores


def _samples(results: StudyResults) -> dict[str, dict[str, Continuation]]:
    prompts = {domain: PROMPTS.get(domain, "") for domain in results.domains}
    samples: dict[str, dict[str, Continuation]] = {domain: {} for domain in prompts}
    for model in results.models:
        generation = generate(model.folder, list(prompts.values()), max_tokens=70, temperature=0.6, seed=1)
        for domain, text in zip(prompts, generation.texts, strict=True):
            samples[domain][model.name] = text
    return samples


def _pronouns(results: StudyResults, data: OpenData) -> dict[str, float]:
    pairs = pronoun_pairs(seed=1, count=PRONOUNS)
    models = [m for m in results.models if m.kind != "path" or m.name == "stories"]
    return {m.name: pronoun_accuracy(load_model(m.folder), data.tokenizer, pairs) for m in models}


class _Clock:
    """Seconds between notes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.monotonic()

    def note(self, what: str) -> None:
        now = time.monotonic()
        self.seconds[what], self.last = now - self.last, now

    def at_least(self, what: str, seconds: float) -> None:
        """What an earlier call trained counts too, where this one resumed."""
        self.seconds[what] = max(self.seconds[what], seconds)
