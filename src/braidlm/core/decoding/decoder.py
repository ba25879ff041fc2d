"""Our own decoding loop: a cache of fixed size, no work that a step does not need, a replayed graph on CUDA."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from braidlm.core.devices import check_memory
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Count, CountOrZero, Probability, Seed, Temperature
from braidlm.model.config.strict import decode
from braidlm.model.language_model import LanguageModel
from braidlm.model.span import Masks

SMALLEST = torch.finfo(torch.float32).tiny


@dataclass
class Sampling:
    """How the next token is chosen from its probabilities."""

    temperature: Temperature = 1.0
    """0 takes the most probable token."""
    top_k: Count | None = None
    """Only the k most probable tokens."""
    top_p: Probability | None = None
    """Only the most probable tokens that together have this much probability."""
    seed: Seed | None = None
    """The same seed gives the same text."""
    never: tuple[CountOrZero, ...] = ()
    """Tokens that are not chosen, whatever their probability."""

    def __post_init__(self) -> None:
        decode(Sampling, self)

    def probabilities(self, logits: Tensor) -> Tensor:
        """[batch, vocabulary] probabilities after temperature and cuts."""
        logits = self.allowed(logits)
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        # The largest becomes 0 first, so that a small temperature makes no infinity of it.
        scaled = (logits.float() - logits.float().amax(-1, keepdim=True)) / max(self.temperature, SMALLEST)
        if self.top_k is not None:
            worst = scaled.topk(min(self.top_k, scaled.shape[-1])).values[..., -1:]
            scaled = scaled.masked_fill(scaled < worst, -torch.inf)
        probabilities = scaled.softmax(-1)
        if self.top_p is not None:
            ranked, order = probabilities.sort(descending=True)
            beyond = ranked.cumsum(-1) - ranked >= self.top_p
            probabilities = probabilities.scatter(-1, order, ranked.masked_fill(beyond, 0.0))
        return probabilities / probabilities.sum(-1, keepdim=True)

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """[batch] token ids."""
        if self.temperature == 0:
            return self.allowed(logits).argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator)[:, 0]

    def allowed(self, logits: Tensor) -> Tensor:
        """Logits that are minus infinity for tokens that are never chosen."""
        if not self.never:
            return logits
        return logits.index_fill(-1, torch.tensor(self.never, device=logits.device), -torch.inf)

    def generator(self, device: torch.device) -> torch.Generator | None:
        """The random numbers of the seed, if there is one."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)


class FixedCache:
    """Storage for every layer, [batch, head, length, dim], filled from the front.

    Eagerly it returns the filled part as a view. For graph replay (`replaying`), where a Python number would be fixed
    in the graph, the write position is a tensor, the whole storage is returned, and the mask hides the rest.
    """

    def __init__(
        self, shapes: list[tuple[int, int]], batch: int, length: int, device: torch.device, dtype: torch.dtype
    ):
        self.keys = [torch.zeros(batch, heads, length, dim, device=device, dtype=dtype) for heads, dim in shapes]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.length = length
        self.filled = 0
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.replaying = False

    def get_seq_length(self) -> int:
        return self.filled

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[slot], self.values[slot]
        if self.replaying:
            keys.index_copy_(2, self.position, key.to(keys.dtype))
            values.index_copy_(2, self.position, value.to(values.dtype))
            return keys, values
        end = self.filled + key.shape[2]
        keys[:, :, self.filled : end] = key
        values[:, :, self.filled : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count tokens whose keys and values every layer has stored."""
        self.filled += tokens
        self.position += tokens

    def rewind(self, filled: int) -> None:
        """Forget the tokens after the first `filled`."""
        self.filled = filled
        self.position.fill_(filled)


class TokenDecoder(ABC):
    """What continues texts token by token."""

    device: torch.device
    length: int
    """The most tokens of a text."""

    @property
    @abstractmethod
    def filled(self) -> int:
        """The tokens whose keys and values are stored, padding included."""

    @property
    def mean_layer(self) -> float | None:
        """The layer that tokens were chosen after, on average; None for the last."""
        return None

    @property
    def accepted_share(self) -> float | None:
        """The share of drafted tokens that were accepted; None where none are drafted."""
        return None

    @abstractmethod
    def prefill(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Start anew with prompts [batch, time], padded on the left where `mask` is 0; gives the next logits."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Logits [batch, vocabulary] after one more token of each text."""

    def check_prompts(self, ids: Tensor) -> None:
        """Refuse prompts that leave no room for another token."""
        if ids.shape[1] >= self.length:
            what = f"the prompt has {ids.shape[1]} tokens, and the model's limit is {self.length}"
            raise BraidError(what, todo="Shorten the prompt.")


class Decoder(TokenDecoder):
    """Decodes `batch` texts of at most `length` tokens with one model; reusable, its graph is captured once."""

    def __init__(self, model: LanguageModel, batch: int, length: int, graph: bool | None = None):
        limit = model.model.positions.limit
        self.model = model.eval()
        self.length = length if limit is None else min(length, limit)
        parameter = next(p for p in model.parameters() if p.is_floating_point())  # codes have not the stream's type
        shapes = model.model.cache_shapes
        cached = sum(2 * heads * dim for heads, dim in shapes) * batch * self.length * parameter.element_size()
        check_memory(cached, parameter.device, "keys and values need", "Ask for fewer tokens, or fewer texts at once.")
        self.cache = FixedCache(shapes, batch, self.length, parameter.device, parameter.dtype)
        self.device = parameter.device
        self.real = torch.ones(batch, self.length, dtype=torch.bool, device=self.device)
        self.padded = False
        self.padding = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self.use_graph = self.device.type == "cuda" if graph is None else graph
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graph_token = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self.graph_logits: Tensor | None = None

    @property
    def filled(self) -> int:
        return self.cache.filled

    @property
    def mean_layer(self) -> float | None:
        return self.model.model.exit_layer

    @torch.inference_mode()
    def prefill(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        if ids.shape[1] == 0 or (mask is not None and not bool(mask.any(-1).all())):
            raise BraidError("a prompt has no tokens", todo="Give some text, or let the text begin with EOS.")
        self.check_prompts(ids)
        self.cache.rewind(0)
        self.real.fill_(True)
        self.padded = mask is not None and not bool(mask.all())
        if mask is not None:
            self.real[:, : mask.shape[1]] = mask.bool()
        self.padding.copy_((~self.real).sum(-1, keepdim=True))
        return self._eager(ids)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        if self.cache.filled >= self.length:
            raise BraidError(f"the text has reached the model's limit of {self.length} tokens")
        return self._replay(tokens[:, None]) if self.use_graph else self._eager(tokens[:, None])

    def _eager(self, ids: Tensor) -> Tensor:
        logits = self._last_logits(ids, **self.span_options(ids.shape[1]))
        self.cache.advance(ids.shape[1])
        return logits

    def span_options(self, time: int) -> dict[str, Any]:
        """The options of the span of a pass over the `time` tokens that follow those in the cache."""
        padding = self.real[:, : self.cache.filled + time] if self.padded else None
        return {"attention_mask": padding, "cache": self.cache}

    def _last_logits(self, ids: Tensor, **options: Any) -> Tensor:
        done = self.model.run(ids, **options).at((slice(None), -1))
        return self.model.head(done.hidden, **done.read)

    def _replay(self, ids: Tensor) -> Tensor:
        self.graph_token.copy_(ids)
        if self.graph is None:  # the writes land at the current position, which the first replay writes again
            self.cache.replaying = True
            self.graph, self.graph_logits = capture(self._fixed_step)
            self.cache.replaying = False
        assert self.graph is not None
        assert self.graph_logits is not None
        self.graph.replay()
        self.cache.advance(1)
        return self.graph_logits

    def _fixed_step(self) -> Tensor:
        """One step in which every shape is fixed and the position is data."""
        body, position = self.model.model, self.cache.position
        key = torch.arange(self.length, device=self.device)
        masks: Masks = {}
        for window in body.windows:
            allowed = key <= position
            if window is not None:
                allowed = allowed & (key > position - window)
            masks[window] = (allowed & self.real)[:, None, None]
        positions = position[None] - self.padding
        return self._last_logits(self.graph_token, position_ids=positions, masks=masks, cache=self.cache)


def capture(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A step as a graph, and the tensor that each replay writes its result to."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # kernels choose themselves on the first calls, which a capture must not contain
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


class OpenTexts:
    """Which texts of a batch still go on."""

    def __init__(self, count: int, eos_id: int | None):
        self.open, self.eos_id = [True] * count, eos_id

    def add(self, chosen: Tensor) -> list[int | None]:
        """Every text's new token, None once it has ended."""
        tokens = [token if alive else None for token, alive in zip(chosen.tolist(), self.open, strict=True)]
        self.open = [alive and token != self.eos_id for token, alive in zip(tokens, self.open, strict=True)]
        return tokens


def check_numbers(logits: Tensor) -> Tensor:
    """Logits that tokens can be chosen from."""
    if bool(logits.isnan().any()):
        raise no_numbers()
    return logits


def no_numbers() -> BraidError:
    """The error of a text whose next token cannot be chosen."""
    todo = "Its weights are damaged or too large for their type; `braid show` says which are not finite."
    return BraidError("the model's logits are not numbers (NaN), so that there is no next token", todo=todo)


def padded_prompts(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [batch, time], padded on the left, and the mask that is 0 there."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_id] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def decode_tokens(
    decoder: TokenDecoder,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    eos_id: int | None = None,
    pad_id: int = 0,
) -> Iterator[tuple[list[int | None], Tensor]]:
    """Continue prompts: at each step every text's new token (None once it has ended) and the logits it came from."""
    generator, texts = sampling.generator(decoder.device), OpenTexts(len(prompts), eos_id)
    logits = decoder.prefill(*padded_prompts(prompts, pad_id, decoder.device))
    for index in range(max_new_tokens):
        chosen = sampling.choose(check_numbers(logits), generator)
        yield texts.add(chosen), logits
        if not any(texts.open) or index + 1 == max_new_tokens or decoder.filled >= decoder.length:
            return
        logits = decoder.step(chosen)
