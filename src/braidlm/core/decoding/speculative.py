"""Self-speculative decoding (LayerSkip): the first layers draft tokens, the others verify them in one pass.

The text is that of the whole model. With a temperature it has exactly the model's distribution (Leviathan et al. 2023).
Without one it is, token by token, what `decode_tokens` gives: a pass over several tokens rounds differently from single
steps, so where the two best tokens are closer than rounding can explain, the text so far is decoded again step by step.
In half precision rounding explains every difference, and the verifying pass decides.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from braidlm.core.decoding.decoder import Decoder, OpenTexts, Sampling, check_numbers, padded_prompts
from braidlm.model.layer_skip import run_layers
from braidlm.model.modeling_braid import BraidForCausalLM

ROUNDING = 64
"""Logits of the two ways differ by less than half of so many roundings of the largest; a test measures it."""


class SpeculativeDecoder(Decoder):
    """Drafts with the layers up to `layer`, whose keys and values are exact: the verifying pass begins after it."""

    def __init__(self, model: BraidForCausalLM, batch: int, length: int, layer: int, drafts: int):
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

    def decode_again(self, ids: Tensor, mask: Tensor, tokens: list[Tensor]) -> Tensor:
        """The logits after prompts and tokens as the plain decoder computes them, step by step."""
        logits = self.prefill(ids, mask)
        for token in tokens:
            logits = self.step(token)
        return logits


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
                logits = decoder.decode_again(ids, mask, tokens)
                token = sampling.choose(logits, generator)
            elif index + 1 == count:
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
