"""The demo: train on the built-in stories, compare with n-gram models, and tell it all on one page."""

import time
from dataclasses import dataclass
from pathlib import Path

from braidlm.cli.demo_page import write_page
from braidlm.core import console
from braidlm.core.folders import load_model
from braidlm.data.catalog import OpenData, open_data
from braidlm.data.stories import PronounPair, pronoun_pairs
from braidlm.data.validation import ValidationSet, validation_windows
from braidlm.evals.ngrams import NGramModel, bits_per_byte, fit_trigram, fit_unigram
from braidlm.evals.pronouns import pronoun_accuracy
from braidlm.model.accounting import Cost, model_cost
from braidlm.training.recipe import load_recipe
from braidlm.training.tracking import read_metrics
from braidlm.training.train import Run, train
from braidlm.training.validation import score_text

RECIPE = "demo/stories"
PRONOUNS = 200


@dataclass
class DemoFacts:
    """What the page tells."""

    run: Run
    cost: Cost
    vocab_size: int
    metrics: list[dict]
    scores: dict[str, float]
    """Bits per byte on the held-out stories, by model."""
    pronouns: float
    """How often the model prefers the pronoun that agrees."""
    pronoun_pairs: list[PronounPair]
    seconds: dict[str, float]
    tokens: int
    """Training tokens there are."""


def demo(out: str | Path = "demo", overrides: list[str] | None = None) -> Path:
    """Run the whole story into `out`; gives the page's path. The same call again goes on or shows what is there."""
    out = Path(out)
    places = [f"out={out / 'run'}", f"data.cache={out / 'data'}", *(overrides or [])]
    clock = _Clock()
    recipe = load_recipe(RECIPE, places).recipe
    data = open_data(recipe.data)
    clock.note("stories written and packed")
    run = train(RECIPE, places)
    clock.note("model trained")
    model = load_model(run.model)
    held_out = validation_windows(data.validation[0], recipe.data.length, rows=16)
    scores = {"unigram": 0.0, "trigram": 0.0, "this model": score_text(model, held_out).bits_per_byte}
    scores.update(_ngram_scores(data, held_out))
    pairs = pronoun_pairs(seed=1, count=PRONOUNS)
    accuracy = pronoun_accuracy(model, data.tokenizer, pairs)
    clock.note("compared with n-gram models")
    facts = DemoFacts(
        run=run,
        cost=model_cost(model),
        vocab_size=model.config.vocab_size,
        metrics=read_metrics(run.folder),
        scores=scores,
        pronouns=accuracy,
        pronoun_pairs=pairs[:4],
        seconds=clock.seconds,
        tokens=len(data.train[0]),
    )
    _say_results(facts)
    return write_page(out / "report.html", facts)


def _ngram_scores(data: OpenData, held_out: ValidationSet) -> dict[str, float]:
    """n-gram models fitted on the same tokens, scored on the same text: every token once, in one row."""
    train_tokens, _ = data.train[0].read(0, len(data.train[0]))
    tokens, _ = held_out.stream.read(0, held_out.tokens)
    models: dict[str, NGramModel] = {
        "unigram": fit_unigram(train_tokens, data.tokenizer.vocab_size),
        "trigram": fit_trigram(train_tokens, data.tokenizer.vocab_size),
    }
    return {name: bits_per_byte(float(m.log_probabilities(tokens).sum()), held_out.bytes) for name, m in models.items()}


def _say_results(facts: DemoFacts) -> None:
    rows = [(name, f"{value:.3f}") for name, value in facts.scores.items()]
    console.table(["model", "bits per byte"], rows, title="On held-out stories (lower is better)")
    console.say(f"The right pronoun is preferred in {facts.pronouns:.0%} of {PRONOUNS} stories (chance: 50%).")


class _Clock:
    """Seconds between notes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.monotonic()

    def note(self, what: str) -> None:
        now = time.monotonic()
        self.seconds[what], self.last = now - self.last, now
