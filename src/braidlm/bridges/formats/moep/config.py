"""The settings in config.json of a MoEP checkpoint, under the keys of any version, and our architecture for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from braidlm.bridges.formats.gpt2 import ACTIVATIONS
from braidlm.bridges.formats.moep.structure import FEED, Bank, MoepStructure
from braidlm.core.errors import BraidError

HEADS = ("n_head", "n_heads", "num_heads", "num_attention_heads", "heads")
NARROW = ("small", "parallel", "path", "narrow", "inner", "reduced", "block")
NARROW_HEADS = tuple(key for word in NARROW for name in HEADS for key in (f"{word}_{name}", f"{name}_{word}"))
TOP_K = ("top_k", "topk", "k", "num_experts_per_tok", "router_top_k")
BLOCK_TOP_K = ("top_k_blocks", "block_top_k", "blocks_top_k", "parallel_top_k", "top_k_parallel", "top_k_paths")
EXPERT_TOP_K = ("top_k_experts", "expert_top_k", "experts_top_k", "moe_top_k", "top_k_moe")
BALANCE = ("aux_loss_weight", "aux_loss_coef", "router_aux_loss_coef", "load_balance_weight", "balance_weight")
EPS = ("layer_norm_epsilon", "layer_norm_eps", "norm_eps", "eps")
ACTIVATION = ("activation_function", "hidden_act", "activation", "hidden_activation")
RENORMALISE = ("norm_topk_prob", "renormalize", "renormalise", "normalize_top_k")
SIZES = {
    "vocabulary": ("vocab_size",),
    "width": ("n_embd", "hidden_size", "d_model", "dim", "embed_dim", "model_dim"),
    "narrow width": tuple(
        key
        for word in NARROW
        for name in ("n_embd", "hidden_size", "d_model", "dim", "width")
        for key in (f"{word}_{name}", f"{name}_{word}")
    ),
    "positions": ("n_positions", "max_position_embeddings", "block_size", "context_length", "max_seq_len", "n_ctx"),
    "layers": ("n_layer", "n_layers", "num_layers", "num_hidden_layers"),
    "parallel layers": ("parallel_layers", "n_parallel_layers", "num_parallel_layers", "n_layer_parallel"),
    "blocks of a layer": ("parallel_blocks", "n_parallel_blocks", "num_parallel_blocks", "n_paths", "paths"),
    "experts": ("n_experts", "num_experts", "experts", "n_expert", "num_local_experts"),
    "feed-forward": ("n_inner", "intermediate_size", "d_ff", "ffn_dim"),
}
"""Sizes that tensors show too, and their possible keys."""


@dataclass
class MoepConfig:
    """The contents of config.json, read with several spellings of each key."""

    data: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def first(self, keys: Sequence[str], value_type: type = int) -> Any:
        """The value under the first of these keys that has one; None if none has."""
        for key in keys:
            value = self.data.get(key)
            if value is None:
                continue
            accepted = (int, float) if value_type is float else value_type
            if not isinstance(value, accepted) or (value_type is not bool and isinstance(value, bool)):
                raise BraidError(f"{key} must be of type {value_type.__name__}, got {value!r}")
            if isinstance(value, (int, float)) and value < 0:
                raise BraidError(f"{key} must not be below 0, got {value}")
            return value
        return None

    def contradictions(self, sizes: dict[str, set[int]]) -> list[str]:
        """Sizes in the configuration that the tensors do not have."""
        problems = []
        for what, keys in SIZES.items():
            for key in keys:
                value = self.data.get(key)
                if isinstance(value, int) and value not in sizes[what]:
                    stored = " or ".join(map(str, sorted(sizes[what])))
                    problems.append(f"{key} is {value}, the tensors say {stored} ({what})")
        return problems

    def heads(self, width: int, narrow: int) -> tuple[int, int]:
        """The heads of the blocks of the full width and of the parallel ones: no tensor shows them."""
        wide = self.first(HEADS)
        head_dim = self.first(("head_dim", "head_size", "d_head"))
        if wide is None and head_dim:
            wide = width // head_dim
        if not wide:
            raise BraidError(
                f"neither the tensors nor config.json say how many heads attention has ({', '.join(HEADS)})",
                todo='Add it to config.json, e.g. "n_head": 6. In the paper a head has 64 channels.',
            )
        parallel = self.first(NARROW_HEADS)
        if parallel is None:
            size = head_dim or width // wide
            parallel = max(1, narrow // size)
            chosen = f"{parallel} of {size} channels, as large as the other blocks' heads, are written"
            self.notes.append(f"config.json does not give the heads of parallel blocks; {chosen}")
        for name, heads, channels in (("blocks", wide, width), ("parallel blocks", parallel, narrow)):
            if heads < 1 or channels % heads:
                raise BraidError(f"{heads} heads of {name} do not divide their width, {channels}")
        return wide, parallel

    def top_k(self, keys: Sequence[str], choices: int, what: str) -> int:
        """How many of the choices serve a token."""
        top_k = self.first((*keys, *TOP_K))
        if top_k is None:
            top_k = min(2, choices)
            self.notes.append(f"config.json does not give top_k of {what}; {top_k}, the paper's, is written")
        if not 1 <= top_k <= choices:
            raise BraidError(f"top_k is {top_k}, and there are {choices} {what}")
        return int(top_k)

    def activation(self) -> str:
        """The activation of feed-forward parts that are not gated."""
        name = self.first(ACTIVATION, str) or "gelu_new"
        if name not in ACTIVATIONS:
            known = ", ".join(sorted(set(ACTIVATIONS.values())))
            raise BraidError(f"the activation is '{name}'; Braid has {known}")
        return ACTIVATIONS[name]

    def note_gate(self) -> None:
        """Note that gated parts are read as the paper's SwiGLU if another activation is configured."""
        name = self.first(ACTIVATION, str)
        if name not in (None, "silu", "swish", "swiglu"):
            self.notes.append(f"config.json names the activation '{name}'; gated parts are read as SwiGLU, the paper's")

    def eps(self) -> float:
        return float(self.first(EPS, float) or 1e-5)

    def balance(self) -> float:
        """The weight of the Switch loss; the authors' code has 0.2."""
        weight = self.first(BALANCE, float)
        return 0.2 if weight is None else float(weight)

    def renormalise(self) -> bool:
        return self.first(RENORMALISE, bool) is not False

    def dropout(self) -> dict[str, float]:
        """The dropout rates, by default the paper's 0.1."""
        rate_of_all = self.first(("dropout", "dropout_rate"), float)
        names = {"embedding": "embd_pdrop", "attention": "attn_pdrop", "residual": "resid_pdrop"}
        rates = {ours: self.first((theirs,), float) for ours, theirs in names.items()}
        default = 0.1 if rate_of_all is None else float(rate_of_all)
        return {ours: default if rate is None else float(rate) for ours, rate in rates.items()}


def architecture(structure: MoepStructure, config: MoepConfig, tied: bool) -> dict[str, Any]:
    """Our architecture for a checkpoint."""
    heads, parallel_heads = config.heads(structure.width, structure.narrow)
    feed: dict[str, Any] = {"kind": "swiglu"} if structure.gated else {"kind": "mlp", "activation": config.activation()}
    if structure.gated:
        config.note_gate()
    std = float(config.first(("initializer_range",), float) or 0.02)
    layer = structure.layers[0]
    join = {"kind": "routed", **_router(layer, config, BLOCK_TOP_K, "blocks in a layer")}
    parallel = {
        "layers": len(structure.layers),
        "paths": len(layer.members),
        "attention": {"heads": parallel_heads},
        "feed": {"hidden": layer.hidden},
        "join": join,
    }
    return {
        "width": structure.width,
        "context": structure.positions,
        "positions": "learned",
        "tie_embeddings": tied,
        "dropout": config.dropout(),
        "initialisation": {"kind": "normal", "std": std, "carriers": std},
        "block": {
            "norm": {"kind": "layer", "eps": config.eps(), "bias": structure.norm_bias},
            "attention": {"heads": heads, "bias": structure.attention_bias},
            "feed": {**feed, "hidden": structure.hidden, "bias": structure.feed_bias},
        },
        "stages": [
            *([{"block": {"layers": len(structure.before)}}] if structure.before else []),
            _projection(structure.shrink, structure.narrow, config),
            {"parallel": parallel},
            _projection(structure.grow, structure.width, config),
            *([{"block": {"layers": len(structure.after)}}] if structure.after else []),
        ],
    }


def _projection(bank: Bank, to: int, config: MoepConfig) -> dict[str, Any]:
    kind = {"kind": "swiglu", "hidden": bank.hidden} if bank.gated else {"kind": "linear"}
    router = _router(bank, config, EXPERT_TOP_K, "experts")
    return {
        "project": {
            "to": to,
            "bias": bank.has_bias(*FEED, "linear"),
            "experts": {"names": len(bank.members), **kind, "router": router},
        }
    }


def _router(bank: Bank, config: MoepConfig, keys: Sequence[str], what: str) -> dict[str, Any]:
    weight = config.balance()
    return {
        "top_k": config.top_k(keys, len(bank.members), what),
        "renormalise": config.renormalise(),
        "bias": bank.router.has("router", "bias"),
        "losses": {"switch": weight} if weight else {},
    }
