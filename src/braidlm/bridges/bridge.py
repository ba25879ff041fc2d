"""The contract of a bridge: how a checkpoint of a format is opened, and which of its tensors is which of ours.

One table of tensor mappings serves both directions, so an import and an export cannot disagree. A conversion is planned
and checked whole, then written.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from braidlm.bridges.checkpoint import Checkpoint, Shapes
from braidlm.bridges.model_info import ModelInfo
from braidlm.core.differences import bullet_list, compare_shapes
from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, sha256_of, write_json, write_text
from braidlm.core.models.accounting import CountedModel, skeleton
from braidlm.core.models.card import CARD, licence_record, model_card
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
from braidlm.core.models.logits import Probe
from braidlm.core.models.runs import length_record
from braidlm.data.tokenizing.build import BraidTokenizer
from braidlm.model.compression import QuantisedMatrix, QuantisedStack, compressions
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.registry import Registry

if TYPE_CHECKING:
    from braidlm.model.modeling_braid import BraidForCausalLM

bridges = Registry("format")


@dataclass(frozen=True)
class TensorMapping:
    """One tensor of ours and the tensor or tensors of the other format that hold the same numbers."""

    braid: str
    foreign: tuple[str, ...]
    """Where ours is a stack: the tensors of its first module, then of the second, and so on."""
    sizes: tuple[int, ...] = ()
    """Rows of each of several foreign tensors, which are concatenated to ours in this order."""
    transposed: bool = False
    """Whether the foreign matrix is [in, out] (GPT-2's Conv1D) where ours is [out, in]."""
    row_order: tuple[int, ...] | None = None
    """The index in ours of each foreign row, where the order differs."""
    stacked: int | None = None
    """How many equal modules our tensor stacks: vectors as [module, size], matrices as [module, in, out]."""
    as_row: bool = False
    """Whether the foreign tensor is a matrix of one row where ours is a vector."""

    def to_foreign(self, tensor: Tensor) -> dict[str, Tensor]:
        """Our tensor as the foreign ones, by their names."""
        parts: list[Tensor] = []
        for module in [tensor] if self.stacked is None else map(_transpose_matrix, tensor.unbind()):
            rows = module if self.row_order is None else module[torch.tensor(self.row_order, device=module.device)]
            several = rows.split(self.sizes) if self.sizes else (rows,)
            parts += [part.t() if self.transposed else part[None] if self.as_row else part for part in several]
        # Copies, because safetensors refuses tensors that share memory.
        copies = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        return dict(zip(self.foreign, copies, strict=True))

    def to_braid(self, parts: Sequence[Tensor]) -> Tensor:
        """The foreign tensors as ours, in float32."""
        parts = [(part.t() if self.transposed else part[0] if self.as_row else part).float() for part in parts]
        each, modules = len(self.foreign) // (self.stacked or 1), []
        for at in range(0, len(parts), each):
            rows = torch.cat(parts[at : at + each]) if each > 1 else parts[at]
            modules.append(rows if self.row_order is None else rows[torch.tensor(self.row_order).argsort()])
        return modules[0].contiguous() if self.stacked is None else torch.stack(list(map(_transpose_matrix, modules)))

    def describe(self, exporting: bool) -> str:
        """In a few words how the tensors are changed."""
        each = len(self.foreign) // (self.stacked or 1)
        joined = "" if each == 1 else f"split in {each}" if exporting else f"{each} stacked"
        reordered = "rows reordered" if self.row_order is not None else ""
        repeated = "" if self.stacked is None else f"for each of {self.stacked} members"
        return ", ".join(filter(None, (joined, "transposed" if self.transposed else "", reordered, repeated)))


@dataclass
class OpenedCheckpoint:
    """A checkpoint of a format, and the configuration of our model that it becomes."""

    checkpoint: Checkpoint
    config: BraidConfig
    description: str
    """The model that the tensors must belong to, for the error message if they do not."""
    notes: list[str] = field(default_factory=list)


class Bridge(ABC):
    """A format: how its checkpoints are opened, and how their tensors map to ours."""

    title: ClassVar[str]
    """As people write it."""
    single_file: ClassVar[bool] = False
    """Whether a checkpoint may be one file of weights with a configuration beside it."""
    folder: ClassVar[bool] = True
    """Whether it may be a folder with a config.json that names the format."""

    def open(self, path: Path, config_file: Path | None = None) -> OpenedCheckpoint:
        """Read a checkpoint's configuration, check that Braid can express it, and open its tensors. `path` is a folder,
        or a file of weights with which `config_file` may be given. A format that is only written has no such method."""
        raise NotImplementedError

    @abstractmethod
    def mappings(self, info: ModelInfo) -> Iterator[TensorMapping]:
        """The mapping of every tensor, except of a tied head."""

    def checked_mappings(self, info: ModelInfo) -> list[TensorMapping]:
        """The mappings of our model's tensors; a tensor without one cannot be stored in the format."""
        tensors = info.uses
        mappings = [mapping for mapping in self.mappings(info) if mapping.braid in tensors]
        if unmapped := sorted(set(tensors) - {mapping.braid for mapping in mappings}):
            raise BraidError(f"{self.title} cannot hold these tensors: {bullet_list(unmapped)}")
        return mappings

    def foreign_shapes(self, info: ModelInfo, mappings: list[TensorMapping]) -> Shapes:
        """The shape of every foreign tensor, found by converting tensors on the meta device."""
        converted = (mapping.to_foreign(info.uses[mapping.braid]) for mapping in mappings)
        return {name: tuple(part.shape) for parts in converted for name, part in parts.items()}


@dataclass(frozen=True)
class Exported:
    """What is written of a model, by the names of the other format."""

    tensors: dict[str, Tensor]
    tokenizer: BraidTokenizer | None
    lineage: dict[str, Any]
    probe: Probe
    """The logits that the result must compute."""


class ExportTarget:
    """What an export fills and saves: its own files in a folder, and beside them the tokenizer, the lineage and a card,
    unless it writes one file."""

    shapes: Shapes
    """The shapes of all tensors that the target needs, except of a tied head."""
    use: ClassVar[str] = ""
    """How the result is used, for its card."""

    def save(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """Write configuration and weights."""
        raise NotImplementedError

    def check(self, folder: Path, probe: Probe) -> None:
        """Refuse a folder that computes other logits; by default there is no library here that opens it."""

    def write(self, out: Path, model: Exported) -> None:
        """Write the whole model in one atomic step."""
        with atomic_folder(out) as folder:
            if model.tokenizer is not None:
                model.tokenizer.save(folder)
            self.save(model.tensors, folder)
            self.check(folder, model.probe)
            write_json(folder / "lineage.json", model.lineage)
            write_text(folder / CARD, model_card(out.name, model.lineage, use=self.use))


class ExportingBridge(Bridge):
    """A format that Braid also writes."""

    suffix: ClassVar[str | None] = None
    """The suffix of the one file that an export writes; None: it writes a folder."""
    dtypes: ClassVar[tuple[str, ...]] = ()
    """The types of weights among which an export can choose, the first by default; none: it writes float32."""
    zero_biases: ClassVar[bool] = False
    """Whether the format always has biases; where our model has none, zeros are written."""

    @abstractmethod
    def export_problems(self, info: ModelInfo) -> list[str]:
        """The properties of our model that the format cannot express."""

    @abstractmethod
    def target(self, info: ModelInfo) -> ExportTarget:
        """The foreign model for one of ours without problems."""

    def tokenizer_problems(self, info: ModelInfo, tokenizer: BraidTokenizer | None) -> list[str]:
        """The properties of the tokenizer that the format cannot express."""
        return []

    def export_notes(self, info: ModelInfo) -> list[str]:
        """What the export loses without changing the function."""
        return info.uneven_dropout()


def folder_formats() -> tuple[str, ...]:
    """The formats whose checkpoints are folders with a config.json that names the format."""
    return tuple(name for name in bridges if bridges[name].folder)


def export_formats() -> tuple[str, ...]:
    """The formats that Braid writes."""
    return tuple(name for name in bridges if issubclass(bridges[name], ExportingBridge))


def _transpose_matrix(tensor: Tensor) -> Tensor:
    """A matrix between [in, out], as in stacks, and [out, in]; a vector unchanged."""
    return tensor.t() if tensor.ndim == 2 else tensor


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
        """The plan as text."""
        return [*self.summary(), *self.details()]

    def summary(self) -> list[str]:
        """How much is converted, and the notes for the user."""
        parameters = sum(prod(self.shapes[name]) for mapping in self.mappings for name in mapping.foreign)
        summary = f"{self.tensors} tensors of theirs, {len(self.mappings)} of ours, {parameters:,} parameters"
        return [f"{self.title}: {summary}", *(f"  note: {note}" for note in self.notes)]

    def details(self) -> list[str]:
        """What becomes of each tensor; equal mappings are one line, with layer numbers replaced by *."""
        counted: Counter[str] = Counter()
        for mapping in self.mappings:
            names = [_pattern(_merged_names(mapping.foreign)), _pattern(mapping.braid)]
            source, target = names[::-1] if self.exporting else names
            change = mapping.describe(self.exporting)
            counted[f"{source} -> {target}{f' ({change})' if change else ''}"] += 1
        return [f"  {times:>3} x {row}" for row, times in counted.items()]


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
            what = f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {rows} rows for them"
            todo = "Use the tokenizer the model was made for, or enlarge the model first with transformers'"
            raise BraidError(what, str(path), f"{todo} `model.resize_token_embeddings`.")
        notes, ignored = list(opened.notes), self.checkpoint.ignored
        for why in dict.fromkeys(ignored.values()):
            names = [name for name, reason in ignored.items() if reason == why]
            notes.append(f"not read: {_counted_patterns(names)} ({why})")
        if (dtypes := self.checkpoint.dtypes) != ["float32"]:
            notes.append(f"the weights are {' and '.join(dtypes)}; they are written as float32")
        self.plan = ConversionPlan(f"{bridge.title} to Braid", self.mappings, shapes, False, notes)

    def write(self, out: Path) -> None:
        """Read the tensors one after another and write the model folder."""
        source: dict[str, Any] = {"path": self.name, "format": self.kind, "weights": self.checkpoint.hashes()}
        source |= licence_record(self.path) | length_record(load_lineage(self.path))
        lineage: dict[str, Any] = {"made_by": f"convert from {self.kind}", "sources": [source]}
        lineage |= {"ignored": self.checkpoint.ignored} if self.checkpoint.ignored else {}
        save_model(self.model(), out, self.tokenizer, lineage)

    def model(self) -> "BraidForCausalLM":
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
        config = load_config(folder)
        check_weights(folder, CountedModel(config))
        # Products with matrices that were quantised are those with other weights, unless inputs are rounded too.
        forms = [form for form in config.decoded.compression if not compressions[form.kind].trainable]
        quantised = [form for form in forms if not getattr(form.options, "dynamic", False)]
        config.decoded.compression = [form for form in config.decoded.compression if form not in quantised]
        info = ModelInfo(config)
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
        copied = any(mapping.braid in info.model.tied for mapping in self.mappings)
        notes = bridge.export_notes(info) + (info.copied_weights() if copied else [])
        if quantised:
            notes.append("quantised matrices become the weights that they stand for (the function does not change)")
        if self.zeros:
            added = _counted_patterns(self.zeros)
            notes.append(f"{bridge.title} always has biases; added as zeros (logits do not change): {added}")
        self.plan = ConversionPlan(f"Braid to {bridge.title}", self.mappings, shapes, True, notes)

    def write(self, out: Path) -> None:
        """Write the folder or file in one atomic step."""
        model = load_model(self.folder).float()  # what is written is float32
        probe = Probe.of(model)
        state, tensors = dict(model.state_dict()), {name: torch.zeros(shape) for name, shape in self.zeros.items()}
        for address, module in model.named_modules():
            if isinstance(module, QuantisedMatrix):
                own = module.rows()[0] if isinstance(module, QuantisedStack) else module.dense()
                state[f"{address}.weight"] = own
        for mapping in self.mappings:
            tensors |= mapping.to_foreign(state[mapping.braid].float())
        weights = [{"file": WEIGHTS, "sha256": sha256_of(self.folder / WEIGHTS)}]
        source: dict[str, Any] = {"path": self.name, "format": "braid", "weights": weights}
        source |= licence_record(self.folder) | {"lineage": load_lineage(self.folder)}
        made_by = f"convert to {self.kind}"
        lineage = {"format": 1, "made_by": made_by, "sources": [source], "versions": versions()}
        self.target.write(out, Exported(tensors, self.tokenizer, lineage, probe))


def _counted_patterns(names: Iterable[str]) -> str:
    """'12 x h.*.attn.bias, 1 x ...' of many names."""
    return ", ".join(f"{times} x {pattern}" for pattern, times in Counter(map(_pattern, names)).items())


def _merged_names(names: tuple[str, ...]) -> str:
    """`self_attn.{q_proj,k_proj}.weight` for names that differ in one segment."""
    segments = (list(dict.fromkeys(words)) for words in zip(*(name.split(".") for name in names), strict=True))
    return ".".join(words[0] if len(words) == 1 else f"{{{','.join(words)}}}" for words in segments)


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)
