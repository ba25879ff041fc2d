"""Early exits in generation: tokens that leave the model before its last layer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from braidlm.core.decoding.decoder import Decoder, TokenDecoder, decode_tokens
from braidlm.core.decoding.speculative import SpeculativeDecoder, decode_speculatively
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Choices, Layers, Probability
from braidlm.model.config.strict import decode
from braidlm.model.layer_skip import check_exit, exit_layers, run_layers
from braidlm.model.modeling_braid import BraidForCausalLM

DRAFTING_SHARE = 4
"""Without a word from the user, drafts are made by about one in so many layers."""


@dataclass
class EarlyExit:
    """How tokens leave a model before its last layer."""

    layer: Layers | None = None
    """After this layer, counted from 1 over all stages."""
    confidence: Probability | None = None
    """Only once the most probable token has this probability: after `layer`, or else after any layer."""
    speculate: Choices | None = None
    """Draft this many tokens by the layers up to `layer`, and verify them by the others in one pass: the text is the
    whole model's, sooner."""

    def __post_init__(self) -> None:
        decode(EarlyExit, self)
        if self.confidence is not None and self.speculate is not None:
            raise BraidError(
                "tokens either leave early when the model is sure, or are drafts that the whole model verifies",
                todo="Give a confidence, or a number of tokens to speculate on.",
            )

    def check(self, model: BraidForCausalLM) -> None:
        """Refuse a layer that the model cannot be left after."""
        if self.layer is not None:
            check_exit(model.model.stages, model.model.width_out, self.layer)
        if self.speculate is None and self.confidence is None:
            return
        if model.model.head_slots:
            raise BraidError(
                "the head weighs its paths by what each has said of every token, and a token that ends early was said "
                "little of",
                todo="Choose no exit, or compose the models with --join average.",
            )
        early = early_layers(model)
        if not early or self.layer == model.config.decoded.depth:
            raise BraidError(
                "only a layer before the last can draft tokens or be left early",
                todo=f"Such layers of this model: {', '.join(map(str, early)) or 'none'}.",
            )

    def prepare(self, model: BraidForCausalLM) -> None:
        """Check, and let the passes of a model end after `layer` if nothing else is asked for."""
        self.check(model)
        if self.layer is not None and self.speculate is None and self.confidence is None:
            leave_after(model, self.layer)

    def decoder(self, model: BraidForCausalLM, batch: int, length: int) -> Decoder:
        """For `batch` texts of at most `length` tokens of a model that is prepared."""
        if self.speculate is not None:
            return SpeculativeDecoder(model, batch, length, self.layer or drafting_layer(model), self.speculate)
        if self.confidence is not None:
            layers = early_layers(model) if self.layer is None else [self.layer]
            return ConfidentDecoder(model, batch, length, layers, self.confidence)
        return Decoder(model, batch, length)


def early_layers(model: BraidForCausalLM) -> list[int]:
    """The layers before the last after which the model can be left."""
    depth = model.config.decoded.depth
    return [layer for layer in exit_layers(model.model.stages, model.model.width_out) if layer < depth]


def drafting_layer(model: BraidForCausalLM) -> int:
    """The layer that drafts are made by if nobody says which."""
    return min(early_layers(model), key=lambda layer: abs(layer * DRAFTING_SHARE - model.config.decoded.depth))


def leave_after(model: BraidForCausalLM, layer: int) -> None:
    """Let every pass of a model end after a layer: the last norm and the head read the stream there."""
    check_exit(model.model.stages, model.model.width_out, layer)
    model.config.num_hidden_layers = layer


def decoding_loop(decoder: TokenDecoder) -> Callable[..., Iterator[tuple[list[int | None], Tensor]]]:
    """The loop of a decoder: `decode_tokens` of it, or what gives the same sooner."""
    if isinstance(decoder, SpeculativeDecoder):
        return partial(decode_speculatively, decoder)
    return partial(decode_tokens, decoder)


class ConfidentDecoder(Decoder):
    """A token leaves after the first of some layers at which the next token of every text is this probable.

    The layers that it skipped are run on it later, together with its successors, once one of them goes deeper. So all
    keys and values are those of full passes, and the exits are the only difference.
    """

    def __init__(self, model: BraidForCausalLM, batch: int, length: int, layers: list[int], confidence: float):
        super().__init__(model, batch, length, graph=False)
        self.confidence = confidence
        self.segments = list(zip([0, *layers], [*layers, None], strict=True))
        """The layers between two exits: from and to."""
        self.waiting: list[Tensor | None] = []
        """For each segment the stream of the last tokens, which have not gone through it yet."""
        self.left_after: list[int] = []
        """The layer that each token was chosen after."""

    def prefill(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        self.waiting, self.left_after = [None] * len(self.segments), []
        return super().prefill(ids, mask)

    def _eager(self, ids: Tensor) -> Tensor:
        body, total = self.model.model, self.cache.filled + ids.shape[1]
        hidden = body.embedding(ids)
        for index, (first, last) in enumerate(self.segments):
            before = self.waiting[index]
            hidden = hidden if before is None else torch.cat((before, hidden), dim=1)
            self.waiting[index] = None
            self.cache.rewind(total - hidden.shape[1])
            span = body.span(hidden, **self.span_options(hidden.shape[1]))
            hidden, _ = run_layers(body.stages, hidden if first else body.enter(hidden, span), span, first, last)
            logits = self.model.head(body.norm(hidden[:, -1]))
            if last is None or self._is_confident(logits):
                break
        if last is not None:
            later = self.waiting[index + 1]
            self.waiting[index + 1] = hidden if later is None else torch.cat((later, hidden), dim=1)
        self.left_after.append(last or self.model.config.decoded.depth)
        self.cache.rewind(total)
        return logits

    @property
    def mean_layer(self) -> float | None:
        return sum(self.left_after) / len(self.left_after)

    def _is_confident(self, logits: Tensor) -> bool:
        return bool((logits.float().softmax(-1).amax(-1) >= self.confidence).all())
