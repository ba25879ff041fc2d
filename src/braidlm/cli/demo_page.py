"""The demo's report.html."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from braidlm.core import figures
from braidlm.core.console import count, duration
from braidlm.core.page import Page
from braidlm.core.runs import RECIPE

if TYPE_CHECKING:
    from braidlm.cli.demo_story import DemoFacts


def write_page(path: Path, facts: "DemoFacts") -> Path:
    """Write the page, and its pictures as PNG files beside it."""
    validation = [r for r in facts.metrics if r["kind"] == "validation"]
    curve = _learning_curve(facts, validation)
    bars = figures.bar_chart(facts.scores, "bits per byte (lower is better)", digits=3, highlight="this model")
    for name, figure in (("learning.png", curve), ("comparison.png", bars)):
        figures.save_png(figure, path.parent / name)
    page = Page("A small language model learns to tell stories", "What `braid demo` did on this machine, just now")
    _opening(page, facts)
    page.heading("What it writes")
    _samples(page, facts)
    page.heading("How it learned")
    page.figure(figures.to_svg(curve), "Bits per byte on stories it has never seen, while it was trained.")
    page.heading("Is that good?")
    _comparison(page, facts, figures.to_svg(bars))
    page.heading("Does it know who is who?")
    _pronouns(page, facts)
    page.heading("What it took")
    page.table(["step", "time"], [[what, duration(seconds)] for what, seconds in facts.seconds.items()])
    page.heading("Go on from here")
    _next_steps(page, facts)
    page.write(path)
    return path


def _opening(page: Page, facts: "DemoFacts") -> None:
    page.text(
        "Braid wrote a collection of children's stories by rules, trained a tokenizer on them, and then trained this "
        "model from nothing to predict the next token. Nothing was downloaded."
    )
    page.facts(
        {
            "parameters": f"{facts.cost.parameters:,}",
            "training tokens seen": count(facts.run.progress.tokens),
            "words seen": count(facts.run.progress.words),
            "bits per byte": f"{facts.scores['this model']:.3f}",
            "vocabulary": f"{facts.vocab_size:,}",
            "training time": duration(facts.seconds["model trained"]),
        }
    )


def _samples(page: Page, facts: "DemoFacts") -> None:
    samples = [r for r in facts.metrics if r["kind"] == "sample"]
    page.text("The same opening, continued by the model at several moments of its training.")
    for record in [*samples[:1], *samples[len(samples) // 2 : len(samples) // 2 + 1], *samples[-1:]]:
        page.quote(record["text"], f"after {record['step']:,} steps", prompt=record["prompt"])


def _learning_curve(facts: "DemoFacts", validation: list[dict]) -> Any:
    steps = [float(r["step"]) for r in validation]
    values = [r["bits_per_byte"] for r in validation]
    levels = {name: value for name, value in facts.scores.items() if name != "this model"}
    return figures.line_chart({"this model": (steps, values)}, "steps", "bits per byte", levels=levels)


def _comparison(page: Page, facts: "DemoFacts", bars: str) -> None:
    ours, trigram = facts.scores["this model"], facts.scores["trigram"]
    verdict = "better than" if ours < trigram else "worse than"
    page.text(
        "Two classical models, fitted on all the same training tokens and scored on the same held-out stories: a "
        "unigram model knows only how frequent each token is; a trigram model (interpolated modified Kneser-Ney) knows "
        f"what tends to follow two tokens. The trigram model read all {count(facts.tokens)} training tokens; this "
        f"model saw {count(facts.run.progress.tokens)} tokens and is {verdict} it."
    )
    page.figure(bars, "Bits needed per byte of unseen story.")


def _pronouns(page: Page, facts: "DemoFacts") -> None:
    page.text(
        "Each of these beginnings must go on with a pronoun that agrees with the character. The model prefers the "
        f"right one in {facts.pronouns:.0%} of 200 fresh stories; guessing gives 50%."
    )
    rows = [[f"… {pair.prefix[-70:]}", pair.right.strip(), pair.wrong.strip()] for pair in facts.pronoun_pairs]
    page.table(["the story so far", "right", "wrong"], rows)


def _next_steps(page: Page, facts: "DemoFacts") -> None:
    model = facts.run.model
    page.code(
        f'braid generate {model} "Once upon a time" --top-next 5\n'
        f"braid show {facts.run.folder}\n"
        f"braid convert {model} --to llama --out my-llama\n"
        "braid prepare my-texts/*.txt --out data/mine\n"
        "braid train demo/stories name=mine data.sets.stories.source=null data.sets.stories.path=data/mine"
    )
    page.code((facts.run.folder / RECIPE).read_text(encoding="utf-8"), summary="The whole recipe of this run")
