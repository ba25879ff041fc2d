"""The demo: two paths trained apart become one model, compared with a dense model of its size on one page.

The page's sentences say what its numbers mean, and follow from them whatever they are.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from braidlm.core import console
from braidlm.core.models.folders import load_model
from braidlm.core.report.rendering import show_report, write
from braidlm.core.report.report import Report, Table, listed
from braidlm.core.report.verdicts import EQUAL
from braidlm.data.corpora.maths import generate_problem
from braidlm.data.corpora.stories import pronoun_pairs
from braidlm.data.loading.open_data import OpenData, open_data
from braidlm.data.loading.validation import validation_windows
from braidlm.evals.formats.held_out_text import bits_per_byte
from braidlm.evals.formats.options import pronoun_accuracy
from braidlm.evals.scoring.ngrams import fit_ngrams
from braidlm.inspection.generate import Continuation, generate
from braidlm.inspection.results import RoutingReport, percent
from braidlm.studies.decoding import load_study
from braidlm.studies.measure import ROUTES, measure, study_routes
from braidlm.studies.report import ROUTES_LINK, add_routes, comparison_chart, learning_chart
from braidlm.studies.results import Bits, ModelResult, StudyResults
from braidlm.studies.running import run_study
from braidlm.studies.study import Study
from braidlm.studies.tables import cost, duration, inactive_paths, quality, training_time

RECIPE = "demo/paths"
PRONOUNS = 200
PROBLEM = generate_problem(seed=7, index=0)
"""A problem of another seed than the training's, which the models have not seen."""
PROMPTS = {"stories": "Once upon a time, there was a", "maths": f"Question: {PROBLEM.question}\nSolution:"}
ROUTED = (
    "After each layer a router chooses, for each token, one of the paths or their combination. Nobody told it which "
    "text is a story and which a problem."
)
UNROUTED = (
    "This join has no router that could choose: it reads both paths. But after each layer one can ask which path's "
    "output the joined stream resembles most, token by token."
)
COUNTS = {2: "Two", 3: "Three", 4: "Four", 5: "Five"}
WRITERS = {"composed": "the composed model", "dense": "the dense model"}


@dataclass
class DemoFacts:
    """The contents of the report."""

    results: StudyResults
    ngrams: dict[str, Bits]
    """Bits per byte of a unigram and a trigram model of the same tokens."""
    samples: dict[str, dict[str, Continuation]]
    """By domain, then by model."""
    pronouns: dict[str, float]
    """The share of stories in which a model prefers the pronoun that agrees."""
    seconds: dict[str, float]
    vocab_size: int
    routes: RoutingReport | None

    @property
    def composed(self) -> ModelResult:
        """The composed model that the page is about: the first."""
        return next(m for m in self.results.models if m.kind == "composed")


def demo(out: str | Path = "demo", overrides: list[str] | None = None) -> Path:
    """Run the demo into `out` and return the page's path. The same call again resumes, or shows what is there."""
    out = Path(out)
    study = load_study(RECIPE, [f"out={out}", f"data.cache={out / 'data'}", *(overrides or [])])
    seconds: dict[str, float] = {}
    with _timed("stories and word problems written, and cut into tokens", seconds):
        data = open_data(study.data_config, study.validation.half)
    with _timed(trained := "paths, composed model and dense model trained", seconds):
        models = run_study(study, data=data)
    with _timed("scored on held-out text, with and without each path", seconds):
        results = measure(study, models)
    # What an earlier call trained counts too, where this one resumed.
    seconds[trained] = max(seconds[trained], sum(model.wall_seconds for model in results.models))
    with _timed("compared, and routes of tokens collected", seconds):
        facts = DemoFacts(
            results=results,
            ngrams=_ngrams(study, data),
            samples=_samples(results),
            pronouns=_pronouns(results, data) if "stories" in study.domains else {},
            seconds=seconds,
            vocab_size=data.tokenizer.vocab_size,
            routes=study_routes(results, data, out / ROUTES, tokens=10_000),
        )
    for table in (quality(results), cost(results), training_time(results), inactive_paths(results)):
        console.show("")
        show_report(table)
    return write(demo_report(facts), out, "report")


@contextmanager
def _timed(what: str, seconds: dict[str, float]) -> Iterator[None]:
    begin = time.monotonic()
    yield
    seconds[what] = time.monotonic() - begin


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


def demo_report(facts: DemoFacts) -> Report:
    """The page, with its pictures."""
    report = Report("Two small models become one", "What `braid demo` did on this machine")
    _add_findings(report, facts)
    _add_the_story(report, facts)
    _add_learning(report, facts)
    _add_samples_and_costs(report, facts)
    return report


def _add_findings(report: Report, facts: DemoFacts) -> None:
    results, composed, trigram = facts.results, facts.composed, {"trigram": facts.ngrams["trigram"]}
    report.verdict = verdict(results, composed)
    figures = {f"bits per byte on {domain}, composed": f"{bits:.2f}" for domain, bits in composed.bits.items()}
    models = facts.routes.models if facts.routes is not None else []
    if right := [m.tallies[-1].accuracy for m in models if any(layer.read_by == "router" for layer in m.layers)]:
        figures["of router decisions for the text's own path"] = percent(right[0])
    if costs := [bits[d] - composed.bits[d] for path, bits in composed.silenced.items() for d in bits if d != path]:
        figures["bits at most on the other domain when a path is withdrawn"] = _signed(max(costs))
    report.facts(figures | {"the whole demo": duration(sum(facts.seconds.values()))})
    report.chart(
        comparison_chart(results, [m for m in results.models if m.seed == composed.seed], trigram),
        "Bits per byte say how well a model predicts text it has never seen: lower is better. Each model has its "
        "colour on the whole report. Trigram models are told the domain; the others are not.",
        "comparison",
    )
    report.heading("What was found")
    for question, answer in findings(results, composed, trigram).items():
        report.heading(question, level=3).text(answer)
    report.text(
        "The text is made by rules, and a part of it says as much as the whole: what owners gain by text that others "
        "keep shows on real text only. `docs/results.md` has more."
    )
    report.links(ROUTES_LINK if facts.routes else {})


def _add_the_story(report: Report, facts: DemoFacts) -> None:
    """The parts about training the paths, routing, withdrawing a path, and composing."""
    results, composed = facts.results, facts.composed
    sizes = {f"parameters, {m.name}": f"{m.parameters:,}" for m in results.models}
    report.heading("What was done").text(
        "Braid wrote children's stories and worked word problems by rules, and trained two small models apart, "
        f"each on {results.study.kept or 0.0:.0%} of its own text alone, as two owners of private data would, with one "
        "tokenizer. Then it composed the two into one model, trained that on the rest, which neither had seen and both "
        "give for it, and compared it with a dense model of about the same size that was trained from nothing on all "
        "of the text. Nothing was downloaded."
    ).facts(sizes | {"vocabulary": f"{facts.vocab_size:,}"})
    report.heading("Who goes where")
    if facts.routes is None:
        report.text("The composed model has no layer in which the path of a token could be read.")
    else:
        routed = any(layer.read_by == "router" for model in facts.routes.models for layer in model.layers)
        report.text(ROUTED if routed else UNROUTED)
        add_routes(report, facts.routes, "Held-out documents of each domain, and where their tokens go.")
    report.heading("Take a path away").text(
        "A path keeps its name in the composed model, and can be switched off when the model is loaded or while it "
        "writes: the owner of the data it was trained on can withdraw it. What that costs, in bits per byte:"
    ).table(replace(inactive_paths(results), name="")).text(
        "That leaves out the path's blocks. What the embedding, the head and the joins learned beside it stays, so to "
        "take data out of a model entirely, compose again without the path."
    )
    join = results.study.steps[composed.name].join.kind  # type: ignore[attr-defined]
    report.heading("Composed into one model").text(
        "`braid compose` put the paths side by side. Their embeddings and heads were joined along the width, their "
        "blocks are in parallel layers, and after each layer a join makes one stream of them again. The joins "
        "begin as the mean of the paths' outputs; one full-width block before and after is new and untrained. So "
        "the composed model is trained on, with the part of the text that was kept back from the paths."
    ).code(
        f"braid compose {' '.join(str(m.run_folder) for m in results.models if m.kind == 'path')} "
        f"--names {' '.join(results.names('path'))} --join {join} --out composed\n"
        f"braid show {composed.folder}"
    )


def _add_learning(report: Report, facts: DemoFacts) -> None:
    """The learning curves and every number."""
    results, domains = facts.results, facts.results.domains
    report.heading("How they learned")
    for domain in domains:
        if chart := learning_chart(results, domain, levels={"trigram": facts.ngrams["trigram"][domain]}):
            report.chart(
                chart,
                f"Held-out {domain} during the training. The composed model begins after the tokens of both paths. "
                "Its blocks before and after them are new and untrained, so that it may be behind a path at first.",
                f"learning-{domain}",
            )
    caption = "Bits per byte of held-out text."
    report.heading("Every number").table(replace(quality(results), name="", caption=caption))
    rows = [[name, *(f"{bits[domain]:.3f}" for domain in domains)] for name, bits in facts.ngrams.items()]
    report.table(Table(["n-gram model", *domains], rows))
    if facts.pronouns:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in facts.pronouns.items())
        report.text(
            f"A harder question: in {PRONOUNS} beginnings of stories the next word must be the pronoun that agrees "
            f"with the character. Guessing gives 50%; the models prefer the right one in: {shares}. Grammar "
            "comes early, knowing who is who comes late."
        )


def _add_samples_and_costs(report: Report, facts: DemoFacts) -> None:
    report.heading("What they write")
    for domain, texts in facts.samples.items():
        report.heading(domain.capitalize(), level=3)
        if domain == "maths":
            report.text(f"The right answer is {PROBLEM.answer}.")
        for name, sample in texts.items():
            report.quote(sample.text, WRITERS.get(name, f"the path {name}"), prompt=sample.prompt)
    report.heading("What it took").text(
        "Training alone. Paths need nothing of each other, so with two machines they take the time of the slower."
    ).table(replace(training_time(facts.results), name="")).table(replace(cost(facts.results), name=""))
    steps = [[what, duration(seconds)] for what, seconds in facts.seconds.items()]
    report.table(Table(["step of the demo", "time"], steps))
    composed, first = facts.composed, facts.results.names("path")[0]
    report.heading("Go on from here").code(
        f'braid generate {composed.folder} "Once upon a time" --top-next 5\n'
        f'braid generate {composed.folder} "Once upon a time" --paths {first}\n'
        f"braid routes {composed.folder} --out routes\n"
        f"braid serve {facts.results.study.folder} --open    # a page with the models, their runs and this report\n"
        "braid train papers/papaformer/phase2        # the paper's experiment, at small size\n"
        "braid prepare my-texts/*.txt --out data/mine"
    )


def verdict(results: StudyResults, composed: ModelResult) -> str:
    """The composed model beside the dense one, or else beside the paths, and how sure that is."""
    paths = [m for m in results.models if m.kind == "path" and m.seed == composed.seed]
    dense = [m for m in results.models if m.kind == "whole" and m.seed == composed.seed]
    beside = "a dense model of about its size, trained on all text" if dense else "its owners' models on their own text"
    others = dense[0].bits if dense else {path.name: path.bits[path.name] for path in paths}
    return (
        f"Small models trained apart on {listed([path.name for path in paths])} became one. Beside {beside}, it is "
        f"{compared(composed.bits, others)}: in bits per byte it has {_listed(composed.bits)}, against "
        f"{_listed(others)}.\n\nHow sure: this is one run with one seed. Differences of less than {EQUAL:.0%} count as "
        "equal, since another seed moves scores as far."
    )


def findings(results: StudyResults, composed: ModelResult, ngrams: Mapping[str, Bits]) -> dict[str, str]:
    """What the owners of the paths get, what withdrawing a path costs, and what pooling all text would have given."""
    paths = [m for m in results.models if m.kind == "path" and m.seed == composed.seed]
    count = COUNTS.get(len(paths), str(len(paths)))
    kept = f"{results.study.kept:.0%} of their text" if results.study.kept is not None else "text"
    found = {
        f"{count} owners keep {kept} to themselves: what do they get?": _owners(composed, paths, ngrams),
        "What does it cost when one of them withdraws?": _withdrawal(composed),
    }
    took = duration(sum(path.seconds for path in paths) + composed.seconds)
    pooled = [
        f"The dense model of {dense.parameters:,} parameters (the composed one has {composed.parameters:,}), trained "
        f"on all domains pooled for {duration(dense.seconds)} (paths and composed model: {took}), has "
        f"{_listed(dense.bits)}. Beside the composed model it is {compared(dense.bits, composed.bits)}."
        for dense in results.models
        if dense.kind == "whole" and dense.seed == composed.seed
    ]
    return found | ({"What would one model that saw all of the text reach?": " ".join(pooled)} if pooled else {})


def _owners(composed: ModelResult, paths: Sequence[ModelResult], ngrams: Mapping[str, Bits]) -> str:
    own = {path.name: path.bits[path.name] for path in paths}
    others = [path.bits[domain] for path in paths for domain in path.bits if domain != path.name]
    ends = dict.fromkeys(f"{bits:.1f}" for bits in (min(others), max(others)))
    sentences = [
        "One model for every domain. In bits per byte of text that no model was trained on, it has "
        f"{_listed(composed.bits)}; the owners' own models have {_listed(own)}, each on its own domain, and "
        f"{' to '.join(ends)} on another's.",
        f"Beside them the composed model is {compared(composed.bits, own)}.",
    ]
    for name, bits in ngrams.items():
        beside = f"beside the composed model it is {compared(bits, composed.bits)}."
        sentences.append(f"A {name} model of all the text of a domain has {_listed(bits)}; {beside}")
    return " ".join(sentences)


def _withdrawal(composed: ModelResult) -> str:
    sentences = []
    for path, bits in composed.silenced.items():
        rest = {domain: bits[domain] - composed.bits[domain] for domain in bits if domain != path}
        costs = ", ".join(f"{_signed(cost)} bits per byte on {domain}" for domain, cost in rest.items())
        before, after = composed.bits[path], bits[path]
        effect = "most of it is gone" if after / before > 2 else "much of it stays"
        goes = f"{path} goes from {before:.2f} to {after:.2f}, so that {effect}"
        sentences.append(f"Without the path {path} the rest pays {costs}, and {goes}.")
    sentences.append("Nothing is trained again for that, and it can be undone.")
    return " ".join(sentences)


def compared(bits: Bits, others: Bits) -> str:
    """How scores compare with others, domain by domain: `better on stories (by 12%) and equal on maths`."""
    words: dict[str, list[str]] = {"better": [], "equal": [], "worse": []}
    for domain in others:
        change = bits[domain] / others[domain] - 1
        if abs(change) < EQUAL:
            words["equal"].append(domain)
        else:
            words["better" if change < 0 else "worse"].append(f"{domain} (by {abs(change):.0%})")
    return ", ".join(f"{word} on {' and '.join(domains)}" for word, domains in words.items() if domains)


def _listed(bits: Mapping[str, float]) -> str:
    return listed([f"{value:.2f} on {domain}" for domain, value in bits.items()])


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
