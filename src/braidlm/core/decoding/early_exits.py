"""Early exits in generation: tokens that leave before the last layer, and self-speculative decoding (LayerSkip).

In the latter the first layers draft tokens, and the others verify them in one pass. The text is the whole model's. With
a temperature it has exactly the model's distribution (Leviathan et al. 2023). Without one it is, token by token, what
`decode_tokens` gives: a pass over several tokens rounds differently from single steps, so where the two best tokens are
closer than rounding can explain, the text so far is decoded again step by step. In half precision rounding explains
every difference, and the verifying pass decides.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from braidlm.core.decoding.decoder import Decoder, OpenTexts, Sampling, check_numbers, padded_prompts
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Choices, Layers, Probability
from braidlm.model.config.strict import decode
from braidlm.model.language_model import LanguageModel
from braidlm.model.layer_skip import check_exit, exit_layers, run_layers

ROUNDING = 64
"""Logits of the two ways differ by less than half of so many roundings of the largest; a test measures it."""


class SpeculativeDecoder(Decoder):
    """Drafts with the layers up to `layer`, whose keys and values are exact: the verifying pass begins after it."""

    def __init__(self, model: LanguageModel, batch: int, length: int, layer: int, drafts: int):
        super().__init__(model, batch, length)
        self.layer, self.drafts = layer, drafts
        self.drafted = self.accepted = 0
        """How many tokens were drafted, and how many of them the whole model agreed with."""

    @torch.inference_mode()
    def propose(
        self, token: Tensor, count: int, sampling: Sampling, generator: torch.Generator | None
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """After `token`: drafts [batch] of `count - 1` tokens and the logits of each, and the whole model's logits
        [batch, count, vocabulary] after `token` and after every draft.

        The cache has all of them then; whoever rejects some rewinds it.
        """
        body, start = self.model.model, self.cache.filled
        drafts, predictions, states = [token], [], []
        for index in range(count):
            embedded = body.embedding(drafts[-1][:, None])
            span = body.span(embedded, **self.span_options(1))
            hidden, _ = run_layers(body.stages, body.enter(embedded, span), span, last=self.layer)
            self.cache.advance(1)
            states.append(hidden)
            if index + 1 < count:
                predictions.append(self.model.head(body.norm(hidden[:, 0])))
                drafts.append(sampling.choose(predictions[-1], generator))
        self.cache.rewind(start)
        drafted = torch.cat(states, dim=1)
        span = body.span(drafted, **self.span_options(count))
        hidden, _ = run_layers(body.stages, drafted, span, first=self.layer)
        self.cache.advance(count)
        return drafts[1:], predictions, self.model.head(body.norm(hidden))

    @property
    def accepted_share(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


def decode_speculatively(
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    eos_id: int | None = None,
    pad_id: int = 0,
) -> Iterator[tuple[list[int | None], Tensor]]:
    """What `decode_tokens` gives; several texts go on together, as far as the drafts of all are accepted."""
    generator, texts = sampling.generator(decoder.device), OpenTexts(len(prompts), eos_id)
    ids, mask = padded_prompts(prompts, pad_id, decoder.device)
    logits = check_numbers(decoder.prefill(ids, mask))
    tokens = [sampling.choose(logits, generator)]
    yield texts.add(tokens[-1]), logits
    while any(texts.open) and len(tokens) < max_new_tokens and decoder.cache.filled < decoder.length:
        start = decoder.cache.filled
        count = min(decoder.drafts + 1, max_new_tokens - len(tokens), decoder.length - start)
        drafts, predictions, verified = decoder.propose(tokens[-1], count, sampling, generator)
        decoder.drafted += count - 1
        open_texts = torch.tensor(texts.open, device=decoder.device)
        doubtful = (_near_ties(sampling, verified) & open_texts[:, None]).any(0).tolist()
        for index, logits in enumerate(check_numbers(verified).unbind(1)):
            agreed = torch.zeros_like(open_texts)
            if doubtful[index]:
                logits = decoder.prefill(ids, mask)  # as the plain decoder computes them, step by step
                for earlier in tokens:
                    logits = decoder.step(earlier)
            if doubtful[index] or index + 1 == count:
                token = sampling.choose(logits, generator)
            else:
                token, agreed = settle(sampling, logits, drafts[index], predictions[index], generator)
            tokens.append(token)
            yield texts.add(token), logits
            if not any(texts.open) or not bool((agreed | ~open_texts).all()):
                break
            decoder.accepted += 1
        decoder.cache.rewind(start + index + 1)


def settle(
    sampling: Sampling, logits: Tensor, draft: Tensor, prediction: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """A token [batch] as if sampled from logits [batch, vocabulary], and where it is the accepted draft.

    The draft was sampled from `prediction`. It is accepted with the ratio of the two probabilities; otherwise the token
    is sampled from what the first has more than the second.
    """
    if sampling.temperature == 0:
        token = sampling.choose(logits, generator)
        return token, token == draft
    wanted, drafted = sampling.probabilities(logits), sampling.probabilities(prediction)
    at = draft[:, None]
    chance = torch.rand(at.shape, generator=generator, device=at.device)
    accepted = (chance * drafted.gather(1, at) < wanted.gather(1, at))[:, 0]
    rest = (wanted - drafted).clamp_min(0)
    # Where both are the same, rounding may leave nothing: the draft is accepted then.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, wanted)
    return torch.where(accepted, draft, torch.multinomial(rest, 1, generator=generator)[:, 0]), accepted


def _near_ties(sampling: Sampling, logits: Tensor) -> Tensor:
    """[...]: where rounding may decide which of logits [..., vocabulary] is the largest, and the largest is chosen."""
    exact = logits.dtype in (torch.float32, torch.float64)
    if sampling.temperature > 0 or not exact or logits.shape[-1] < 2:
        return torch.zeros_like(logits[..., 0], dtype=torch.bool)
    best = sampling.allowed(logits).topk(2).values
    return best[..., 0] - best[..., 1] < ROUNDING * torch.finfo(logits.dtype).eps * logits.abs().amax(-1)


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
            what = "tokens either leave early when the model is sure, or are drafts that the whole model verifies"
            raise BraidError(what, todo="Give a confidence, or a number of tokens to speculate on.")

    def check(self, model: LanguageModel) -> None:
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
            what = "only a layer before the last can draft tokens or be left early"
            raise BraidError(what, todo=f"Such layers of this model: {', '.join(map(str, early)) or 'none'}.")

    def prepare(self, model: LanguageModel) -> None:
        """Check, and let the passes of a model end after `layer` if nothing else is asked for."""
        self.check(model)
        if self.layer is not None and self.speculate is None and self.confidence is None:
            leave_after(model, self.layer)

    def decoder(self, model: LanguageModel, batch: int, length: int) -> Decoder:
        """The decoder for `batch` texts of at most `length` tokens of a model that is prepared."""
        if self.speculate is not None:
            return SpeculativeDecoder(model, batch, length, self.layer or drafting_layer(model), self.speculate)
        if self.confidence is not None:
            layers = early_layers(model) if self.layer is None else [self.layer]
            return ConfidentDecoder(model, batch, length, layers, self.confidence)
        return Decoder(model, batch, length)


def early_layers(model: LanguageModel) -> list[int]:
    """The layers before the last after which the model can be left."""
    depth = model.config.decoded.depth
    return [layer for layer in exit_layers(model.model.stages, model.model.width_out) if layer < depth]


def drafting_layer(model: LanguageModel) -> int:
    """The layer that drafts are made by if nobody says which: about one in four of all."""
    return min(early_layers(model), key=lambda layer: abs(layer * 4 - model.config.decoded.depth))


def leave_after(model: LanguageModel, layer: int) -> None:
    """Let every pass of a model end after a layer: the last norm and the head read the stream there."""
    check_exit(model.model.stages, model.model.width_out, layer)
    model.config.num_hidden_layers = layer


class ConfidentDecoder(Decoder):
    """A token leaves after the first of some layers at which the next token of every text is this probable.

    The layers that it skipped are run on it later, together with its successors, once one of them goes deeper. So all
    keys and values are those of full passes, and the exits are the only difference.
    """

    def __init__(self, model: LanguageModel, batch: int, length: int, layers: list[int], confidence: float):
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
            if last is None or bool((logits.float().softmax(-1).amax(-1) >= self.confidence).all()):
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
