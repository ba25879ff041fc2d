"""A plain MoEP in torch, dense-and-mask as the authors' code computes it, and its tensors under several names."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

Tensors = dict[str, Tensor]
SIZES = {"vocab_size": 41, "n_positions": 24, "n_embd": 24, "n_embd_small": 12, "n_head": 4, "n_head_small": 2}
CONFIG = {"model_type": "moep_lm", **SIZES, "parallel_layers": 3, "n_experts": 4, "top_k": 2}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.c_attn, self.c_proj, self.heads = Conv1D(3 * width, width), Conv1D(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, -1)
        )
        scores = query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5
        hidden = torch.ones(time, time, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(hidden, width), Conv1D(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class SwiGLU(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs), nn.Linear(inputs, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, gated: bool):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = SwiGLU(width, 3 * width, width) if gated else MLP(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def mixed(x: Tensor, members: nn.ModuleList, router: nn.Linear, top_k: int) -> Tensor:
    """All members are computed, and those not chosen are masked; the router reads the stream as it is."""
    weights, chosen = router(x).softmax(-1).topk(top_k, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    mask = torch.zeros(*x.shape[:2], len(members)).scatter(-1, chosen, weights)
    return sum(mask[..., n, None] * member(x) for n, member in enumerate(members))  # type: ignore[return-value]


class Routed(nn.Module):
    """A bank of projections, or the blocks of a layer."""

    def __init__(self, name: str, members: Iterator[nn.Module], width: int, top_k: int):
        super().__init__()
        self.add_module(name, nn.ModuleList(members))
        self.router = nn.Linear(width, len(getattr(self, name)))
        self.name, self.top_k = name, top_k

    def forward(self, x: Tensor) -> Tensor:
        return mixed(x, getattr(self, self.name), self.router, self.top_k)


class PlainMoep(nn.Module):
    def __init__(self, gated: bool = False, top_k: int = 2, layers: int = 3, paths: int = 4, experts: int = 4):
        super().__init__()
        wide, narrow = SIZES["n_embd"], SIZES["n_embd_small"]

        def projections(inputs: int, outputs: int) -> Iterator[nn.Module]:
            for _ in range(experts):
                yield SwiGLU(inputs, 20, outputs) if gated else nn.Linear(inputs, outputs)

        def blocks() -> Iterator[nn.Module]:
            return (Block(narrow, SIZES["n_head_small"], gated) for _ in range(paths))

        self.wte = nn.Embedding(SIZES["vocab_size"], wide)
        self.wpe = nn.Embedding(SIZES["n_positions"], wide)
        self.first_block = Block(wide, SIZES["n_head"], gated)
        self.shrink = Routed("experts", projections(wide, narrow), wide, top_k)
        self.parallel_layers = nn.ModuleList(Routed("blocks", blocks(), narrow, top_k) for _ in range(layers))
        self.grow = Routed("experts", projections(narrow, wide), narrow, top_k)
        self.last_block = Block(wide, SIZES["n_head"], gated)
        self.ln_f = nn.LayerNorm(wide)
        generator = torch.Generator().manual_seed(5)
        for name, parameter in self.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = ".ln_" in f".{name}" and name.endswith("weight")
            parameter.data = 1 + 0.2 * noise if norm else noise * (0.2 if parameter.ndim == 2 else 0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        x = self.shrink(self.first_block(x))
        for layer in self.parallel_layers:
            x = layer(x)
        return self.ln_f(self.last_block(self.grow(x))) @ self.wte.weight.T

    def tensors(self) -> Tensors:
        """The state dict as this version of the code saves it."""
        return {f"transformer.{name}": tensor.detach().clone() for name, tensor in self.state_dict().items()}


def other_version(tensors: Tensors) -> Tensors:
    """The same model as another version would save it: one list of layers, torch's Linear everywhere, queries, keys and
    values apart, other words."""
    renamed: Tensors = {}
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if ".parallel_layers." in name)
    for name, tensor in tensors.items():
        name = name.removeprefix("transformer.")
        name = name.replace("first_block.", "layers.0.").replace("last_block.", f"layers.{layers + 1}.")
        if name.startswith("parallel_layers."):
            _, number, rest = name.split(".", 2)
            name = f"layers.{int(number) + 1}.{rest}"
        conv = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        tensor = tensor.T.contiguous() if conv else tensor
        for old, new in OTHER_WORDS:
            name = name.replace(old, new)
        if ".qkv." in name:
            for part, letter in zip(tensor.chunk(3), "qkv", strict=True):
                renamed[name.replace(".qkv.", f".{letter}_proj.")] = part.clone()
        else:
            renamed[name] = tensor
    return renamed


OTHER_WORDS = (
    ("wte.", "tok_emb."),
    ("wpe.", "pos_emb."),
    ("ln_f.", "final_norm."),
    ("ln_1.", "attn_norm."),
    ("ln_2.", "ffn_norm."),
    ("attn.c_attn.", "attention.qkv."),
    ("attn.c_proj.", "attention.o_proj."),
    ("mlp.c_fc.", "ffn.fc1."),
    ("mlp.c_proj.", "ffn.fc2."),
    ("mlp.w1.", "ffn.gate_proj."),
    ("mlp.w3.", "ffn.up_proj."),
    ("mlp.w2.", "ffn.down_proj."),
    ("shrink.experts.", "proj_in.experts."),
    ("grow.experts.", "proj_out.experts."),
    ("shrink.router.", "proj_in.gate."),
    ("grow.router.", "proj_out.gate."),
    ("router.", "gate.linear."),
)
