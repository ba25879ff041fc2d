"""MoEP as its authors' code saves it: a Hugging Face folder of the type `moep_lm`, whatever its tensors are called.

Versions of the code name tensors and settings differently, so names and shapes together show what each tensor is. A
tensor that does not fit is refused by name.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from braidlm.bridges.bridge import Bridge, OpenedCheckpoint, TensorMapping, bridges
from braidlm.bridges.checkpoint import INDEX_FILE, PICKLE_PATTERNS, SINGLE_FILE, Checkpoint, Shapes
from braidlm.bridges.formats.gpt2 import ACTIVATIONS, DROPOUT, KNOWN
from braidlm.bridges.formats.moep.structure import (
    ATTENTION_PARTS,
    BUFFERS,
    FEED,
    NORMS,
    QKV,
    Bank,
    Module,
    MoepStructure,
    has_bias,
    read_structure,
)
from braidlm.bridges.hugging_face import read_config
from braidlm.bridges.model_info import TOKEN_IDS, ModelInfo
from braidlm.core.differences import bullet_list
from braidlm.core.errors import BraidError, errors_at
from braidlm.model.config.braid_config import BraidConfig

MODEL_TYPE = "moep_lm"


@bridges.register(MODEL_TYPE)
class MoepBridge(Bridge):
    """A state dict with the names of any version, and a config.json with its spelling."""

    title = "MoEP"

    def __init__(self) -> None:
        self.opened: list[TensorMapping] = []
        """The mappings of the opened checkpoint; they depend on its names."""

    def open(self, path: Path, config_file: Path | None = None) -> OpenedCheckpoint:
        folder, where = str(path), str(path / "config.json")
        config = MoepConfig(read_config(path, MODEL_TYPE))
        checkpoint = Checkpoint(_weights(path))
        for name, shape in checkpoint.shapes.items():
            if len(shape) != 1 and re.fullmatch(BUFFERS, name):
                checkpoint.ignore(name, "a constant of the causal mask or the positions, which some versions stored")
        with errors_at(folder):
            structure = read_structure(checkpoint.shapes)
        if problems := config.contradictions(structure.sizes):
            what = f"this configuration contradicts the tensors:{bullet_list(problems)}"
            raise BraidError(what, where, "Weights and configuration must come from the same model.")
        tensors, tied = structure.outer.tensors, bool(config.data.get("tie_word_embeddings", True))
        if tied and (head := tensors.get(("head", "weight"))) is not None:
            tied = checkpoint.ignore_copy_of_embedding(head, tensors["embedding", "weight"])
            if not tied:
                config.notes.append("the weights hold a head of their own, not the embedding: it is kept, untied")
        with errors_at(where):
            ours = architecture(structure, config, tied)
            token_ids = {name: config.read(name) for name in TOKEN_IDS}
        braid_config = BraidConfig(ours, vocab_size=structure.vocabulary, **token_ids)
        mapper = _Mapper(structure, checkpoint.shapes)
        self.opened = mapper.map_all(ModelInfo(braid_config))
        if mapper.problems:
            what = f"the weights are not those of {structure.description}:{bullet_list(mapper.problems)}"
            raise BraidError(what, folder)
        return OpenedCheckpoint(checkpoint, braid_config, structure.description, config.notes)

    def mappings(self, info: ModelInfo) -> Iterator[TensorMapping]:
        return iter(self.opened)


def _weights(folder: Path) -> Path:
    """The folder if it has safetensors, else its one file of torch.save, which is opened without running code."""
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return folder
    files = sorted(path for pattern in (*PICKLE_PATTERNS, "*.safetensors") for path in folder.glob(pattern))
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise BraidError(f"which file holds the weights is not clear: {names}", str(folder), f"Call it {SINGLE_FILE}.")
    return files[0] if files else folder


HEADS = ("n_head", "n_heads", "num_heads", "num_attention_heads", "heads")
TOP_K = ("top_k", "topk", "k", "num_experts_per_tok", "router_top_k")
BLOCKS, EXPERTS = ("blocks", "block", "parallel"), ("experts", "expert", "moe")
BALANCE = ("aux_loss_weight", "aux_loss_coef", "router_aux_loss_coef")


def _of_narrow(*names: str) -> tuple[str, ...]:
    """The spellings of a setting of the parallel blocks."""
    words = ("small", "parallel", "path", "narrow", "inner", "reduced", "block")
    return tuple(key for word in words for name in names for key in (f"{word}_{name}", f"{name}_{word}"))


SIZES = {
    "vocabulary": ("vocab_size",),
    "width": ("n_embd", "hidden_size", "d_model", "dim", "embed_dim", "model_dim"),
    "narrow width": _of_narrow("n_embd", "hidden_size", "d_model", "dim", "width"),
    "positions": ("n_positions", "max_position_embeddings", "block_size", "context_length", "max_seq_len", "n_ctx"),
    "layers": ("n_layer", "n_layers", "num_layers", "num_hidden_layers"),
    "parallel layers": ("parallel_layers", "n_parallel_layers", "num_parallel_layers", "n_layer_parallel"),
    "blocks of a layer": ("parallel_blocks", "n_parallel_blocks", "num_parallel_blocks", "n_paths", "paths"),
    "experts": ("n_experts", "num_experts", "experts", "n_expert", "num_local_experts"),
    "feed-forward": ("n_inner", "intermediate_size", "d_ff", "ffn_dim"),
}
"""Sizes that tensors show too, and their possible keys."""
KEYS = {
    "heads": HEADS,
    "heads of parallel blocks": _of_narrow(*HEADS),
    "size of a head": ("head_dim", "head_size", "d_head"),
    "blocks in a layer": (*(f"{one}_top_k" for one in BLOCKS), *(f"top_k_{one}" for one in (*BLOCKS, "paths")), *TOP_K),
    "experts": (*(f"{one}_top_k" for one in EXPERTS), *(f"top_k_{one}" for one in EXPERTS), *TOP_K),
    "balance": (*BALANCE, "load_balance_weight", "balance_weight"),
    "eps": ("layer_norm_epsilon", "layer_norm_eps", "norm_eps", "eps"),
    "activation": ("activation_function", "hidden_act", "activation", "hidden_activation"),
    "renormalise": ("norm_topk_prob", "renormalize", "renormalise", "normalize_top_k"),
    "dropout": ("dropout", "dropout_rate"),
}
"""Settings that no tensor shows, and their possible keys; those of `experts` and `blocks in a layer` are top_k."""


class MoepConfig:
    """The contents of config.json, read with several spellings of each key."""

    def __init__(self, data: dict[str, Any]):
        self.data = data
        self.notes: list[str] = []

    def read(self, setting: str, default: Any = None, value_type: type = int) -> Any:
        """The value under the first of the setting's keys that has one, or under the one key of that name."""
        for key in KEYS.get(setting, (setting,)):
            if (value := self.data.get(key)) is None:
                continue
            accepted = (int, float) if value_type is float else value_type
            if not isinstance(value, accepted) or (value_type is not bool and isinstance(value, bool)):
                raise BraidError(f"{key} must be of type {value_type.__name__}, got {value!r}")
            if isinstance(value, (int, float)) and value < 0:
                raise BraidError(f"{key} must not be below 0, got {value}")
            return value_type(value)
        return default

    def contradictions(self, sizes: dict[str, set[int]]) -> list[str]:
        """Sizes in the configuration that the tensors do not have."""
        return [
            f"{key} is {value}, the tensors say {' or '.join(map(str, sorted(sizes[what])))} ({what})"
            for what, keys in SIZES.items()
            for key in keys
            if isinstance(value := self.data.get(key), int) and value not in sizes[what]
        ]

    def heads(self, width: int, narrow: int) -> tuple[int, int]:
        """The heads of the blocks of the full width and of the parallel ones: no tensor shows them."""
        head_dim = self.read("size of a head")
        wide = self.read("heads", width // head_dim if head_dim else None)
        if not wide:
            what = f"neither the tensors nor config.json say how many heads attention has ({', '.join(HEADS)})"
            raise BraidError(what, todo='Add it to config.json, e.g. "n_head": 6. In the paper a head has 64 channels.')
        parallel = self.read("heads of parallel blocks")
        if parallel is None:
            size = head_dim or width // wide
            parallel = max(1, narrow // size)
            chosen = f"{parallel} of {size} channels, as large as the other blocks' heads, are written"
            self.notes.append(f"config.json does not give the heads of parallel blocks; {chosen}")
        for name, heads, channels in (("blocks", wide, width), ("parallel blocks", parallel, narrow)):
            if heads < 1 or channels % heads:
                raise BraidError(f"{heads} heads of {name} do not divide their width, {channels}")
        return wide, parallel

    def feed(self, gated: bool) -> dict[str, Any]:
        """The kind of feed-forward parts; gated ones are read as the paper's SwiGLU."""
        name = self.read("activation", None, str)
        if gated:
            if name not in (None, "silu", "swish", "swiglu"):
                read = "gated parts are read as SwiGLU, the paper's"
                self.notes.append(f"config.json names the activation '{name}'; {read}")
            return {"kind": "swiglu"}
        if (name or "gelu_new") not in ACTIVATIONS:
            raise BraidError(f"the activation is '{name}'; Braid has {KNOWN}")
        return {"kind": "mlp", "activation": ACTIVATIONS[name or "gelu_new"]}

    def router(self, bank: Bank, choices: str) -> dict[str, Any]:
        """The router of a bank of `experts` or of `blocks in a layer`; the authors' code weighs the Switch loss 0.2."""
        weight, top_k, count = self.read("balance", 0.2, float), self.read(choices), len(bank.members)
        if top_k is None:
            top_k = min(2, count)
            self.notes.append(f"config.json does not give top_k of {choices}; {top_k}, the paper's, is written")
        if not 1 <= top_k <= count:
            raise BraidError(f"top_k is {top_k}, and there are {count} {choices}")
        return {
            "top_k": top_k,
            "renormalise": self.read("renormalise", True, bool),
            "bias": bank.router_bias,
            "losses": {"switch": weight} if weight else {},
        }


def architecture(structure: MoepStructure, config: MoepConfig, tied: bool) -> dict[str, Any]:
    """Our architecture for a checkpoint."""
    heads, parallel_heads = config.heads(structure.width, structure.narrow)
    feed, layer = config.feed(structure.gated), structure.layers[0]
    std, eps = config.read("initializer_range", None, float) or 0.02, config.read("eps", None, float) or 1e-5
    dropout = config.read("dropout", 0.1, float)  # the paper's
    parallel = {
        "layers": len(structure.layers),
        "paths": len(layer.members),
        "attention": {"heads": parallel_heads},
        "feed": {"hidden": layer.hidden},
        "join": {"kind": "routed", **config.router(layer, "blocks in a layer")},
    }

    def projection(bank: Bank, to: int) -> dict[str, Any]:
        kind = {"kind": "swiglu", "hidden": bank.hidden} if bank.gated else {"kind": "linear"}
        experts = {"names": len(bank.members), **kind, "router": config.router(bank, "experts")}
        return {"project": {"to": to, "bias": has_bias(bank.members, *FEED, "linear"), "experts": experts}}

    return {
        "width": structure.width,
        "context": structure.positions,
        "positions": "learned",
        "tie_embeddings": tied,
        "dropout": {ours: config.read(theirs, dropout, float) for ours, theirs in DROPOUT.items()},
        "initialisation": {"kind": "normal", "std": std, "carriers": std},
        "block": {
            "norm": {"kind": "layer", "eps": eps, "bias": structure.has_bias(*NORMS)},
            "attention": {"heads": heads, "bias": structure.has_bias(*ATTENTION_PARTS)},
            "feed": {**feed, "hidden": structure.hidden, "bias": structure.has_bias(*FEED)},
        },
        "stages": [
            *([{"block": {"layers": len(structure.before)}}] if structure.before else []),
            projection(structure.shrink, structure.narrow),
            {"parallel": parallel},
            projection(structure.grow, structure.width),
            *([{"block": {"layers": len(structure.after)}}] if structure.after else []),
        ],
    }


ROUTERS = "routers"
"""The family of matrices that says nothing about others: routers are torch's Linear even where the rest is Conv1D."""
FAMILIES = {"attention": "attention", "feed": "feed-forward parts", "experts": "experts", "router": ROUTERS}
"""By the words of our addresses."""
Place = tuple[list[Module], tuple[str, ...]]
"""The modules whose parts one of our layers holds, several if it is a stack, and the parts of each."""


def places(structure: MoepStructure) -> dict[str, Place]:
    """Where each of our layers is in a checkpoint, by its address."""
    outer, stage = [structure.outer], 1 if structure.before else 0
    found: dict[str, Place] = {"model.norm": (outer, ("last norm",)), "head": (outer, ("head",))}
    found |= {f"model.{part}": (outer, (part,)) for part in ("embedding", "positions")}
    for number, blocks in ((0, structure.before), (stage + 3, structure.after)):
        for index, block in enumerate(blocks):
            found |= _block_places([block], f"model.stages.{number}.layers.{index}")
    for bank, number in ((structure.shrink, stage), (structure.grow, stage + 2)):
        ours = f"model.stages.{number}.experts"
        found[f"{ours}.gate_up"] = bank.members, _gate_and_up(bank.members)
        found[f"{ours}.out"] = bank.members, ("down" if bank.gated else "linear",)
        found[f"{ours}.router.scores"] = [bank.router], ("router",)
    for number, layer in enumerate(structure.layers):
        ours = f"model.stages.{stage + 1}.layers.{number}"
        found |= _block_places(layer.members, f"{ours}.{'stack.0' if len(layer.members) > 1 else 'paths.path_1.0'}")
        found[f"{ours}.join.router.scores"] = [layer.router], ("router",)
    return found


def _block_places(blocks: list[Module], ours: str) -> dict[str, Place]:
    parts = {
        "attention_norm": ("norm 1",),
        "attention.qkv": QKV if blocks[0].has(*QKV) else ("qkv",),
        "attention.out": ("attention out",),
        "feed_norm": ("norm 2",),
        "feed.gate_up": _gate_and_up(blocks),
        "feed.up": ("up",),
        "feed.out": ("down",),
    }
    return {f"{ours}.{name}": (blocks, own) for name, own in parts.items()}


def _gate_and_up(modules: list[Module]) -> tuple[str, ...]:
    return ("gate and up",) if modules[0].has("gate and up") else ("gate", "up")


class _Mapper:
    """Finds the tensors of ours in a checkpoint, and those that are missing, left over or of a wrong shape."""

    def __init__(self, structure: MoepStructure, shapes: Shapes):
        self.places, self.shapes = places(structure), shapes
        self.problems: list[str] = []
        self.examples: dict[str, dict[bool, str]] = defaultdict(dict)
        """For each family a matrix that is [out, in] (torch's Linear), and one that is [in, out] (GPT-2's Conv1D)."""
        self.square: dict[str, list[str]] = defaultdict(list)
        """The matrices of each family whose shape does not show which of the two they are."""

    def map_all(self, info: ModelInfo) -> list[TensorMapping]:
        """The mappings of all tensors of our model; with problems they are not complete."""
        found = [self._map(name, tuple(tensor.shape)) for name, tensor in info.uses.items()]
        transposed = self._orientations()
        mapped = {name for _, mapping in found for name in mapping.foreign}
        self.problems += [f"left over {n} {list(shape)}" for n, shape in self.shapes.items() if n not in mapped]
        return [replace(mapping, transposed=transposed.get(family, False)) for family, mapping in found]

    def _map(self, ours: str, shape: tuple[int, ...]) -> tuple[str, TensorMapping]:
        """The mapping of one tensor, and the family of the matrix; empty for other tensors."""
        address, _, kind = ours.rpartition(".")
        modules, parts = self.places[address]
        words = [word for word in address.split(".") if word in FAMILIES]
        family = FAMILIES[words[-1]] if words and kind == "weight" else ""
        stacked = len(modules) if len(modules) > 1 or "experts" in words[-1:] else None
        rows = (shape[0] if stacked is None else shape[-1]) // len(parts)
        names = []
        for module, part in product(modules, parts):
            if name := module.tensors.get((part, kind)):
                names.append(name)
                if family:
                    self._add(family, name, rows, shape[1])
            else:
                where = f" in {module.name}" if module.name else ""
                self.problems.append(f"missing {kind} of {part}{where}")
        sizes = (rows,) * len(parts) if len(parts) > 1 else ()
        return family, TensorMapping(ours, tuple(names), sizes, stacked=stacked)

    def _add(self, family: str, name: str, outputs: int, inputs: int) -> None:
        """Record a matrix that must have these sizes."""
        shape = self.shapes[name]
        if shape not in ((outputs, inputs), (inputs, outputs)):
            self.problems.append(f"{name} is {list(shape)}, expected {[outputs, inputs]} or {[inputs, outputs]}")
        elif inputs == outputs:
            self.square[family].append(name)
        else:
            self.examples[family].setdefault(shape == (inputs, outputs), name)

    def _orientations(self) -> dict[str, bool]:
        """Whether the matrices of each family are [in, out]: square ones are like the others of their family or, if it
        has none, like all others if these are [out, in]."""
        everywhere = {one for family, examples in self.examples.items() for one in examples if family != ROUTERS}
        transposed = {}
        for family in dict.fromkeys((*self.examples, *self.square)):
            examples, square = self.examples[family], self.square[family]
            known = set(examples) or (everywhere if everywhere == {False} else set())
            if len(known) == 1:
                (transposed[family],) = known
            elif known:
                self.problems.append(f"of {family}, {examples[False]} is [out, in] and {examples[True]} is [in, out]")
            else:
                more = f" (and {len(square) - 1} more of {family})" if len(square) > 1 else ""
                unclear = f"is {list(self.shapes[square[0]])}: nothing tells whether it is [in, out] or [out, in]"
                self.problems.append(f"{square[0]} {unclear}{more}")
        return transposed
