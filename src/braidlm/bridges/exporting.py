"""From a Braid model folder to another format that needs no code of ours."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidlm.bridges.bridge import ExportingBridge, bullet_list
from braidlm.bridges.checkpoint import Shapes
from braidlm.bridges.locate import Location
from braidlm.bridges.model_info import ModelInfo
from braidlm.bridges.plan import ConversionPlan, counted_patterns
from braidlm.core.differences import compare_shapes
from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, sha256_of, write_json, write_text
from braidlm.core.models.card import exported_card
from braidlm.core.models.folders import WEIGHTS, check_weights, load_config, load_lineage, load_model, versions
from braidlm.core.models.licence import CARD, licence_record
from braidlm.data.tokenizing.build import BraidTokenizer


class FolderTarget(ABC):
    """A folder of another format: its own files, and beside them the tokenizer, the lineage and a card."""

    shapes: Shapes

    @abstractmethod
    def save(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """Write configuration and weights."""

    def write(
        self, out: Path, tensors: dict[str, Tensor], tokenizer: BraidTokenizer | None, lineage: dict[str, Any]
    ) -> None:
        """Write the folder in one atomic step."""
        with atomic_folder(out) as folder:
            if tokenizer is not None:
                tokenizer.save(folder)
            self.save(tensors, folder)
            write_json(folder / "lineage.json", lineage)
            write_text(folder / CARD, exported_card(out.name, lineage))


class Export:
    """The export of one model: the constructor checks everything, and only `write` writes."""

    def __init__(self, location: Location, kind: str, bridge: ExportingBridge, tokenizer: BraidTokenizer | None):
        folder = location.path
        self.location, self.kind, self.bridge, self.tokenizer = location, kind, bridge, tokenizer
        info = ModelInfo(load_config(folder))
        check_weights(folder, info.model)
        if problems := bridge.export_problems(info) + bridge.tokenizer_problems(info, tokenizer):
            raise BraidError(f"{bridge.title} cannot express this model:{bullet_list(problems)}", str(folder))
        self.target = bridge.target(info)
        self.mappings = bridge.checked_mappings(info)
        shapes = bridge.foreign_shapes(info, self.mappings)
        self.zeros = self._missing_biases(shapes)
        if problems := compare_shapes(self.target.shapes, shapes | self.zeros):
            raise BraidError(f"the tensors do not fit {bridge.title}:{bullet_list(problems)}", str(folder))
        notes = bridge.export_notes(info) + info.copied_weights()
        if self.zeros:
            added = counted_patterns(self.zeros)
            notes.append(f"{bridge.title} always has biases; added as zeros (logits do not change): {added}")
        self.plan = ConversionPlan(f"Braid to {bridge.title}", self.mappings, shapes, True, notes)

    def write(self, out: Path) -> None:
        """Write the folder or file in one atomic step."""
        self.target.write(out, self._tensors(), self.tokenizer, self._lineage())

    def _tensors(self) -> dict[str, Tensor]:
        state = load_model(self.location.path).state_dict()
        tensors = {name: torch.zeros(shape) for name, shape in self.zeros.items()}
        for mapping in self.mappings:
            tensors |= mapping.to_foreign(state[mapping.braid].float())
        return tensors

    def _missing_biases(self, shapes: Shapes) -> Shapes:
        if not self.bridge.zero_biases:
            return {}
        return {n: s for n, s in self.target.shapes.items() if n.endswith(".bias") and n not in shapes}

    def _lineage(self) -> dict[str, Any]:
        return {
            "format": 1,
            "made_by": f"convert to {self.kind}",
            "sources": [
                {
                    "path": self.location.name,
                    "format": "braid",
                    "weights": [{"file": WEIGHTS, "sha256": sha256_of(self.location.path / WEIGHTS)}],
                    **licence_record(self.location.path),
                    "lineage": load_lineage(self.location.path),
                }
            ],
            "versions": versions(),
        }
