"""`braid edit prune`: leave out what a task hardly uses: modules (ModuleFormer, section 5.3), or heads, channels and
layers of dense blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.edits.account import SOURCE, Part, chosen_rows, from_source, parameters, planned, staying
from braidlm.edits.criteria import Criterion, Normalisation
from braidlm.edits.dense import measure_importance, with_fewer
from braidlm.edits.edit import Edit, EditPlan, edits
from braidlm.edits.matrices import measure_beside
from braidlm.edits.modules import (
    Modules,
    Usage,
    all_modules,
    calibrate,
    calibration_texts,
    layers_of,
    modules_of,
    stages_of,
    still_frozen,
)
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.ranges import Count, Heads, Layers, Probability, Share, Size
from braidlm.opening.braid import OpenedBraid

PROBE = 64
"""Tokens of each text at which logits are compared, where only modules that no token chose go."""


@edits.register("prune")
@dataclass(frozen=True)
class Prune(Edit):
    """Which modules go, or how many heads, channels and layers stay."""

    about: ClassVar[str] = "leave out the modules, or the heads, channels and layers, that a text hardly uses"

    text: str
    """The calibration text: a file, a folder or packed data of the task."""
    threshold: Share | None = None
    """Modules below this share of their layer's most used one (or of the sum) go; 0 takes only those never used."""
    keep: Probability | None = None
    """Instead of a threshold: the share of the model's parameters that is kept at most; the least used go first."""
    criterion: Criterion = "frequency"
    """How use is measured: how often a module is chosen (the paper's), or its weight times the norm of its output."""
    normalise: Normalisation = "max"
    """Whether a module's use is divided by that of the layer's most used one (the paper's), or by the layer's sum."""
    tokens: Count = 100_000
    """How many tokens of the text are read."""
    heads: Heads | None = None
    """Of a dense model: how many query heads every attention keeps, those that add most to the stream on the text."""
    channels: Size | None = None
    """Of a dense model: how many inner channels every feed-forward part keeps, those that add most."""
    layers: Layers | None = None
    """Of a dense model: how many of its blocks stay, those that turn the stream most."""

    def __post_init__(self) -> None:
        modules = [self.threshold, self.keep]
        if self.numbers:
            if modules != [None, None] or (self.criterion, self.normalise) != ("frequency", "max"):
                what = "threshold, keep, criterion and normalise choose among modules; heads, channels and layers are"
                raise BraidError(f"{what} numbers that stay", todo="Prune one after the other, in two edits.")
        elif modules.count(None) != 1:
            todo = "`--threshold 0.01`; of a dense model say what stays: `--heads 4 --channels 256 --layers 6`."
            raise BraidError("give either a threshold or the share of parameters to keep", todo=todo)

    @property
    def numbers(self) -> dict[str, int]:
        """How many heads, channels or layers stay."""
        return {name: number for name in ("heads", "channels", "layers") if (number := getattr(self, name)) is not None}

    def plan(self, source: OpenedBraid) -> EditPlan:
        if self.numbers:
            texts = calibration_texts(source, self.text, self.tokens)
            return self.plan_numbers(source, texts, measure_importance(source, texts))
        return self.plan_for(source, *calibrate(source, self.text, self.tokens, self.criterion))

    def plan_numbers(self, source: OpenedBraid, texts: Sequence[Sequence[int]], importance: Usage) -> EditPlan:
        """The plan for a dense model whose parts have this importance."""
        smaller = with_fewer(source, self.numbers, importance)
        stay = ", ".join(f"{number:,} {name}" for name, number in self.numbers.items())
        size = staying(source.info.parameters, parameters(smaller.model))
        notes = list(source.notes)
        probe = _probe(texts, smaller.config) if smaller.changes_nothing else None
        if probe is None:
            notes.append("the model predicts less well now: heal it, with `braid train RECIPE start_from=DIR`")
        title = f"Prune {source.title} to {stay}: {size}"
        measure = measure_beside(source, self.text, self.tokens)
        return EditPlan(
            title, smaller.model, smaller.account, notes, smaller.details, unchanged_on=probe, measure=measure
        )

    def plan_for(self, source: OpenedBraid, texts: Sequence[Sequence[int]], usage: Usage) -> EditPlan:
        """The plan for a model whose use of modules on these texts has been measured."""
        layers, modules = layers_of(source.info), all_modules(source)
        largest = {name: used.max() if self.normalise == "max" else used.sum() for name, used in usage.items()}
        usage = {name: used / largest[name].clamp_min(torch.finfo(used.dtype).tiny) for name, used in usage.items()}
        kept = self._kept(source, modules, usage)
        dropped = {one.address: [i for i in range(len(one.names)) if i not in kept[one.address]] for one in modules}
        silenced = {one.address: _silenced(source, one, dropped[one.address]) for one in modules}
        for layer in layers:
            for one in modules_of(layer):
                experts = layer.options[one.part]["experts"]
                names, router = [one.names[i] for i in kept[one.address]], experts["router"]
                experts["names"], router["new"] = names, [name for name in names if name in one.new]
                router["base_top_k"] = router["base_top_k"] if router["new"] else None
                router["top_k"] = min(router["top_k"], len(names))
                router["sampled"] = min(router["sampled"], router["top_k"])
                router["silent"] += len(silenced[one.address])
        stages, addresses = stages_of(layers)
        grown = any(one.new for layer in layers for one in modules_of(layer))
        config = source.config_with(still_frozen(source, grown), stages=stages)
        model, account = planned(config, addresses)
        for name, origin in account.derived.items():
            tensor = origin.parts[0].tensor
            for one in modules:
                if one.has_rows(tensor) and dropped[one.address]:
                    rows = one.rows_of(tensor, kept[one.address], silenced[one.address])
                    account.origins[name] = from_source(tensor, chosen_rows(rows))
        for one in modules:
            if one.new and not one.rows_of(one.opening, kept[one.address], ()):
                account.left_out[Part(SOURCE, one.opening)] = "no inserted module is left"
        go = f"{sum(map(len, dropped.values()))} of {sum(len(one.names) for one in modules)} modules go"
        title = f"Prune {source.title}: {go}, {staying(source.info.parameters, parameters(model))}"
        details, notes = [], []
        for one in modules:
            used, left, top_k = usage[one.address], len(kept[one.address]), one.router["top_k"]
            gone = ", ".join(f"{one.names[i]} ({used[i].item():.3g})" for i in dropped[one.address])
            details.append(f"  {one.address}: {left} of {len(one.names)} stay, {f'without {gone}' if gone else 'all'}")
            if left < top_k:
                notes.append(f"{one.address}: a token used {top_k} modules, and {left} are left")
        spared = all(not usage[address][i] for address, indices in dropped.items() for i in indices)
        probe = _probe(texts, config) if spared else None
        return EditPlan(title, model, account, notes, details, unchanged_on=probe)

    def _kept(self, source: OpenedBraid, modules: list[Modules], usage: Usage) -> dict[str, list[int]]:
        """The indices of the modules that stay, by the address of their part."""
        kept = {one.address: list(range(len(one.names))) for one in modules}
        if self.threshold is not None:
            for address, used in usage.items():
                kept[address] = [i for i in kept[address] if used[i] > 0 and used[i] >= self.threshold]
                if not kept[address]:
                    what = f"no module of {address} reaches the threshold {self.threshold:g}"
                    raise BraidError(what, todo=f"Its most used has {used.max().item():.3g}: choose a lower threshold.")
            return kept
        assert self.keep is not None
        total = left = source.info.parameters
        sizes = {one.address: one.size(source.info) for one in modules}
        for _, address, index in sorted((used.item(), a, i) for a in kept for i, used in enumerate(usage[a])):
            if left <= self.keep * total:
                break
            if len(kept[address]) > 1:  # a layer keeps its most used module
                kept[address].remove(index)
                left -= sizes[address]
        if left > self.keep * total:
            what = f"with one module in every layer {left / total:.1%} of the parameters are left, more than"
            raise BraidError(f"{what} {self.keep:.1%}", todo="Keep a larger share.")
        return kept


def _probe(texts: Sequence[Sequence[int]], config: BraidConfig) -> Tensor:
    """The beginnings of the longest texts."""
    length = min(max(map(len, texts)), PROBE, config.max_position_embeddings)
    return torch.tensor([list(text[:length]) for text in texts if len(text) >= length][:2])


def _silenced(source: OpenedBraid, one: Modules, dropped: Sequence[int]) -> list[int]:
    """The modules that go while their scores still count."""
    if not one.scores_stay:
        return []
    openings = one.openings(source)
    gone = {i: openings.get(one.names[i], 1.0) for i in dropped}
    if opening := [one.names[i] for i, share in gone.items() if 0 < share < 1]:
        todo = "Train the model on first: `training.opening` is the share of a training that opens them."
        raise BraidError(f"these modules were inserted and are not open yet: {', '.join(opening)}", one.address, todo)
    return [i for i, share in gone.items() if share]
