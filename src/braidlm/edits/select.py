"""`braid edit select`: leave out the gates that a text hardly needs (Self-MoE, section 3.3)."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from braidlm.core import console
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError
from braidlm.core.models.logits import check_promise
from braidlm.core.models.runs import LORA_CONFIG
from braidlm.core.report.rendering import check_out, write
from braidlm.core.report.report import Lines, Report, Table
from braidlm.edits.account import Account, columns, planned
from braidlm.edits.edit import Edit, EditPlan, edits, show_plan
from braidlm.edits.gate import layer_ranges, write_gated
from braidlm.edits.matrices import bits_per_byte
from braidlm.edits.modules import calibration_texts
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.formats.held_out_text import read_text
from braidlm.evals.results import TaskResult
from braidlm.inspection.gates import LayerLens, context_limit, gate_lens
from braidlm.model.config.ranges import Count, Layers, LayersOrZero, Rate
from braidlm.model.config.strict import encode
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.gated_folders import TOKENIZER_FILES, read_adapter
from braidlm.opening.gating import detach, gates_of, without
from braidlm.opening.opened_model import OpenedModel

Rule = Literal["smallest-change", "only-if-helps", "as_printed"]

LORA_FILES = (LORA_CONFIG, "adapter_model.safetensors")
"""Adapters that may stand beside the gates of a decoder, and stay as they are."""
PROBE = 64
COLUMNS = ["layer", "perplexity without", "with its gate", "change", "", "why"]


RULES: dict[str, tuple[str, Callable[[float], float], float]] = {
    "smallest-change": ("change", abs, 0.1),
    "only-if-helps": ("lower", lambda change: -change, 0.0),
    "as_printed": ("raise", lambda change: change, 0.0),
}
"""For each rule what a gate that stays does to the perplexity, what a change of the perplexity's logarithm counts in
its favour, and by default the share of the largest score above which gates stay."""


@edits.register("select")
@dataclass(frozen=True)
class Select(Edit):
    """Which gates go."""

    about: ClassVar[str] = "leave out the gates that a text hardly needs (Self-MoE)"
    backend = "any"

    text: str
    """The calibration text: a file, a folder or packed data of what the gates were trained on."""
    rule: Rule = "smallest-change"
    """Gates stay if they change the perplexity of their layer's output, read through the head (smallest-change, what
    the paper says); only if they lower it (only-if-helps); or only if they raise it (as_printed: the paper's Eq. 5)."""
    threshold: Rate | None = None
    """A gate must do so by more than this share of what the gate does that does it most; by default 0.1 for
    smallest-change, 0 for the other rules."""
    keep: LayersOrZero | None = None
    """Instead of a threshold: how many gates stay at most, those that do so most; 0 takes all away."""
    before: Layers | None = None
    """Instead of a rule: every gate before this layer, counted from 1, goes (the paper's Table 6)."""
    tokens: Count = 20_000
    """How many tokens of the text are read."""
    report: str | None = None
    """A folder to write, also in a dry run: the table (CSV) and select.html."""

    def __post_init__(self) -> None:
        if self.threshold is not None and self.keep is not None:
            raise BraidError("give either a threshold or the number of gates to keep", todo="`--threshold 0.1`")
        if self.before is not None and (self.threshold, self.keep) != (None, None):
            raise BraidError("a layer before which all gates go needs neither threshold nor keep", todo="`--before 7`")

    def plan(self, source: OpenedBraid) -> EditPlan:
        if not (gates := source.config.decoded.gates):
            raise _no_gates(source.title)
        model = source.load(dtype=torch.float32).to(choose_device("auto"))
        selection = self._select(model, source)
        kept = encode(gates) | {"layers": selection.layers(stay=True)}
        edited, account = planned(source.config_with(gates=kept if kept["layers"] else None))
        account.leave_out_unused(source.info.tensors, "its gate goes")

        def measure(edited: BraidForCausalLM) -> dict[str, Any]:
            selection.check_equal(selection.logits_without(model), edited)
            return selection.record()

        zero = not any(lens.change for layer, lens in selection.lenses.items() if layer in selection.layers(stay=False))
        title, *details = selection.lines()
        probe = selection.probe if zero else None
        return EditPlan(title, edited, account, source.notes, details, unchanged_on=probe, measure=measure)

    def apply(self, model: OpenedModel, out: str | Path | None, record: dict[str, Any], dry_run: bool) -> Path | None:
        if not isinstance(model, OpenedDecoder):
            return super().apply(model, out, record, dry_run)
        if not model.is_gated:
            raise _no_gates(model.title)
        adapter = read_adapter(model.folder) if model.has_gates else None
        if self.keep == 0:
            todo = f"Use its base: {adapter.base}." if adapter else "Keep at least one."
            raise BraidError("a decoder without any gate is a plain one", str(model.folder), todo)
        decoder = model.load(choose_device("auto"), getattr(model.config, "dtype", None) or torch.float32)
        selection = self._select(decoder, model)
        if show_plan(selection.lines(), Account(), (), dry_run):
            return None
        expected = selection.logits_without(decoder)
        detach(decoder, selection.layers(stay=False))
        selection.check_equal(expected, decoder)
        base = (adapter.base, adapter.base_sha256) if adapter else None
        beside = [path for pattern in (*LORA_FILES, *TOKENIZER_FILES) for path in model.folder.glob(pattern)]
        return write_gated(decoder, model, out, record | {"measured": selection.record()}, {}, base, beside)

    def _select(self, model: Any, opened: OpenedModel) -> "Selection":
        """What becomes of the gates of a loaded model; the report of it is written if there is to be one."""
        if self.report is not None:
            check_out(self.report, "braid edit select", "select.html", fresh=True)
        text = read_text(self.text, Settings(max_tokens=self.tokens))
        documents = calibration_texts(opened, self.text, self.tokens)
        with console.progress("perplexity of each layer", sum(map(len, documents)), "tokens") as advance:
            lenses = {lens.layer: lens for lens in gate_lens(model, documents, advance)}
        changes = {layer: lens.change for layer, lens in lenses.items()}
        known = {verdict.layer: verdict for verdict in judge(changes, self.rule, self.keep, self.threshold)}
        unread = "its stream has another width than the head reads, so it cannot be judged"
        verdicts = [known.get(layer, Verdict(layer, True, unread)) for layer in gates_of(model)]
        if self.before is not None:
            reasons = (f"from layer {self.before} on", f"before layer {self.before}")
            verdicts = [Verdict(v.layer, v.layer >= self.before, reasons[v.layer < self.before]) for v in verdicts]
        dropped = [verdict.layer for verdict in verdicts if not verdict.stays]
        if len(dropped) == len(verdicts) and self.keep != 0:
            if self.before is not None:
                raise BraidError(f"before: all gates are before layer {self.before}", opened.title, "`--keep 0`")
            why = "none has moved from zero, or none changes the perplexity"
            if any(changes.values()):
                largest = max(changes, key=lambda layer: abs(changes[layer]))
                why = f"none meets it (the largest change is {changes[largest]:+.4f} nats, at layer {largest})"
            todo = "Choose another rule, a lower --threshold, or --keep N; `--keep 0` takes all gates away."
            raise BraidError(f"by the rule {self.rule} every gate would go: {why}", opened.title, todo)

        before = after = Quality.of(bits_per_byte(model, opened, text))
        if dropped:
            with without(model, dropped):
                after = Quality.of(bits_per_byte(model, opened, text))
        longest = max(documents, key=len)[: min(PROBE, context_limit(model))]
        selection = Selection(opened.title, self.rule, lenses, verdicts, before, after, torch.tensor([list(longest)]))
        if self.report is not None:
            write(selection.report(), self.report, "select", fresh=True)
        return selection


def _no_gates(title: str) -> BraidError:
    return BraidError("this model has no gates to select from", title, "`braid edit gate MODEL --out DIR` adds some.")


class Verdict(NamedTuple):
    """What becomes of one gate."""

    layer: int
    stays: bool
    reason: str


def judge(
    changes: Mapping[int, float], rule: Rule, keep: int | None = None, threshold: float | None = None
) -> list[Verdict]:
    """What becomes of the gate of each layer, by the change of the perplexity's logarithm that it makes there.

    Those stay whose score is above zero and above `threshold` times the largest; or, of those above zero, the `keep`
    with the largest.
    """
    verb, in_favour, default = RULES[rule]
    scores = {layer: in_favour(change) for layer, change in changes.items()}
    share = 0.0 if keep is not None else default if threshold is None else threshold
    limit = share * max([0.0, *scores.values()])
    above = sorted((layer for layer, score in scores.items() if score > limit), key=lambda layer: -scores[layer])
    verdicts = []
    for layer, score in scores.items():
        reason = f"{verb}s the perplexity"
        if layer in above and keep is not None:
            rank = above.index(layer) + 1
            reason += f", rank {rank} of {len(above)}" + ("" if rank <= keep else f": not among the first {keep}")
        elif score == 0:
            reason = "changes nothing"
        elif layer not in above:
            more = f" by more than {limit:.4f}" if limit and score > 0 else ""
            reason = f"does not {verb} the perplexity{more}"
        verdicts.append(Verdict(layer, layer in above[:keep], reason))
    return verdicts


@dataclass(frozen=True)
class Quality:
    """How well a whole model predicts a text."""

    bits_per_byte: float
    perplexity: float
    """Per token."""

    @classmethod
    def of(cls, text: TaskResult) -> "Quality":
        return cls(text.score, 2.0 ** (text.score * text.notes["bytes"] / text.notes["tokens"]))


@dataclass(frozen=True)
class Selection:
    """What was measured, and what becomes of each gate."""

    title: str
    rule: Rule
    lenses: dict[int, LayerLens]
    verdicts: list[Verdict]
    before: Quality
    after: Quality
    probe: Tensor
    """Token ids [1, time] of the text."""

    def layers(self, stay: bool) -> list[int]:
        """The layers whose gates stay, or go."""
        return [verdict.layer for verdict in self.verdicts if verdict.stays == stay]

    def headline(self) -> str:
        """Which gates go, in one sentence."""
        gone = self.layers(stay=False)
        text = f"{len(gone)} of {len(self.verdicts)} go (layers {layer_ranges(gone)})" if gone else "no gate goes"
        return f"Select gates of {self.title} by {self.rule}: {text}"

    def lines(self) -> list[str]:
        """The plan in words: what each gate does, what becomes of it and why, and the quality before and after."""
        both = (self.before, self.after)
        bits, perplexities = [f"{one.bits_per_byte:.4f}" for one in both], [f"{one.perplexity:.4g}" for one in both]
        qualities = [["", "before", "after"], ["bits per byte", *bits], ["perplexity", *perplexities]]
        gates = columns([COLUMNS, *self._shown()])
        return [self.headline(), *gates, "The whole model on this text:", *columns(qualities)]

    def record(self) -> dict[str, Any]:
        """For the lineage."""
        layers = []
        for verdict in self.verdicts:
            lens = self.lenses.get(verdict.layer)
            layers.append(verdict._asdict() | ({} if lens is None else asdict(lens) | {"change": lens.change}))
        return {"before": asdict(self.before), "after": asdict(self.after), "layers": layers}

    def _rows(self, change: str, unknown: str) -> list[list[Any]]:
        """A row for each gate: the perplexity without and with it, the change in this form, and what becomes of it."""
        rows = []
        for layer, stays, reason in self.verdicts:
            numbers = [unknown] * 3
            if (lens := self.lenses.get(layer)) is not None:
                numbers = [f"{lens.perplexity_without:.6g}", f"{lens.perplexity:.6g}", format(lens.change, change)]
            rows.append([layer, *numbers, stays, reason])
        return rows

    def _shown(self) -> list[list[str]]:
        """The rows for people."""
        rows = self._rows("+.4f", "-")
        return [[str(layer), *numbers, "stays" if stays else "goes", why] for layer, *numbers, stays, why in rows]

    def report(self) -> Report:
        """The perplexity of every gated layer's output without and with its gate, and which gates stay."""
        names = ["layer", "perplexity_without", "perplexity", "change", "stays", "reason"]
        data = Table(names, self._rows(".6g", ""), name="layers")
        report = Report("Which gates stay", self.headline(), tables=[data])
        before, after = self.before.bits_per_byte, self.after.bits_per_byte
        report.verdict = (
            f"{len(self.layers(stay=False))} of {len(self.verdicts)} gates of {self.title} go, and the whole model "
            f"goes from {before:.4f} to {after:.4f} bits per byte ({after - before:+.4f}).\n\nHow sure: this was "
            "measured on the calibration text alone, the text by which the gates were chosen."
        )
        facts = {"gates": len(self.verdicts), "stay": len(self.layers(stay=True))}
        report.facts(facts | {"bits per byte before": f"{before:.4f}", "after": f"{after:.4f}"})
        report.text(
            "The stream after each gated layer is read by the last norm and the head, as if the model ended there, "
            "once without and once with what the layer's gate adds. The difference decides which gates stay; the key "
            "figures above are of the whole model on the same text."
        )
        layers, lenses = list(self.lenses), list(self.lenses.values())
        sides = {
            "without its gate": (layers, [lens.perplexity_without for lens in lenses]),
            "with its gate": (layers, [lens.perplexity for lens in lenses]),
        }
        chart = Lines(sides, "layer", "perplexity through the head", log_y=True)
        report.chart(chart, "Perplexity of the calibration text, read after each layer.", name="perplexity")
        changes = {"change": (layers, [lens.change for lens in lenses])}
        chart = Lines(changes, "layer", "change by the gate, nats per token", levels={"none": 0.0})
        caption = "What each gate changes of the perplexity's logarithm; below zero it helps."
        return report.chart(chart, caption, name="change").table(Table(COLUMNS, self._shown()))

    @torch.no_grad()
    def logits_without(self, model: Any) -> Tensor:
        """What a model predicts with the gates switched off that are to go."""
        with without(model, self.layers(stay=False)):
            return model(self.probe.to(model.device)).logits  # type: ignore[no-any-return]

    @torch.no_grad()
    def check_equal(self, expected: Tensor, edited: Any) -> None:
        """The new model predicts what the old one did with these gates switched off, on the same device."""
        home = edited.device
        logits = edited.to(expected.device)(self.probe.to(expected.device)).logits
        edited.to(home)
        promise = "without these gates a logit should be what it is with them switched off, and one differs by"
        check_promise(promise, expected, logits)
