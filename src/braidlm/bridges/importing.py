"""From a Hugging Face checkpoint to a Braid model folder."""

from pathlib import Path
from typing import Any

import torch

from braidlm.bridges.bridge import Bridge, Link, compare_shapes, listed
from braidlm.bridges.checkpoint import Checkpoint
from braidlm.bridges.locate import Found
from braidlm.bridges.plain import PlainModel
from braidlm.bridges.plan import Plan, counted_patterns
from braidlm.core.errors import BraidError
from braidlm.core.files import read_json
from braidlm.core.folders import save_model
from braidlm.data.tokenizers import BraidTokenizer
from braidlm.model.accounting import skeleton
from braidlm.model.configuration_braid import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM


class Import:
    """One checkpoint on its way in: everything is checked when it is made, nothing written before `write`."""

    def __init__(self, found: Found, kind: str, bridge: Bridge, tokenizer: BraidTokenizer | None):
        folder = found.folder
        self.found, self.kind, self.tokenizer = found, kind, tokenizer
        config = _read_config(folder, kind, bridge)
        self.checkpoint = Checkpoint(folder, bridge)
        notes = self._settle_head(config, bridge)
        token_ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        architecture = bridge.architecture(config)
        self.plain = PlainModel(BraidConfig(architecture, vocab_size=config.vocab_size, **token_ids))
        self.links = bridge.checked_links(self.plain)
        shapes = bridge.foreign_shapes(self.plain, self.links)
        problems = compare_shapes(shapes, self.checkpoint.shapes) + self.checkpoint.dtype_problems()
        if problems:
            raise BraidError(
                f"the weights are not those of the {bridge.title} that config.json describes:{listed(problems)}",
                str(folder),
                "config.json and the weights must come from the same model.",
            )
        self._check_vocabulary()
        self.plan = Plan(f"{bridge.title} to Braid", self.links, shapes, False, notes + self._notes())

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

    def _settle_head(self, config: Any, bridge: Bridge) -> list[str]:
        """A tied head that is stored all the same: equal to the embedding it is left out, else it is its own.

        The second is what transformers does with such a checkpoint.
        """
        stored, head, embedding = self.checkpoint.stored, bridge.head, bridge.embedding
        if not config.tie_word_embeddings or head not in stored or embedding not in stored:
            return []
        if torch.equal(self.checkpoint.read(head), self.checkpoint.read(embedding)):
            del stored[head]
            self.checkpoint.ignored[head] = "a second copy of the embedding, to which it is tied"
            return []
        config.tie_word_embeddings = False
        return ["config.json ties the head to the embedding, but the weights hold another head: it is kept, untied"]

    def _check_vocabulary(self) -> None:
        rows = self.plain.config.vocab_size
        if self.tokenizer is not None and self.tokenizer.vocab_size > rows:
            raise BraidError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, the model only {rows} rows for them",
                str(self.found.folder),
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


def _read_config(folder: Path, kind: str, bridge: Bridge) -> Any:
    path = folder / "config.json"
    data = read_json(path)
    if not isinstance(data, dict):
        raise BraidError("this is not a model's configuration", str(path))
    if (found := data.get("model_type", kind)) != kind:
        raise BraidError(f"this folder holds a '{found}' model, not a '{kind}' model", str(folder))
    if "quantization_config" in data:
        method = (data["quantization_config"] or {}).get("quant_method", "an unknown method")
        raise BraidError(
            f"the weights are quantised ({method})", str(folder), "Convert the model they were quantised from."
        )
    try:
        config = bridge.config_class.from_dict(data)
    except Exception as error:  # strict configurations raise errors of several libraries
        first = " ".join(str(error).split())
        raise BraidError(f"transformers does not accept this configuration: {first}", str(path)) from error
    if problems := bridge.import_problems(config):
        raise BraidError(f"Braid cannot express this {bridge.title}:{listed(problems)}", str(path))
    return config
