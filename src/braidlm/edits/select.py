"""`braid edit select`: leave out the gates that a text hardly needs (Self-MoE, section 3.3)."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from braidlm.core import console
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.runs import LORA_CONFIG
from braidlm.core.reading import given_path
from braidlm.core.report.write import check_out, write
from braidlm.edits.account import Part, targets
from braidlm.edits.edit import SOURCE, Edit, EditPlan, edits
from braidlm.edits.gate import TOKENIZER_FILES, write_full
from braidlm.edits.gate_selection import Rule, Selection, check_equal, logits_without, select_gates, selection_report
from braidlm.edits.modules import moved
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.formats.held_out_text import read_text
from braidlm.inspection.texts import DataSource
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.ranges import Count, LayersOrZero, Rate
from braidlm.model.config.strict import encode
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.adapter import read_adapter, write_adapter_files
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.gating import detach
from braidlm.opening.opened_model import OpenedModel

LORA_FILES = (LORA_CONFIG, "adapter_model.safetensors")
"""Adapters that may stand beside the gates of a decoder, and stay as they are."""


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
    tokens: Count = 20_000
    """How many tokens of the text are read."""
    report: str | None = None
    """A folder to write, also in a dry run: the table (CSV), the plot of it (PNG) and select.html."""

    def __post_init__(self) -> None:
        if self.threshold is not None and self.keep is not None:
            raise BraidError("give either a threshold or the number of gates to keep", todo="`--threshold 0.1`")

    def plan(self, source: OpenedBraid) -> EditPlan:
        if not source.config.decoded.gates:
            raise no_gates(source.title)
        model = source.load(dtype=torch.float32).to(choose_device("auto"))
        selection = self.select(model, source)
        planned = skeleton(_with_gates(source, selection.kept))
        account = moved(list(targets(planned)), SOURCE, {})
        used = {part.tensor for origin in account.derived.values() for part in origin.parts}
        for name in source.info.tensors:
            if name not in used:
                account.left_out[Part(SOURCE, name)] = "its gate goes"

        def measure(edited: BraidForCausalLM) -> dict[str, Any]:
            check_equal(logits_without(model, selection), edited, selection)
            return selection.record()

        zero = not any(lens.change for layer, lens in selection.lenses.items() if layer in selection.dropped)
        title, *details = selection.lines()
        probe = selection.probe if zero else None
        return EditPlan(title, planned, account, source.notes, details, unchanged_on=probe, measure=measure)

    def apply(self, model: OpenedModel, out: str | Path | None, record: dict[str, Any], dry_run: bool) -> Path | None:
        if isinstance(model, OpenedDecoder):
            return self._apply_to_decoder(model, out, record, dry_run)
        return super().apply(model, out, record, dry_run)

    def _apply_to_decoder(
        self, opened: OpenedDecoder, out: str | Path | None, record: dict[str, Any], dry_run: bool
    ) -> Path | None:
        if not opened.is_gated:
            raise no_gates(opened.title)
        if self.keep == 0:
            todo = f"Use its base: {read_adapter(opened.folder).base}." if opened.has_gates else "Keep at least one."
            raise BraidError("a decoder without any gate is a plain one", str(opened.folder), todo)
        model = opened.load(choose_device("auto"), getattr(opened.config, "dtype", None) or torch.float32)
        selection = self.select(model, opened)
        for line in selection.lines():
            (console.show if dry_run else console.say)(line)
        if dry_run:
            return None
        assert out is not None
        expected = logits_without(model, selection)
        detach(model, selection.dropped)
        check_equal(expected, model, selection)
        lineage = {**record, "measured": selection.record(), "sources": [{"name": SOURCE, **opened.record()}]}
        folder = given_path(out)
        with atomic_folder(folder) as scratch:
            if opened.has_gates:
                _write_adapter(model, opened, scratch, lineage, folder.name)
            else:
                write_full(model, opened, scratch, lineage, folder.name)
        return folder

    def select(self, model: Any, opened: OpenedModel) -> Selection:
        """What becomes of the gates of a loaded model; the report of it is written if there is to be one."""
        if self.report is not None:
            check_out(self.report, "braid edit select", "select.html", fresh=True)
        text = read_text(self.text, Settings(max_tokens=self.tokens))
        data = DataSource("text", self.text, self.tokens, called=self.text)
        documents = [document.ids for document in data.texts(opened.tokenizer)]
        selection = select_gates(
            model,
            opened.title,
            opened.folder,
            opened.tokenizer,
            documents,
            text,
            self.rule,
            self.keep,
            self.threshold,
        )
        if self.report is not None:
            write(selection_report(selection), self.report, "select", fresh=True)
        return selection


def no_gates(title: str) -> BraidError:
    """What is said of a model that has none."""
    return BraidError("this model has no gates to select from", title, "`braid edit gate MODEL --out DIR` adds some.")


def _write_adapter(model: Any, opened: OpenedDecoder, folder: Path, lineage: dict[str, Any], name: str) -> None:
    """The gates that are left, and what else stood beside them."""
    adapter = read_adapter(opened.folder)
    write_adapter_files(model, folder, adapter.base, adapter.base_sha256, lineage, name)
    for path in (path for pattern in (*LORA_FILES, *TOKENIZER_FILES) for path in opened.folder.glob(pattern)):
        shutil.copyfile(path, folder / path.name)


def _with_gates(source: OpenedBraid, layers: list[int]) -> BraidConfig:
    """The configuration with the gates of these layers only."""
    return source.config_with(gates=encode(source.config.decoded.gates) | {"layers": layers} if layers else None)
