"""Text that a model writes after prompts: in batches, up to stop strings, with Braid's decoder or transformers' own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from braidlm.core.generation import TextStream
from braidlm.evals.contestant import Contestant
from braidlm.evals.scorer import Advance, full_products
from braidlm.model.decoding import Decoder, Sampling, decode_tokens
from braidlm.model.modeling_braid import BraidForCausalLM

AT_ONCE = {"cpu": 16, "cuda": 256}
"""Texts that are written together."""


def continuations(
    model: Contestant,
    prompts: Sequence[Sequence[int]],
    most: int,
    stops: Sequence[str] = (),
    sampling: Sampling | None = None,
    advance: Advance | None = None,
) -> list[str]:
    """What follows each prompt (of token ids), at most `most` tokens, without the stop string that ended it.

    A prompt that leaves no room loses its beginning; new tokens get at most half of what the model can read. Without
    `sampling` the most probable token is taken.
    """
    context = model.scorer.context
    if context is not None:
        most = min(most, max(1, context // 2))
        prompts = [prompt[-(context - most) :] for prompt in prompts]
    found = [""] * len(prompts)
    # Texts of like length run together, the longest first, so that little is filled up.
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), list(prompts[index])))
    size = AT_ONCE.get(model.device.type, AT_ONCE["cpu"])
    for at in range(0, len(order), size):
        some = order[at : at + size]
        texts = _written(model, [list(prompts[index]) for index in some], most, stops, sampling or Sampling(0.0))
        for index, text in zip(some, texts, strict=True):
            found[index] = cut(text, stops)
        if advance is not None:
            advance(min(at + size, len(order)), len(order))
    return found


def cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first stop string."""
    return text[: min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=len(text))]


def _written(
    model: Contestant, prompts: list[list[int]], most: int, stops: Sequence[str], sampling: Sampling
) -> list[str]:
    write = _by_braid if isinstance(model.model, BraidForCausalLM) else _by_transformers
    with full_products():
        return write(model, prompts, most, stops, sampling)


def _by_braid(
    model: Contestant, prompts: list[list[int]], most: int, stops: Sequence[str], sampling: Sampling
) -> list[str]:
    tokenizer, eos = model.tokenizer, model.tokenizer.eos_id
    decoder = Decoder(model.model, len(prompts), max(map(len, prompts)) + most)
    streams = [TextStream(tokenizer, prompt) for prompt in prompts]
    texts, running = [""] * len(prompts), set(range(len(prompts)))
    for tokens, _ in decode_tokens(decoder, prompts, most, sampling, eos, tokenizer.pad_id or 0):
        for index, token in enumerate(tokens):
            if index in running and token is not None and token != eos:
                texts[index] += streams[index].add(token)
            if token == eos or _stopped(texts[index], stops):
                running.discard(index)
        if not running:
            break
    return [text + stream.finish() for text, stream in zip(texts, streams, strict=True)]


def _by_transformers(
    model: Contestant, prompts: list[list[int]], most: int, stops: Sequence[str], sampling: Sampling
) -> list[str]:
    tokenizer, eos = model.tokenizer, model.tokenizer.eos_id
    pad = tokenizer.pad_id if tokenizer.pad_id is not None else eos or 0
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)

    def written(rows: Tensor) -> list[str]:
        return [tokenizer.decode(_before(row, eos), skip_special_tokens=True) for row in rows[:, longest:].tolist()]

    def ended(rows: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([_stopped(text, stops) for text in written(rows)], device=rows.device)

    with torch.random.fork_rng(enabled=sampling.seed is not None), torch.inference_mode():
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        rows = model.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=most,
            eos_token_id=eos,
            pad_token_id=pad,
            stopping_criteria=[ended],
            **_choosing(sampling),
        )
    return written(rows)


def _choosing(sampling: Sampling) -> dict[str, Any]:
    if sampling.temperature == 0:
        return {"do_sample": False}
    # 0 and 1 cut nothing; what a model's generation_config.json says does not count.
    cuts = {"top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
    return {"do_sample": True, "temperature": sampling.temperature, **cuts}


def _before(ids: list[int], eos: int | None) -> list[int]:
    return ids[: ids.index(eos)] if eos in ids else ids


def _stopped(text: str, stops: Sequence[str]) -> bool:
    return any(stop and stop in text for stop in stops)
