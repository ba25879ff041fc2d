"""MoEP as its authors' code saves it: a Hugging Face folder of the type `moep_lm`, whatever its tensors are called.

Versions of the code name tensors differently, so names and shapes together tell what each of them is; what does not fit
is refused by name.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from braidlm.bridges.bridge import Bridge, Link, Opened, bridges, listed
from braidlm.bridges.checkpoint import INDEX, PICKLES, WHOLE, Checkpoint
from braidlm.bridges.formats.moep.form import read_form
from braidlm.bridges.formats.moep.links import find_links
from braidlm.bridges.formats.moep.names import is_buffer
from braidlm.bridges.formats.moep.options import BLOCK_TOP_K, EXPERT_TOP_K, MoepOptions
from braidlm.bridges.formats.moep.parts import FED, Bank, Form, Part
from braidlm.bridges.hugging_face import TOKEN_IDS
from braidlm.bridges.locate import Found
from braidlm.bridges.plain import PlainModel
from braidlm.core.errors import BraidError
from braidlm.core.files import read_json
from braidlm.model.config.braid_config import BraidConfig

KIND = "moep_lm"


@bridges.register(KIND)
class MoepBridge(Bridge):
    """A state dict of any version's names, and a config.json of any version's spelling."""

    title = "MoEP"

    def __init__(self) -> None:
        self.found: list[Link] = []
        """The links of the checkpoint that was opened: names are its own."""

    def open(self, found: Found) -> Opened:
        path = found.place / "config.json"
        options = MoepOptions(_read_config(path))
        checkpoint = Checkpoint(_weights(found.place))
        for name, shape in list(checkpoint.shapes.items()):
            if is_buffer(name, shape):
                checkpoint.ignore(name, "a constant of the causal mask or the positions, which some versions stored")
        try:
            form = read_form(checkpoint.shapes)
        except BraidError as error:
            raise BraidError(error.what, str(found.place)) from error
        if problems := options.contradictions(form.sizes):
            raise BraidError(
                f"this configuration contradicts the tensors:{listed(problems)}",
                str(path),
                "Weights and configuration must come from the same model.",
            )
        tied = _settle_head(form.ends, options, checkpoint)
        self.found = find_links(form, tied, str(found.place))
        try:
            architecture = _architecture(form, options, tied)
        except BraidError as error:
            raise BraidError(error.what, str(path), error.todo) from error
        token_ids = {name: options.first((name,)) for name in TOKEN_IDS}
        config = BraidConfig(architecture, vocab_size=form.vocabulary, **token_ids)
        return Opened(checkpoint, config, form.subject, options.notes)

    def links(self, plain: PlainModel) -> Iterator[Link]:
        return iter(self.found)


def _read_config(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise BraidError("this is not a model's configuration", str(path))
    if (kind := data.get("model_type", KIND)) != KIND:
        raise BraidError(f"this folder holds a '{kind}' model, not a '{KIND}' model", str(path.parent))
    return data


def _weights(folder: Path) -> Path:
    """The folder where it has safetensors, else its one file of torch's, which is opened without running anything."""
    if (folder / WHOLE).is_file() or (folder / INDEX).is_file():
        return folder
    files = sorted(path for pattern in (*PICKLES, "*.safetensors") for path in folder.glob(pattern))
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise BraidError(f"which file holds the weights is not clear: {names}", str(folder), f"Call it {WHOLE}.")
    return files[0] if files else folder


def _settle_head(ends: Part, options: MoepOptions, checkpoint: Checkpoint) -> bool:
    """Whether the head is the embedding: one that is stored all the same is compared with it."""
    key = ("head", "weight")
    if key not in ends.tensors:
        return bool(options.data.get("tie_word_embeddings", True))
    head, embedding = ends.tensors[key], ends.tensors["embedding", "weight"]
    if options.data.get("tie_word_embeddings", True) is False:
        return False
    if torch.equal(checkpoint.read(head), checkpoint.read(embedding)):
        checkpoint.ignore(head, "a second copy of the embedding, to which it is tied")
        del ends.tensors[key]
        return True
    options.notes.append("the weights hold a head of their own, not the embedding: it is kept, untied")
    return False


def _architecture(form: Form, options: MoepOptions, tied: bool) -> dict[str, Any]:
    heads, narrow_heads = options.heads(form.width, form.narrow)
    feed: dict[str, Any] = {"kind": "swiglu"} if form.gated else {"kind": "mlp", "activation": options.activation()}
    if form.gated:
        options.note_gate()
    std = float(options.first(("initializer_range",), float) or 0.02)
    paths = len(form.layers[0].members)
    joined = {"kind": "routed", **_router(form.layers[0], options, BLOCK_TOP_K, "blocks in a layer")}
    return {
        "width": form.width,
        "context": form.positions,
        "positions": "learned",
        "tie_embeddings": tied,
        "dropout": options.dropout(),
        "initialisation": {"kind": "normal", "std": std, "carriers": std},
        "block": {
            "norm": {"kind": "layer", "eps": options.eps(), "bias": form.norm_bias},
            "attention": {"heads": heads, "bias": form.attention_bias},
            "feed": {**feed, "hidden": form.hidden, "bias": form.feed_bias},
        },
        "stages": [
            *([{"block": {"layers": len(form.first)}}] if form.first else []),
            _projection(form.shrink, form.narrow, options),
            {
                "parallel": {
                    "layers": len(form.layers),
                    "paths": paths,
                    "attention": {"heads": narrow_heads},
                    "feed": {"hidden": form.layers[0].hidden},
                    "join": joined,
                }
            },
            _projection(form.grow, form.width, options),
            *([{"block": {"layers": len(form.last)}}] if form.last else []),
        ],
    }


def _projection(bank: Bank, to: int, options: MoepOptions) -> dict[str, Any]:
    gated = {"kind": "swiglu", "hidden": bank.hidden} if bank.gated else {"kind": "linear"}
    router = _router(bank, options, EXPERT_TOP_K, "experts")
    return {
        "project": {
            "to": to,
            "bias": bank.has_bias(*FED, "linear"),
            "experts": {"names": len(bank.members), **gated, "router": router},
        }
    }


def _router(bank: Bank, options: MoepOptions, keys: Sequence[str], what: str) -> dict[str, Any]:
    weight = options.balance()
    return {
        "top_k": options.top_k(keys, len(bank.members), what),
        "renormalise": options.renormalise(),
        "bias": bank.router.has("router", "bias"),
        "losses": {"switch": weight} if weight else {},
    }
