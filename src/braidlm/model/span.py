"""One forward pass: what all blocks share (positions, masks, rotations, the cache), what is recorded, what it gives."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .attention.positions import Rotation
from .errors import BraidError
from .exporting import is_exporting
from .routing.routing import Routings


@dataclass
class LayerRecord:
    """Filled during one forward pass; a list that nobody asked for is None."""

    hidden_states: list[Tensor] | None = None
    """The embedded tokens, then the stream after each layer; the last one after the norm before the head."""
    attentions: list[Tensor] | None = None
    """For each layer [batch, head, time, key]: the heads of all its paths or experts, in their order."""
    _of_layer: list[Tensor] = field(default_factory=list)

    def begin(self, hidden: Tensor) -> None:
        """Record the embedded tokens."""
        if self.hidden_states is not None:
            self.hidden_states.append(hidden)

    def add_weights(self, weights_BNTS: Tensor) -> None:
        """Record the weights of one attention of the current layer."""
        if self.attentions is not None:
            self._of_layer.append(weights_BNTS)

    def end_layer(self, hidden: Tensor) -> None:
        """Record the stream after a layer, and the weights of its attentions as one tensor."""
        if self.hidden_states is not None:
            self.hidden_states.append(hidden)
        if self.attentions is not None:
            # A layer has no attention if none of its paths has a block there.
            no_heads = hidden.new_empty(len(hidden), 0, hidden.shape[1], 0)
            self.attentions.append(torch.cat(self._of_layer, dim=1) if self._of_layer else no_heads)
        self._of_layer = []

    def end(self, normed: Tensor) -> None:
        """Replace the last stream by the normalised one, as transformers' users expect."""
        if self.hidden_states is not None:
            self.hidden_states[-1] = normed


Masks = dict[int | None, Tensor | None]
"""An attention mask [batch or 1, 1, time, keys] for each window in use, true where a query sees a key; None where none
is needed."""


class KeyValueCache(Protocol):
    """The methods of a cache that attention calls; transformers' caches and our own have them."""

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]: ...

    def get_seq_length(self) -> int: ...


@dataclass
class Span:
    """One forward pass over [batch, time] tokens."""

    positions: Tensor  # [batch or 1, time]
    masks: Masks  # None: no mask is needed beyond `causal`
    causal: bool  # without a mask: whether attention is causal (`is_causal` of torch); otherwise every key is seen
    two_way: int = 0
    """The number of rows, the last ones, in which every query sees every key of its row; for passes without masks."""
    cache: KeyValueCache | None = None
    rotations: dict[int, Rotation | None] = field(default_factory=dict)  # by head size
    present: Tensor | None = None
    """[member or 1, batch, time]: the tokens that each path or expert sees; None: all of them."""
    real: Tensor | None = None  # [batch, time]: false for padding; None: there is none
    eager: bool = False  # whether attention is computed by plain products
    backend: dict[str, Any] | None = None
    """What the caller passes on to another library's attention, where that is asked for."""
    record: LayerRecord | None = None  # what the caller asked to see of each layer
    tokens: Tensor | None = None
    """[batch, time]: the tokens themselves, for a head that reads them; None where only embeddings are known."""
    paths: frozenset[str] | None = None
    """The paths that the pass is asked for, where paths stay apart and no other is read; None for all."""

    @property
    def time(self) -> int:
        return self.positions.shape[-1]

    @property
    def is_same_for_all_texts(self) -> bool:
        """Whether the pass may go on with some texts of the batch alone."""
        shared = all(mask is None or len(mask) == 1 for mask in (*self.masks.values(), self.positions))
        return shared and self.cache is None and not self.two_way and not self.needs_weights

    def beginning(self, time: int) -> "Span":
        """The pass over the first tokens of each text alone, where the texts have nothing of their own."""
        masks = {window: None if mask is None else mask[..., :time, :time] for window, mask in self.masks.items()}
        rotations = {size: None if one is None else one.beginning(time) for size, one in self.rotations.items()}
        tokens = None if self.tokens is None else self.tokens[:, :time]
        return replace(self, positions=self.positions[:, :time], masks=masks, rotations=rotations, tokens=tokens)

    @property
    def needs_weights(self) -> bool:
        """Whether attention weights are recorded: every attention then runs for every token."""
        return self.record is not None and self.record.attentions is not None


class TextPass(NamedTuple):
    """What one forward pass gives."""

    hidden: Tensor  # [batch, time, width]: the normalised stream
    routings: Routings
    read: dict[str, Tensor] = {}
    """What the head has read in the text beside the stream, [batch, time, ...], by the names of its arguments."""

    def at(self, index: Any) -> "TextPass":
        """The pass at some positions; the routings stay those of all."""
        read = {name: values[index] for name, values in self.read.items()}
        return TextPass(self.hidden[index], self.routings, read)


Stream = Callable[[Tensor, Span], tuple[Tensor, Routings]]
"""From embedded tokens to the normalised stream, and what routers chose."""


class TextReader(Protocol):
    """A head that reads the text beside the stream."""

    def read(self, hidden: Tensor, span: Span) -> dict[str, Tensor]: ...

    def run(self, stream: Stream, embedded: Tensor, span: Span) -> TextPass: ...


def positions_from_mask(mask: Tensor, time: int) -> Tensor:
    """The positions of real tokens, so that padding on either side changes nothing."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -time:]


def make_masks(
    windows: Iterable[int | None], time: int, past: int, padding: Tensor | None, device: torch.device
) -> Masks:
    """A mask for each attention window in use, or None where `is_causal` is enough. `padding` is [batch, past + time],
    true for real tokens."""
    return {window: _mask(window, time, past, padding, device) for window in windows}


def _mask(window: int | None, time: int, past: int, padding: Tensor | None, device: torch.device) -> Tensor | None:
    keys = past + time
    # Whether a mask is needed depends on the lengths, and an exported graph holds for all of them.
    inside = window is None or (not is_exporting() and keys <= window)
    if inside and not is_exporting() and padding is None and (past == 0 or time == 1):
        return None
    query = torch.arange(past, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    allowed = key <= query
    if not inside:
        allowed &= key > query - window  # type: ignore[operator]
    allowed = allowed[None, None]
    if padding is not None:
        # A padded token still sees itself: softmax over no keys would be NaN and spread.
        allowed = (allowed & padding[:, None, None, :].bool()) | (key == query)[None, None]
    return allowed


def mask_if_padded(mask: Tensor | None) -> Tensor | None:
    """The mask if anything is padded; without one, attention is faster."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise BraidError(f"attention_mask must be [batch, time], 1 for real tokens; got {mask.ndim} dimensions")
    if not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask


def add_cache_layers(cache: Any, slots: int) -> None:
    """Give each attention a layer of a cache in which transformers made one for each layer of the model. A layer of
    parallel paths has several attentions; caches that grow by themselves need nothing."""
    if getattr(cache, "layer_class_to_replicate", None) is None:
        cache.layers.extend(deepcopy(cache.layers[-1]) for _ in range(slots - len(cache.layers)))
