"""A conversion of one model between Braid and another format: planned and checked whole, then written."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidlm.bridges.bridge import ExportingBridge, TensorMapping, bridges
from braidlm.bridges.checkpoint import Shapes
from braidlm.bridges.model_info import ModelInfo
from braidlm.core.differences import bullet_list, compare_shapes
from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.card import licence_record
from braidlm.core.models.folders import (
    WEIGHTS,
    check_weights,
    fill,
    load_config,
    load_lineage,
    load_model,
    save_model,
    versions,
)
from braidlm.data.tokenizing.build import BraidTokenizer
from braidlm.model.modeling_braid import BraidForCausalLM


@dataclass
class ConversionPlan:
    """Which tensors become which, with notes for the user."""

    title: str
    mappings: list[TensorMapping]
    shapes: Shapes
    """Shapes of the foreign tensors that are converted."""
    exporting: bool
    """Whether the conversion is from Braid to the other format."""
    notes: list[str]

    @property
    def tensors(self) -> int:
        """How many tensors of the other format are converted."""
        return sum(len(mapping.foreign) for mapping in self.mappings)

    def lines(self) -> list[str]:
        """The plan as text; equal mappings are one line, with layer numbers replaced by *."""
        parameters = sum(prod(self.shapes[name]) for mapping in self.mappings for name in mapping.foreign)
        summary = f"{self.tensors} tensors of theirs, {len(self.mappings)} of ours, {parameters:,} parameters"
        counted: Counter[str] = Counter()
        for mapping in self.mappings:
            names = [_pattern(_merged_names(mapping.foreign)), _pattern(mapping.braid)]
            source, target = names[::-1] if self.exporting else names
            change = mapping.describe(self.exporting)
            counted[f"{source} -> {target}{f' ({change})' if change else ''}"] += 1
        rows = [f"  {times:>3} x {row}" for row, times in counted.items()]
        return [f"{self.title}: {summary}", *rows, *(f"  note: {note}" for note in self.notes)]


class Import:
    """A checkpoint of another format as a model of ours: the constructor checks everything, and only `write` writes."""

    def __init__(self, path: Path, name: str, kind: str, tokenizer: BraidTokenizer | None, config: Path | None = None):
        """`name` is the checkpoint's in the lineage; `config` is given with a single file of weights."""
        self.path, self.name, self.kind, self.tokenizer = path, name, kind, tokenizer
        bridge = bridges[kind]()
        opened = bridge.open(path, config)
        self.checkpoint = opened.checkpoint
        self.info = ModelInfo(opened.config)
        self.mappings = bridge.checked_mappings(self.info)
        shapes = bridge.foreign_shapes(self.info, self.mappings)
        self.checkpoint.check(shapes, opened.description, path)
        rows = opened.config.vocab_size
        if tokenizer is not None and tokenizer.vocab_size > rows:
            raise BraidError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {rows} rows for them",
                str(path),
                "Use the tokenizer the model was made for, or enlarge the model first with transformers' "
                "`model.resize_token_embeddings`.",
            )
        notes, ignored = list(opened.notes), self.checkpoint.ignored
        for why in dict.fromkeys(ignored.values()):
            names = [name for name, reason in ignored.items() if reason == why]
            notes.append(f"not read: {_counted_patterns(names)} ({why})")
        if (dtypes := self.checkpoint.dtypes) != ["float32"]:
            notes.append(f"the weights are {' and '.join(dtypes)}; they are written as float32")
        self.plan = ConversionPlan(f"{bridge.title} to Braid", self.mappings, shapes, False, notes)

    def write(self, out: Path) -> None:
        """Read the tensors one after another and write the model folder."""
        source = {"path": self.name, "format": self.kind, "weights": self.checkpoint.hashes()}
        lineage: dict[str, Any] = {
            "made_by": f"convert from {self.kind}",
            "sources": [source | licence_record(self.path)],
            **({"ignored": self.checkpoint.ignored} if self.checkpoint.ignored else {}),
        }
        save_model(self.model(), out, self.tokenizer, lineage)

    def model(self) -> BraidForCausalLM:
        """The checkpoint as a model in memory, in evaluation mode."""
        tensors = {mapping.braid: self.read(mapping) for mapping in self.mappings}
        return fill(skeleton(self.info.config), tensors)

    def read(self, mapping: TensorMapping) -> Tensor:
        """One tensor of ours."""
        return mapping.to_braid([self.checkpoint.read(name) for name in mapping.foreign])


class Export:
    """A Braid model folder in another format: the constructor checks everything, and only `write` writes."""

    def __init__(self, folder: Path, name: str, kind: str, bridge: ExportingBridge, tokenizer: BraidTokenizer | None):
        self.folder, self.name, self.kind, self.tokenizer = folder, name, kind, tokenizer
        info = ModelInfo(load_config(folder))
        check_weights(folder, info.model)
        if problems := bridge.export_problems(info) + bridge.tokenizer_problems(info, tokenizer):
            raise BraidError(f"{bridge.title} cannot express this model:{bullet_list(problems)}", str(folder))
        self.target = bridge.target(info)
        self.mappings = bridge.checked_mappings(info)
        shapes = bridge.foreign_shapes(info, self.mappings)
        self.zeros: Shapes = {}
        """Biases that the format always has and our model has not."""
        if bridge.zero_biases:
            self.zeros = {n: s for n, s in self.target.shapes.items() if n.endswith(".bias") and n not in shapes}
        if problems := compare_shapes(self.target.shapes, shapes | self.zeros):
            raise BraidError(f"the tensors do not fit {bridge.title}:{bullet_list(problems)}", str(folder))
        notes = bridge.export_notes(info) + info.copied_weights()
        if self.zeros:
            added = _counted_patterns(self.zeros)
            notes.append(f"{bridge.title} always has biases; added as zeros (logits do not change): {added}")
        self.plan = ConversionPlan(f"Braid to {bridge.title}", self.mappings, shapes, True, notes)

    def write(self, out: Path) -> None:
        """Write the folder or file in one atomic step."""
        state = load_model(self.folder).state_dict()
        tensors = {name: torch.zeros(shape) for name, shape in self.zeros.items()}
        for mapping in self.mappings:
            tensors |= mapping.to_foreign(state[mapping.braid].float())
        source = {
            "path": self.name,
            "format": "braid",
            "weights": [{"file": WEIGHTS, "sha256": sha256_of(self.folder / WEIGHTS)}],
            **licence_record(self.folder),
            "lineage": load_lineage(self.folder),
        }
        made_by = f"convert to {self.kind}"
        lineage = {"format": 1, "made_by": made_by, "sources": [source], "versions": versions()}
        self.target.write(out, tensors, self.tokenizer, lineage)


def _counted_patterns(names: Iterable[str]) -> str:
    """'12 x h.*.attn.bias, 1 x ...' of many names."""
    return ", ".join(f"{times} x {pattern}" for pattern, times in Counter(map(_pattern, names)).items())


def _merged_names(names: tuple[str, ...]) -> str:
    """`self_attn.{q_proj,k_proj}.weight` for names that differ in one segment."""
    segments = (list(dict.fromkeys(words)) for words in zip(*(name.split(".") for name in names), strict=True))
    return ".".join(words[0] if len(words) == 1 else f"{{{','.join(words)}}}" for words in segments)


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)
