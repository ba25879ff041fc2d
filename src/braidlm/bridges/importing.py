"""From a checkpoint of another format to a Braid model folder."""

from pathlib import Path
from typing import Any

import torch

from braidlm.bridges.bridge import Bridge, TensorMapping, bullet_list
from braidlm.bridges.locate import Location
from braidlm.bridges.model_info import ModelInfo
from braidlm.bridges.plan import ConversionPlan, counted_patterns
from braidlm.core.differences import compare_shapes
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.folders import fill, save_model
from braidlm.core.models.licence import licence_record
from braidlm.data.tokenizing.build import BraidTokenizer
from braidlm.model.modeling_braid import BraidForCausalLM


class Import:
    """The import of one checkpoint: the constructor checks everything, and only `write` writes."""

    def __init__(self, location: Location, kind: str, bridge: Bridge, tokenizer: BraidTokenizer | None):
        self.location, self.kind, self.tokenizer = location, kind, tokenizer
        opened = bridge.open(location)
        self.checkpoint = opened.checkpoint
        self.info = ModelInfo(opened.config)
        self.mappings = bridge.checked_mappings(self.info)
        shapes = bridge.foreign_shapes(self.info, self.mappings)
        problems = compare_shapes(shapes, self.checkpoint.shapes) + self.checkpoint.dtype_problems()
        if problems:
            raise BraidError(
                f"the weights are not those of {opened.description}:{bullet_list(problems)}",
                str(location.path),
                "Weights and configuration must come from the same model.",
            )
        self._check_vocabulary()
        self.plan = ConversionPlan(
            f"{bridge.title} to Braid", self.mappings, shapes, False, opened.notes + self._notes()
        )

    def write(self, out: Path) -> None:
        """Read the tensors one after another and write the model folder."""
        source = {"path": self.location.name, "format": self.kind, "weights": self.checkpoint.hashes()}
        lineage: dict[str, Any] = {
            "made_by": f"convert from {self.kind}",
            "sources": [source | licence_record(self.location.path)],
        }
        if self.checkpoint.ignored:
            lineage["ignored"] = self.checkpoint.ignored
        save_model(self.model(), out, self.tokenizer, lineage)

    def model(self) -> BraidForCausalLM:
        """The checkpoint as a model in memory, in evaluation mode."""
        tensors = {mapping.braid: self.read(mapping) for mapping in self.mappings}
        return fill(skeleton(self.info.config), tensors)

    def read(self, mapping: TensorMapping) -> torch.Tensor:
        """One tensor of ours."""
        return mapping.to_braid([self.checkpoint.read(name) for name in mapping.foreign])

    def _check_vocabulary(self) -> None:
        rows = self.info.config.vocab_size
        if self.tokenizer is not None and self.tokenizer.vocab_size > rows:
            raise BraidError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, the model only {rows} rows for them",
                str(self.location.path),
                "Use the tokenizer the model was made for, or enlarge the model first with transformers' "
                "`model.resize_token_embeddings`.",
            )

    def _notes(self) -> list[str]:
        notes = []
        for why in dict.fromkeys(self.checkpoint.ignored.values()):
            names = [name for name, reason in self.checkpoint.ignored.items() if reason == why]
            notes.append(f"not read: {counted_patterns(names)} ({why})")
        if (dtypes := self.checkpoint.dtypes) != ["float32"]:
            notes.append(f"the weights are {' and '.join(dtypes)}; they are written as float32")
        return notes
