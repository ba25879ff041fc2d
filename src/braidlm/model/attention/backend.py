"""Attention by a function of another library, such as vLLM's, through transformers' attention interface.

Such a library keeps keys and values itself, in layers of one shape. So the heads of every use of attention are divided
among as many layers as they fill: two uses of 6 and 12 heads take one layer and two.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from ..errors import BraidError

PLAIN = (None, "eager", "sdpa")  # the implementations of attention that are our own code
REFUSED = {
    "flash": "FlashAttention takes masks of padding alone, and Braid's parts make others",
    "flex": "FlexAttention takes masks as blocks, and Braid's parts make whole ones",
}
"""What the names of refused implementations contain, and why they are."""
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The sizes of heads that vLLM's kernels have, on a CPU too; smaller heads are filled up with zeros."""


def check_implementation(name: str | None) -> None:
    """Refuse an implementation of attention that would not see Braid's masks."""
    for part, why in REFUSED.items():
        if part in (name or ""):
            todo = "Use 'sdpa', which is fused too and the default, or 'eager'."
            raise BraidError(f"attention by '{name}' is refused: {why}", todo=todo)


class LayerShape(NamedTuple):
    """The shape of every layer of the other library."""

    heads: int
    kv_heads: int
    head_dim: int


def common_shape(attentions: Sequence[Any]) -> LayerShape:
    """The largest layer that the heads of every one of these attentions fill without a rest."""
    queries_per_key = gcd(*(part.query_heads // part.cache_shape[0] for part in attentions))
    kv_heads = gcd(*(part.query_heads // queries_per_key for part in attentions))
    largest = max(part.head_dim for part in attentions)
    head_dim = next((size for size in HEAD_DIMS if size >= largest), largest)
    return LayerShape(kv_heads * queries_per_key, kv_heads, head_dim)


def layer_windows(attentions: Sequence[Any]) -> list[int | None]:
    """The window of every layer of the other library, in the order of the cache's slots."""
    heads = common_shape(attentions).heads
    return [part.window for part in attentions for _ in range(part.query_heads // heads)]


class BackendLayer(nn.Module):
    """A layer of the other library, which knows it by `layer_idx`; vLLM keeps its own part for it here, as `attn`."""

    is_causal = True

    def __init__(self, config: Any, index: int, shape: LayerShape, head_dim: int, window: int | None):
        super().__init__()
        self.config, self.layer_idx, self.shape, self.sliding_window = config, index, shape, window
        self.scaling, self.num_key_value_groups = head_dim**-0.5, shape.heads // shape.kv_heads

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, options: dict[str, Any]
    ) -> Tensor:
        """Outputs [batch, head, time, dim] of queries; `options` are what the caller of the model has added."""
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        query, key, value = (self.own_heads(x) for x in (query, key, value))
        own = {"dropout": dropout, "scaling": self.scaling, "sliding_window": self.sliding_window}
        output, _ = attend(self, query, key, value, mask, **own, **options)
        batch, heads, time, dim = query.shape
        own_BNTH = output.reshape(batch, time, heads, dim).transpose(1, 2)
        if self.processes == 1:
            return own_BNTH
        parts = [torch.empty_like(own_BNTH, memory_format=torch.contiguous_format) for _ in range(self.processes)]
        torch.distributed.all_gather(parts, own_BNTH.contiguous())
        return torch.cat(parts, dim=1)

    @property
    def processes(self) -> int:
        """Among how many processes vLLM has divided the heads: each holds the cache of its own, and all queries."""
        return self.shape.heads // getattr(getattr(self, "attn", None), "num_heads", self.shape.heads)  # type: ignore[no-any-return]

    def own_heads(self, heads_BNTH: Tensor) -> Tensor:
        """The heads of this process; of fewer key heads than processes, several processes have the same."""
        if self.processes == 1:
            return heads_BNTH
        count = heads_BNTH.shape[1]
        first = torch.distributed.get_rank() % self.processes * count // self.processes
        return heads_BNTH[:, first : first + max(1, count // self.processes)]


def make_layers(config: Any, attentions: Sequence[Any]) -> list[list[BackendLayer]]:
    """The layers of each attention."""
    shape, index, made = common_shape(attentions), 0, []
    for part in attentions:
        count = part.query_heads // shape.heads
        made.append([BackendLayer(config, index + n, shape, part.head_dim, part.window) for n in range(count)])
        index += count
    return made


def attend_by_layers(
    layers: Sequence[BackendLayer],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> Tensor:
    """Outputs [batch, head, time, dim] of queries, whose heads follow one another as those of the layers."""
    heads, kv_heads, head_dim = layers[0].shape
    queries_per_key, own_dim = query.shape[1] // key.shape[1], query.shape[3]
    key, value = (x.repeat_interleave(queries_per_key * kv_heads // heads, dim=1) for x in (key, value))
    query, key, value = (F.pad(x, (0, head_dim - own_dim)) for x in (query, key, value))
    parts = zip(layers, query.split(heads, 1), key.split(kv_heads, 1), value.split(kv_heads, 1), strict=True)
    outputs = [layer(*heads_of_layer, mask, dropout, options) for layer, *heads_of_layer in parts]
    return torch.cat(outputs, dim=1)[..., :own_dim]
