"""Rows of their own positions for decoders of transformers, where a check on the loaded model says that they are exact.

The model is given a cache of ours, the position of every token, and a mask [row, 1, time, keys].
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from braidlm.core.decoding.rows import RowCache, RowDecoder, RowModel, seen_keys
from braidlm.core.errors import BraidError

SHARED_POSITIONS = ("dynamic", "longrope")
"""Kinds of rotary positions whose wavelengths follow from the longest text of a batch."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""By how much logits may differ, as a share of the largest; in half precision by HALF."""
HALF = 5e-2


class CacheOfRows(DynamicCache):
    """What transformers sees of a cache of rows."""

    def __init__(self, rows: RowCache):
        super().__init__()
        self.rows = rows

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self.rows.update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        return self.rows.filled


class TransformersRows(RowModel):
    """The rows of a decoder of transformers."""

    pads = captures = False

    def __init__(self, model: PreTrainedModel, length: int):
        """Refuses models that rows are not exact for, with the reason."""
        self.model: Any = model.eval()
        self.device, self.dtype = model.device, model.dtype
        self.takes = inspect.signature(model.forward).parameters
        if reason := _reason(model, length, self.takes):
            raise BraidError(reason)
        try:
            self.shapes = self._shapes()
            self._check(length)
        except BraidError:
            raise
        except Exception as error:  # a model's code may do anything with what it does not expect
            what = f"it does not take a cache of rows ({type(error).__name__}: {str(error)[:200]})"
            raise BraidError(what) from error

    @torch.inference_mode()
    def _shapes(self) -> list[tuple[int, int]]:
        """Heads and channels of every layer of the cache that the model makes for itself."""
        past = self.model(input_ids=torch.tensor([[0, 0]], device=self.device), use_cache=True).past_key_values
        layers = [(layer.keys, layer.values) for layer in getattr(past, "layers", ())]
        if not layers or any(keys.shape != values.shape or keys.ndim != 4 for keys, values in layers):
            raise BraidError("it keeps something else than keys and values of one shape")
        return [(keys.shape[1], keys.shape[3]) for keys, _ in layers]

    @torch.inference_mode()
    def _check(self, length: int) -> None:
        """Compare with the model's own passes over two texts, one of which comes later and is longer."""
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        texts = torch.randint(vocabulary, (2, min(9, length)), generator=torch.Generator().manual_seed(0)).tolist()
        decoder, got = RowDecoder(self, 2, length, graphs=False), []
        first, split = decoder.enter(texts[0][:2], length), len(texts[1]) - 3
        decoder.read()
        decoder.feed([first], torch.tensor(texts[0][2:3], device=self.device))
        decoder.step()
        second = decoder.enter(texts[1][:split], length)
        step = decoder.read()
        assert step is not None
        got.append((texts[1][:split], step.logits[0]))
        for at in range(2):
            own = {first: texts[0][3 + at], second: texts[1][split + at]}
            decoder.feed([first, second], torch.tensor(list(own.values()), device=self.device))
            for row, logits in zip((first, second), decoder.step().logits, strict=True):
                whole = texts[0][: 4 + at] if row is first else texts[1][: split + at + 1]
                got.append((whole, logits))
        share = TOLERANCE.get(self.dtype, HALF)
        for ids, logits in got:
            expected = self.model(input_ids=torch.tensor([ids], device=self.device)).logits[0, -1]
            if not bool((logits - expected).abs().amax() <= share * expected.abs().amax()):
                raise BraidError("it gives other numbers in rows of their own positions than alone")

    def cache(self) -> RowCache:
        return RowCache(self.shapes, self.device, self.dtype)

    def logits(self, tokens: Tensor, cache: RowCache, last: Sequence[int] | None) -> Tensor:
        time = tokens.shape[1]
        if cache.positions is None:
            own = torch.arange(cache.filled, cache.filled + time, device=self.device)
            positions, seen = own.expand(len(tokens), -1), seen_keys(own, cache.end).transpose(0, 2)
        else:
            positions, seen = cache.positions[:, None], seen_keys(cache.positions, cache.end)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill(~seen, torch.finfo(self.dtype).min).expand(len(tokens), 1, time, -1)
        options: dict[str, Any] = {}
        if last is not None and "logits_to_keep" in self.takes:
            options["logits_to_keep"] = 1
        options |= {"position_ids": positions, "attention_mask": mask, "past_key_values": CacheOfRows(cache)}
        logits = self.model(input_ids=tokens, use_cache=True, **options).logits
        return logits if last is None else logits[:, -1]  # type: ignore[no-any-return]


def _reason(model: PreTrainedModel, length: int, takes: Any) -> str | None:
    """Why a short check could not see that rows are not exact."""
    config = model.config.get_text_config()
    if "position_ids" not in takes:
        return "its code takes no positions"
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds - {"sliding_attention"} or ((window or kinds) and (not window or window < length)):
        return "its attention sees a window of the text, or is none"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind in SHARED_POSITIONS:
        return "its positions follow from the longest text of a batch"
    return None
