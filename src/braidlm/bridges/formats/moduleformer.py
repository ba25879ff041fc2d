"""ModuleFormer as IBM's code saves it: stick-breaking attention and feed-forward as modules, each with its router."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from braidlm.bridges.bridge import ExportingBridge, ExportTarget, OpenedCheckpoint, TensorMapping, bridges
from braidlm.bridges.checkpoint import SINGLE_FILE, Checkpoint, Shapes
from braidlm.bridges.hugging_face import read_config
from braidlm.bridges.model_info import TOKEN_IDS, ModelInfo, lost_options, other_stages
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.files import write_json
from braidlm.core.reading import read_json
from braidlm.model.attention.experts import MixtureOfHeads
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.ranges import Choices, Epsilon, Heads, Layers, Length, NonNegative, Rate, Size, VocabularySize
from braidlm.model.config.strict import decode
from braidlm.model.feed.feeds import RoutedFeed

ROUTERS = {"attention": "attn.q_proj.gate.w_gate", "feed": "mlpf.gate.w_gate"}
"""Our sublayers, and the matrices of their routers in IBM's code."""
LAYER = {
    "attention_norm": "ln_1",
    "feed_norm": "ln_2",
    **{f"{part}.router.inner": f"{router}.0" for part, router in ROUTERS.items()},
    "attention.queries": "attn.q_proj.experts",
    "attention.out": "attn.q_proj.output_experts",
    "feed.bank.up": "mlpf.experts",
    "feed.bank.out": "mlpf.output_experts",
}
"""Parts of our layer and of theirs; the matrices of experts are [module, in, out] in both."""


@dataclass(frozen=True)
class ModuleFormerConfig:
    """IBM's options with the defaults of their code."""

    vocab_size: VocabularySize = 50295
    block_size: Length = 512
    history_length: Length = 512
    n_embd: Size = 1024
    n_layer: Layers = 24
    n_head: Heads = 8
    att_hidden: Size = 512
    ffd_hidden: Size = 2048
    activation_function: Literal["gelu_new", "gelu", "relu"] = "gelu_new"
    resid_pdrop: Rate = 0.0
    embd_pdrop: Rate = 0.0
    attn_pdrop: Rate = 0.0
    moe_pdrop: Rate = 0.0
    sample_topk: int = 0
    gating_size: Size = 256
    n_att_experts: Choices = 32
    k_att: Choices = 2
    n_mlp_experts: Choices = 32
    k_mlp: Choices = 2
    layer_norm_epsilon: Epsilon = 1e-5
    initializer_range: NonNegative = 0.02
    tie_word_embeddings: bool = False
    aux_loss_type: Literal["mi", "switch"] = "mi"
    aux_loss_weight: NonNegative = 0.0
    gate_type: Literal["mlp", "linear"] = "mlp"
    bos_token_id: int | None = 50256
    eos_token_id: int | None = 50256
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.att_hidden % self.n_head:
            raise BraidError(f"att_hidden ({self.att_hidden}) is not a multiple of n_head ({self.n_head})")

    def router(self, top_k: int) -> dict[str, Any]:
        losses = {"mi": {"mutual_information": 1.0}, "switch": {"switch": 1.0, "z_loss": 0.1}}[self.aux_loss_type]
        return {
            "top_k": top_k,
            "renormalise": False,
            "hidden": self.gating_size if self.gate_type == "mlp" else None,
            "bias": False,
            "sampled": self.sample_topk,
            "losses": {name: share * self.aux_loss_weight for name, share in losses.items() if self.aux_loss_weight},
        }

    def architecture(self) -> dict[str, Any]:
        # Keys and values are the stream itself where attention is as wide as the model.
        keys = {"keys": "stream"} if self.att_hidden == self.n_embd else {"keys": "shared", "kv_bias": True}
        sizes = {"heads": self.n_head, "head_dim": self.att_hidden // self.n_head}
        experts = {"names": self.n_att_experts, **keys, "router": self.router(self.k_att)}
        attention = {"kind": "stick_breaking", **sizes, "experts": experts}
        feed = {"kind": "mlp", "hidden": self.ffd_hidden, "activation": self.activation_function}
        feed["experts"] = {"names": self.n_mlp_experts, "router": self.router(self.k_mlp)}
        return {
            "width": self.n_embd,
            "context": self.block_size,
            "positions": "none",
            "tie_embeddings": self.tie_word_embeddings,
            "dropout": {"embedding": self.embd_pdrop, "attention": self.attn_pdrop, "residual": self.resid_pdrop},
            "initialisation": {"kind": "moduleformer", "std": self.initializer_range},
            "block": {"norm": {"kind": "layer", "eps": self.layer_norm_epsilon}, "attention": attention, "feed": feed},
            "stages": [{"block": {"layers": self.n_layer}}],
        }


@bridges.register("moduleformer")
class ModuleFormerBridge(ExportingBridge):
    """A folder or state dict with IBM's names, and their options as JSON."""

    title = "ModuleFormer"
    single_file = True

    def open(self, path: Path, config_file: Path | None = None) -> OpenedCheckpoint:
        if path.is_dir():
            data, where = read_config(path, "moduleformer"), path / "config.json"
        elif config_file is not None:
            data, where = read_json(config_file), config_file
        else:
            what = "the tensors do not say how many modules a token uses, nor how many heads a module has"
            raise BraidError(what, str(path), "Give IBM's configuration with `--config FILE.json`.")
        known = {field.name for field in fields(ModuleFormerConfig)}  # transformers writes others beside them
        with errors_at(str(where)):
            config = decode(ModuleFormerConfig, {name: value for name, value in data.items() if name in known})
        checkpoint = Checkpoint(path)
        if config.tie_word_embeddings and "lm_head.weight" in checkpoint.stored:
            checkpoint.ignore_copy_of_embedding("lm_head.weight", "transformer.wte.weight")
        ids = {
            name: token for name in TOKEN_IDS if (token := getattr(config, name)) is None or token < config.vocab_size
        }
        ours = BraidConfig(config.architecture(), vocab_size=config.vocab_size, **ids)
        notes = ["dropout inside routers (moe_pdrop) is left out; logits do not change"] if config.moe_pdrop else []
        return OpenedCheckpoint(checkpoint, ours, "the ModuleFormer that the configuration describes", notes)

    def mappings(self, info: ModelInfo) -> Iterator[TensorMapping]:
        yield TensorMapping("model.embedding.weight", ("transformer.wte.weight",))
        for number, ours in enumerate(info.layers):
            theirs = f"transformer.h.{number}"
            for kind, (our_name, their_name) in product(("weight", "bias"), LAYER.items()):
                yield TensorMapping(f"{ours}.{our_name}.{kind}", (f"{theirs}.{their_name}.{kind}",))
            for kind in ("weight", "bias"):
                parts = tuple(f"{theirs}.attn.{letter}_proj.{kind}" for letter in "kv")
                size = info.attention.kv_heads * info.attention.head_dim
                yield TensorMapping(f"{ours}.attention.keys_values.{kind}", parts, (size, size))
            for part, router in ROUTERS.items():
                scores = 3 if f"{ours}.{part}.router.inner.weight" in info.tensors else 0
                yield TensorMapping(f"{ours}.{part}.router.scores.weight", (f"{theirs}.{router}.{scores}.weight",))
        for kind in ("weight", "bias"):
            yield TensorMapping(f"model.norm.{kind}", (f"transformer.ln_f.{kind}",))
        yield TensorMapping("head.weight", ("lm_head.weight",))

    def export_problems(self, info: ModelInfo) -> list[str]:
        if problems := other_stages(info, self.title):
            return problems
        layers = [layer for stage in info.model.model.stages for layer in stage.layers]
        if not all(isinstance(x.attention, MixtureOfHeads) and isinstance(x.feed, RoutedFeed) for x in layers):
            return ["attention and feed-forward must be experts in every block, attention with shared keys"]
        again = ModelInfo(BraidConfig(decode(ModuleFormerConfig, self.settings(info)).architecture()))
        return lost_options(info, again, self.title, self.zero_biases)

    def settings(self, info: ModelInfo) -> dict[str, Any]:
        """IBM's options for a model of ours."""
        architecture, block = info.architecture, info.block
        attention, feed = block.attention.options, block.feed.options
        router = attention.experts.router
        return {
            "vocab_size": info.config.vocab_size,
            "block_size": architecture.context,
            "history_length": architecture.context,
            "n_embd": architecture.width,
            "n_layer": len(info.layers),
            "n_head": info.attention.heads,
            "att_hidden": info.attention.inner,
            "ffd_hidden": info.model.model.stages[0].layers[0].feed.bank.out.weight.shape[1],
            "activation_function": feed.activation,
            "resid_pdrop": block.dropout.residual,
            "embd_pdrop": architecture.dropout.embedding,
            "attn_pdrop": block.dropout.attention,
            "moe_pdrop": 0.0,
            "sample_topk": router.sampled,
            "gating_size": router.hidden or 256,
            "n_att_experts": len(attention.experts.expert_names),
            "k_att": router.top_k,
            "n_mlp_experts": len(feed.experts.expert_names),
            "k_mlp": feed.experts.router.top_k,
            "layer_norm_epsilon": block.norm.options.eps,
            "initializer_range": info.initial_std,
            "tie_word_embeddings": architecture.tie_embeddings,
            "aux_loss_type": "switch" if "switch" in router.losses else "mi",
            "aux_loss_weight": max(router.losses.values(), default=0.0),
            "gate_type": "linear" if router.hidden is None else "mlp",
            **info.token_ids,
        }

    def target(self, info: ModelInfo) -> ExportTarget:
        return ModuleFormerTarget(self.foreign_shapes(info, self.checked_mappings(info)), self.settings(info))


@dataclass(frozen=True)
class ModuleFormerTarget(ExportTarget):
    """A folder that IBM's code opens."""

    shapes: Shapes
    settings: dict[str, Any]

    def save(self, tensors: dict[str, Tensor], folder: Path) -> None:
        config = {"architectures": ["ModuleFormerForCausalLM"], "model_type": "moduleformer", **self.settings}
        write_json(folder / "config.json", config)
        save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
