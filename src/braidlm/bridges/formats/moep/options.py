"""What config.json of a MoEP checkpoint says that its tensors cannot, under the names that versions gave it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from braidlm.bridges.formats.gpt2 import ACTIVATIONS
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
"""Sizes that tensors show too, and what they may be called."""


@dataclass
class MoepOptions:
    """A configuration, read with several spellings."""

    data: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def first(self, keys: Sequence[str], what: type = int) -> Any:
        """The value under the first of some names that is there; None where none is."""
        for key in keys:
            value = self.data.get(key)
            if value is None:
                continue
            wanted = (int, float) if what is float else what
            if not isinstance(value, wanted) or (what is not bool and isinstance(value, bool)):
                raise BraidError(f"{key} must be of type {what.__name__}, got {value!r}")
            if isinstance(value, (int, float)) and value < 0:
                raise BraidError(f"{key} must not be below 0, got {value}")
            return value
        return None

    def contradictions(self, sizes: dict[str, set[int]]) -> list[str]:
        """Where the configuration names a size that the tensors do not have."""
        problems = []
        for what, keys in SIZES.items():
            for key in keys:
                value = self.data.get(key)
                if isinstance(value, int) and value not in sizes[what]:
                    found = " or ".join(map(str, sorted(sizes[what])))
                    problems.append(f"{key} is {value}, the tensors say {found} ({what})")
        return problems

    def heads(self, width: int, narrow: int) -> tuple[int, int]:
        """Of the blocks at the ends and of the parallel ones: no tensor shows them."""
        wide = self.first(HEADS)
        head_dim = self.first(("head_dim", "head_size", "d_head"))
        if wide is None and head_dim:
            wide = width // head_dim
        if not wide:
            raise BraidError(
                f"neither the tensors nor config.json say how many heads attention has ({', '.join(HEADS)})",
                todo='Add it to config.json, e.g. "n_head": 6. In the paper a head has 64 channels.',
            )
        few = self.first(NARROW_HEADS)
        if few is None:
            size = head_dim or width // wide
            few = max(1, narrow // size)
            told = f"{few} of {size} channels, as large as the other blocks' heads, are written"
            self.notes.append(f"config.json does not give the heads of parallel blocks; {told}")
        for name, heads, channels in (("blocks", wide, width), ("parallel blocks", few, narrow)):
            if heads < 1 or channels % heads:
                raise BraidError(f"{heads} heads of {name} do not divide their width, {channels}")
        return wide, few

    def top_k(self, keys: Sequence[str], things: int, what: str) -> int:
        """How many serve a token."""
        found = self.first((*keys, *TOP_K))
        if found is None:
            found = min(2, things)
            self.notes.append(f"config.json does not give top_k of {what}; {found}, the paper's, is written")
        if not 1 <= found <= things:
            raise BraidError(f"top_k is {found}, and there are {things} {what}")
        return int(found)

    def activation(self) -> str:
        """Of feed-forward parts that are not gated."""
        name = self.first(ACTIVATION, str) or "gelu_new"
        if name not in ACTIVATIONS:
            known = ", ".join(sorted(set(ACTIVATIONS.values())))
            raise BraidError(f"the activation is '{name}'; Braid has {known}")
        return ACTIVATIONS[name]

    def note_gate(self) -> None:
        """Gated parts are read as the paper's SwiGLU, whatever a plain part's activation would be."""
        name = self.first(ACTIVATION, str)
        if name not in (None, "silu", "swish", "swiglu"):
            self.notes.append(f"config.json names the activation '{name}'; gated parts are read as SwiGLU, the paper's")

    def eps(self) -> float:
        return float(self.first(EPS, float) or 1e-5)

    def balance(self) -> float:
        """The weight of the Switch loss; the authors' code has 0.2."""
        found = self.first(BALANCE, float)
        return 0.2 if found is None else float(found)

    def renormalise(self) -> bool:
        found = self.first(RENORMALISE, bool)
        return True if found is None else bool(found)

    def dropout(self) -> dict[str, float]:
        """The paper's 0.1 where nothing is said."""
        usual = self.first(("dropout", "dropout_rate"), float)
        names = {"embedding": "embd_pdrop", "attention": "attn_pdrop", "residual": "resid_pdrop"}
        rates = {ours: self.first((theirs,), float) for ours, theirs in names.items()}
        rest = 0.1 if usual is None else float(usual)
        return {ours: rest if rate is None else float(rate) for ours, rate in rates.items()}
