"""Llama and Mistral to Mixtral: its configuration, and where each tensor of its files comes from.

Mixtral is their decoder with experts: a softmax over all experts, the top k, and the weights of these divided by their
sum. So equal copies in place of a feed-forward part change nothing.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import MixtralConfig

from braidlm.bridges.bridge import bridges, bullet_list
from braidlm.bridges.checkpoint import Checkpoint, Shapes
from braidlm.bridges.hugging_face import HuggingFaceBridge
from braidlm.core.differences import compare_shapes
from braidlm.core.errors import BraidError
from braidlm.edits.account import Account, Derived, Fresh, Part, account_table
from braidlm.edits.edit import SOURCE
from braidlm.opening.opened_model import OpenedModel

MIXTRAL_SOURCES = ("llama", "mistral")
"""The model types that have Mixtral's attention, norms and positions."""
KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_dropout",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
)
"""Settings of the same name and meaning in Llama, Mistral and Mixtral."""
FEED = re.compile(r"(?P<layer>.+\.layers\.\d+)\.mlp\.(?P<matrix>\w+)\.weight")
EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""The matrices of a feed-forward part, and their names in an expert."""
EXPERTS = ".experts."
"""In the name of every tensor of an expert."""


@dataclass(frozen=True)
class MixtralPlan:
    """The new model, and the origin of each of its tensors."""

    source: OpenedModel
    checkpoint: Checkpoint
    config: MixtralConfig
    account: Account
    tensors: dict[str, Tensor]
    """Of the new model, on the meta device, by their names in its files."""
    notes: list[str]

    @property
    def bytes(self) -> int:
        """Of the new model's weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def lines(self) -> list[str]:
        """The plan in words."""
        before = sum(torch.Size(shape).numel() for shape in self.checkpoint.shapes.values())
        after = sum(tensor.numel() for tensor in self.tensors.values())
        count, top_k = self.config.num_local_experts, self.config.num_experts_per_tok
        idle = sum(t.numel() for name, t in self.tensors.items() if EXPERTS in name) * (count - top_k) // count
        title = (
            f"Upcycle {self.source.title} to Mixtral: {count} experts for each feed-forward part, of which a token "
            f"takes {top_k}; {after:,} parameters in place of {before:,}, {after - idle:,} active per token; "
            f"{self.bytes:,} bytes to write"
        )
        return [title, *account_table(self.account, ()), *(f"  note: {note}" for note in self.notes)]


def plan_mixtral(source: OpenedModel, experts: int, top_k: int) -> MixtralPlan:
    """Read a folder's configuration and the names of its tensors, and say what becomes of each."""
    bridge = bridges[source.kind]()
    assert isinstance(bridge, HuggingFaceBridge)
    config = bridge.foreign_config(source.folder)
    if problems := _problems(config):
        raise BraidError(
            f"Mixtral cannot express this {bridge.title}:{bullet_list(problems)}",
            str(source.folder / "config.json"),
            "With `--to braid` the result is a Braid model, which can express more.",
        )
    checkpoint = bridge.open_checkpoint(source.folder)
    notes = bridge.resolve_tied_head(config, checkpoint)
    if wrong := compare_shapes(_shapes(bridge, config), checkpoint.shapes) + checkpoint.dtype_problems():
        raise BraidError(
            f"the weights are not those of the {bridge.title} that config.json describes:{bullet_list(wrong)}",
            str(source.folder),
            "Weights and configuration must come from the same model.",
        )
    stored = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        for name, tensor in checkpoint.stored.items()
    }
    account, tensors = _account(stored, experts)
    account.check(tensors, {SOURCE: stored})
    mixtral = _mixtral_config(config, experts, top_k, stored[bridge.embedding].dtype)
    left = [f"not read: {name} ({why})" for name, why in checkpoint.ignored.items()]
    return MixtralPlan(source, checkpoint, mixtral, account, tensors, notes + left[:3])


def _problems(config: Any) -> list[str]:
    problems = []
    if getattr(config, "attention_bias", False):
        problems.append("attention has biases (attention_bias); Mixtral's has none")
    if getattr(config, "mlp_bias", False):
        problems.append("the feed-forward has biases (mlp_bias); Mixtral's has none")
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    if len(kinds) > 1:
        problems.append(f"layers have attention of several types ({', '.join(kinds)}); Mixtral has one for all")
    return problems


def _shapes(bridge: HuggingFaceBridge, config: Any) -> Shapes:
    """The tensors that transformers' own model of a configuration has, but for a tied head."""
    with torch.device("meta"):
        model: Any = bridge.model_class(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes[bridge.head]
    return shapes


def _account(stored: dict[str, Tensor], experts: int) -> tuple[Account, dict[str, Tensor]]:
    """The origin of every tensor of Mixtral's files, and these tensors."""
    account, tensors = Account(), {}
    for name, tensor in stored.items():
        copied, feed = Derived((Part(SOURCE, name),)), FEED.fullmatch(name)
        if feed is None:
            account.origins[name], tensors[name] = copied, tensor
            continue
        sparse = f"{feed['layer']}.block_sparse_moe"
        if feed["matrix"] == "gate_proj":
            router = f"{sparse}.gate.weight"
            account.origins[router] = Fresh("routers", f"{sparse}.gate")
            tensors[router] = tensor.new_empty(experts, tensor.shape[1])
        for number in range(experts):
            expert = f"{sparse}{EXPERTS}{number}.{EXPERT[feed['matrix']]}.weight"
            account.origins[expert], tensors[expert] = copied, tensor
    return account, tensors


def _mixtral_config(config: Any, experts: int, top_k: int, dtype: torch.dtype) -> MixtralConfig:
    return MixtralConfig(
        **{name: getattr(config, name) for name in KEPT},
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        sliding_window=config.sliding_window if config.model_type == "mistral" else None,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        architectures=["MixtralForCausalLM"],
        dtype=dtype,
    )
