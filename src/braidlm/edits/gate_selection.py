"""Which gates of a loaded model stay: the rules, what each gate does to its layer's perplexity, and the report."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.report.charts import Lines
from braidlm.core.report.report import Report, Table
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.edits.account import columns
from braidlm.edits.edit import check_promise
from braidlm.edits.gate import layer_ranges
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.held_out_text import HeldOutText
from braidlm.evals.scoring.scorer import Scorer
from braidlm.inspection.gate_lens import LayerLens, gate_lens
from braidlm.inspection.gates import context_limit
from braidlm.opening.gating import gates_of, without

Rule = Literal["smallest-change", "only-if-helps", "as_printed"]

SCORES: dict[str, Callable[[float], float]] = {
    "smallest-change": abs,
    "only-if-helps": lambda change: -change,
    "as_printed": lambda change: change,
}
"""By a rule's name, what a change of the perplexity's logarithm counts in favour of a gate."""
THRESHOLDS: dict[str, float] = {"smallest-change": 0.1, "only-if-helps": 0.0, "as_printed": 0.0}
"""The default threshold of each rule: the share of the largest score above which gates stay."""
WORDS: dict[str, str] = {
    "smallest-change": "changes the perplexity",
    "only-if-helps": "lowers the perplexity",
    "as_printed": "raises the perplexity",
}
"""What a rule wants of a gate that stays."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of one gate."""

    layer: int
    stays: bool
    reason: str

    @property
    def word(self) -> str:
        return "stays" if self.stays else "goes"


def judge(
    changes: Mapping[int, float], rule: Rule, keep: int | None = None, threshold: float | None = None
) -> list[Verdict]:
    """What becomes of the gate of each layer, by the change of the perplexity's logarithm that it makes there.

    Those stay whose score is above zero and above `threshold` times the largest; or, of those above zero, the `keep`
    with the largest.
    """
    scores = {layer: SCORES[rule](change) for layer, change in changes.items()}
    share = 0.0 if keep is not None else THRESHOLDS[rule] if threshold is None else threshold
    limit = share * max([0.0, *scores.values()])
    above = sorted((layer for layer, score in scores.items() if score > limit), key=lambda layer: -scores[layer])
    kept = above[:keep]
    return [Verdict(layer, layer in kept, _reason(layer, rule, scores[layer], limit, above, keep)) for layer in scores]


def _reason(layer: int, rule: Rule, score: float, limit: float, above: Sequence[int], keep: int | None) -> str:
    if score == 0:
        return "changes nothing"
    if layer not in above:
        verb = _infinitive(WORDS[rule])
        return f"does not {verb} by more than {limit:.4f}" if limit and score > 0 else f"does not {verb}"
    if keep is None:
        return WORDS[rule]
    rank = above.index(layer) + 1
    return f"{WORDS[rule]}, rank {rank} of {len(above)}" + ("" if rank <= keep else f": not among the first {keep}")


def _infinitive(words: str) -> str:
    verb, _, rest = words.partition(" ")
    return f"{verb.removesuffix('s')} {rest}"


@dataclass(frozen=True)
class Quality:
    """How well a whole model predicts a text."""

    bits_per_byte: float
    perplexity: float
    """Per token."""


def quality(
    model: Any, tokenizer: BraidTokenizer, folder: Path | None, text: HeldOutText, off: Iterable[int] = ()
) -> Quality:
    """Bits per byte and perplexity, without the gates of the layers `off`."""
    evaluated = EvaluatedModel(Scorer(model), tokenizer, folder)
    with without(model, off), console.progress("bits per byte", None, "tokens") as advance:
        result = text.evaluate("bits_per_byte", evaluated, lambda done, total: advance(done, ""))
    bits = result.score * result.notes["bytes"] / result.notes["tokens"]
    return Quality(result.score, 2.0**bits)


PROBE = 64
"""Tokens at which logits are compared."""
COLUMNS = ["layer", "perplexity without", "with its gate", "change", "", "why"]


@dataclass(frozen=True)
class Selection:
    """What was measured, and what becomes of each gate."""

    title: str
    rule: Rule
    lenses: dict[int, LayerLens]
    """By layer."""
    verdicts: list[Verdict]
    before: Quality
    after: Quality
    probe: Tensor
    """Token ids [1, time] of the text."""

    @property
    def kept(self) -> list[int]:
        return [verdict.layer for verdict in self.verdicts if verdict.stays]

    @property
    def dropped(self) -> list[int]:
        return [verdict.layer for verdict in self.verdicts if not verdict.stays]

    def lines(self) -> list[str]:
        """The plan in words: what each gate does, what becomes of it and why, and the quality before and after."""
        qualities = [["", "before", "after"]]
        qualities.append(["bits per byte", *(f"{one.bits_per_byte:.4f}" for one in (self.before, self.after))])
        qualities.append(["perplexity", *(f"{one.perplexity:.4g}" for one in (self.before, self.after))])
        return [
            self.headline(),
            *columns([COLUMNS, *self.rows()]),
            "The whole model on this text:",
            *columns(qualities),
        ]

    def headline(self) -> str:
        """Which gates go, in one sentence."""
        gone = f"{len(self.dropped)} of {len(self.verdicts)} go" if self.dropped else "no gate goes"
        which = f" (layers {layer_ranges(self.dropped)})" if self.dropped else ""
        return f"Select gates of {self.title} by {self.rule}: {gone}{which}"

    def record(self) -> dict[str, Any]:
        """For the lineage."""
        layers = [
            {
                "layer": verdict.layer,
                "stays": verdict.stays,
                "reason": verdict.reason,
                **({} if lens is None else asdict(lens) | {"change": lens.change}),
            }
            for verdict in self.verdicts
            for lens in [self.lenses.get(verdict.layer)]
        ]
        return {"before": asdict(self.before), "after": asdict(self.after), "layers": layers}

    def rows(self) -> list[list[str]]:
        """A row for each gate: the perplexity without and with it, the change, and what becomes of the gate."""
        rows = []
        for verdict in self.verdicts:
            lens = self.lenses.get(verdict.layer)
            numbers = ["-", "-", "-"]
            if lens is not None:
                numbers = [f"{lens.perplexity_without:.6g}", f"{lens.perplexity:.6g}", f"{lens.change:+.4f}"]
            rows.append([str(verdict.layer), *numbers, verdict.word, verdict.reason])
        return rows


def selection_report(selection: Selection) -> Report:
    """The perplexity of every gated layer's output without and with its gate, and which gates stay."""
    report = Report("Which gates stay", selection.headline(), tables=[_data_table(selection)])
    report.facts(
        {
            "gates": len(selection.verdicts),
            "stay": len(selection.kept),
            "bits per byte before": f"{selection.before.bits_per_byte:.4f}",
            "after": f"{selection.after.bits_per_byte:.4f}",
        }
    )
    report.text(
        "The stream after each gated layer is read by the last norm and the head, as if the model ended there, once "
        "without and once with what the layer's gate adds. The difference decides which gates stay; the key "
        "figures above are of the whole model on the same text."
    )
    layers, lenses = list(selection.lenses), list(selection.lenses.values())
    sides = {
        "without its gate": (layers, [lens.perplexity_without for lens in lenses]),
        "with its gate": (layers, [lens.perplexity for lens in lenses]),
    }
    report.chart(
        Lines(sides, "layer", "perplexity through the head", log_y=True),
        "Perplexity of the calibration text, read after each layer.",
        name="perplexity",
    )
    changes = {"change": (layers, [lens.change for lens in lenses])}
    report.chart(
        Lines(changes, "layer", "change by the gate, nats per token", levels={"none": 0.0}),
        "What each gate changes of the perplexity's logarithm; below zero it helps.",
        name="change",
    )
    return report.table(Table(COLUMNS, selection.rows()))


def _data_table(selection: Selection) -> Table:
    rows = []
    for verdict in selection.verdicts:
        lens = selection.lenses.get(verdict.layer)
        numbers = [] if lens is None else [lens.perplexity_without, lens.perplexity, lens.change]
        cells = [f"{number:.6g}" for number in numbers] or [""] * 3
        rows.append([verdict.layer, *cells, verdict.stays, verdict.reason])
    columns = ["layer", "perplexity_without", "perplexity", "change", "stays", "reason"]
    return Table(columns, rows, name="layers")


def select_gates(
    model: Any,
    title: str,
    folder: Path,
    tokenizer: BraidTokenizer,
    documents: Sequence[Sequence[int]],
    text: HeldOutText,
    rule: Rule,
    keep: int | None,
    threshold: float | None,
) -> Selection:
    """Measure the gates of a model on documents of a text, and judge them by a rule."""
    with console.progress("perplexity of each layer", sum(map(len, documents)), "tokens") as advance:
        lenses = {lens.layer: lens for lens in gate_lens(model, documents, advance)}
    verdicts = judge({layer: lens.change for layer, lens in lenses.items()}, rule, keep, threshold)
    known = {verdict.layer: verdict for verdict in verdicts}
    unread = "its stream has another width than the head reads, so it cannot be judged"
    verdicts = [known.get(layer, Verdict(layer, True, unread)) for layer in gates_of(model)]
    dropped = [verdict.layer for verdict in verdicts if not verdict.stays]
    if len(dropped) == len(verdicts) and keep != 0:
        raise BraidError(
            f"by the rule {rule} every gate would go: {_why_all(lenses)}",
            title,
            "Choose another rule, a lower --threshold, or --keep N; `--keep 0` takes all gates away.",
        )
    before = quality(model, tokenizer, folder, text)
    after = quality(model, tokenizer, folder, text, dropped) if dropped else before
    longest = max(documents, key=len)[: min(PROBE, context_limit(model))]
    return Selection(title, rule, lenses, verdicts, before, after, torch.tensor([list(longest)]))


@torch.no_grad()
def logits_without(model: Any, selection: Selection) -> Tensor:
    """What a model predicts with the gates switched off that are to go."""
    with without(model, selection.dropped):
        return model(selection.probe.to(model.device)).logits  # type: ignore[no-any-return]


@torch.no_grad()
def check_equal(expected: Tensor, edited: Any, selection: Selection) -> None:
    """The new model predicts what the old one did with these gates switched off, on the same device."""
    home = edited.device
    logits = edited.to(expected.device)(selection.probe.to(expected.device)).logits
    edited.to(home)
    change = (expected - logits).abs().max().item()
    check_promise(change, "without these gates a logit should be what it is with them switched off, and one differs by")


def _why_all(lenses: dict[int, LayerLens]) -> str:
    if not any(lens.change for lens in lenses.values()):
        return "none has moved from zero, or none changes the perplexity"
    largest = max(lenses.values(), key=lambda lens: abs(lens.change))
    return f"none meets it (the largest change is {largest.change:+.4f} nats, at layer {largest.layer})"
