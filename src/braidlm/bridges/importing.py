"""From a checkpoint of another format to a Braid model folder."""

from pathlib import Path
from typing import Any

import torch

from braidlm.bridges.bridge import Bridge, Link, compare_shapes, listed
from braidlm.bridges.locate import Found
from braidlm.bridges.plain import PlainModel
from braidlm.bridges.plan import Plan, counted_patterns
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import BraidTokenizer
from braidlm.model.modeling_braid import BraidForCausalLM


class Import:
    """One checkpoint on its way in: everything is checked when it is made, nothing written before `write`."""

    def __init__(self, found: Found, kind: str, bridge: Bridge, tokenizer: BraidTokenizer | None):
        self.found, self.kind, self.tokenizer = found, kind, tokenizer
        opened = bridge.open(found)
        self.checkpoint = opened.checkpoint
        self.plain = PlainModel(opened.config)
        self.links = bridge.checked_links(self.plain)
        shapes = bridge.foreign_shapes(self.plain, self.links)
        problems = compare_shapes(shapes, self.checkpoint.shapes) + self.checkpoint.dtype_problems()
        if problems:
            raise BraidError(
                f"the weights are not those of {opened.subject}:{listed(problems)}",
                str(found.place),
                "Weights and configuration must come from the same model.",
            )
        self._check_vocabulary()
        self.plan = Plan(f"{bridge.title} to Braid", self.links, shapes, False, opened.notes + self._notes())

    def write(self, out: Path) -> None:
        """Read the tensors one after another and write the model folder."""
        lineage: dict[str, Any] = {
            "made_by": f"convert from {self.kind}",
            "sources": [
                {"path": self.found.name, "format": self.kind, "weights": self.checkpoint.hashes()},
            ],
        }
        if self.checkpoint.ignored:
            lineage["ignored"] = self.checkpoint.ignored
        save_model(self._model(), out, self.tokenizer, lineage)

    def _model(self) -> BraidForCausalLM:
        tensors = {link.braid: self._tensor(link) for link in self.links}
        if self.plain.architecture.tie_embeddings:
            tensors["head.weight"] = tensors["model.embedding.weight"]
        # Without memory at first: the tensors read become the model's own, and there is no second copy.
        model = skeleton(self.plain.config)
        model.load_state_dict(tensors, assign=True)
        model.tie_weights()
        return model.eval()

    def _tensor(self, link: Link) -> torch.Tensor:
        return link.to_braid([self.checkpoint.read(name) for name in link.foreign])

    def _check_vocabulary(self) -> None:
        rows = self.plain.config.vocab_size
        if self.tokenizer is not None and self.tokenizer.vocab_size > rows:
            raise BraidError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, the model only {rows} rows for them",
                str(self.found.place),
                "Use the tokenizer the model was made for, or enlarge the model first with transformers' "
                "`model.resize_token_embeddings`.",
            )

    def _notes(self) -> list[str]:
        notes = []
        if self.checkpoint.ignored:
            for why in dict.fromkeys(self.checkpoint.ignored.values()):
                names = [name for name, reason in self.checkpoint.ignored.items() if reason == why]
                notes.append(f"not read: {counted_patterns(names)} ({why})")
        if (found := self.checkpoint.dtypes) != ["float32"]:
            notes.append(f"the weights are {' and '.join(found)}; they are written as float32")
        return notes
