"""The contract of a bridge: how a checkpoint of a format is opened, and which of its tensors is which of ours.

One table of tensor mappings serves both directions, so an import and an export cannot disagree.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from braidlm.bridges.checkpoint import Checkpoint, Shapes
from braidlm.bridges.model_info import ModelInfo
from braidlm.core.differences import bullet_list
from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import BraidTokenizer
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.registry import Registry

bridges = Registry("format")


@dataclass(frozen=True)
class TensorMapping:
    """One tensor of ours and the tensor or tensors of the other format that hold the same numbers."""

    braid: str
    foreign: tuple[str, ...]
    """Where ours is a stack: those of its first module, then those of the second, and so on."""
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
        each, modules = self._parts_of_module, []
        for at in range(0, len(parts), each):
            rows = torch.cat(parts[at : at + each]) if each > 1 else parts[at]
            modules.append(rows if self.row_order is None else rows[torch.tensor(self.row_order).argsort()])
        return modules[0].contiguous() if self.stacked is None else torch.stack(list(map(_transpose_matrix, modules)))

    @property
    def _parts_of_module(self) -> int:
        return len(self.foreign) // (self.stacked or 1)

    def describe(self, exporting: bool) -> str:
        """In a few words how the tensors are changed."""
        each = self._parts_of_module
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

    @abstractmethod
    def open(self, path: Path, config_file: Path | None = None) -> OpenedCheckpoint:
        """Read a checkpoint's configuration, check that Braid can express it, and open its tensors.

        `path` is a folder, or a file of weights with which `config_file` may be given.
        """

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


class ExportTarget(ABC):
    """What an export fills and saves."""

    shapes: Shapes
    """The shapes of all tensors that the target needs, except of a tied head."""

    @abstractmethod
    def write(
        self, out: Path, tensors: dict[str, Tensor], tokenizer: BraidTokenizer | None, lineage: dict[str, Any]
    ) -> None:
        """Write the whole model in one atomic step."""


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
