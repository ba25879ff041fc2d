"""A model of ours against its GGUF files in llama.cpp: size, logits and greedy texts, for each type of weights.

Prompts are the first words of stories that no recipe trains on. llama.cpp keeps keys and values in float32 as Braid
does ("exact"), or in half precision, which is its default. Where a text parts from Braid's, the margin is how far
Braid's logits of the two tokens are apart. "loss" is the mean loss over the stories, in nats per token, less Braid's.

python benchmarks/gguf_texts.py MODEL [MODEL ...] [--prompts 40] [--tokens 60]
"""

import argparse
import math
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import torch
import torch.nn.functional as F
from measure import record

from braidlm.bridges.formats.gguf import GgufBridge
from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.data.corpora.builtin import documents
from braidlm.data.tokenizing.build import BraidTokenizer
from braidlm.opening.convert import convert
from braidlm.opening.open import load, open_model

UNSEEN = 1_000_000
"""The number of the first story that is read."""


def prompts_of(tokenizer: BraidTokenizer, stories: list[str]) -> list[list[int]]:
    """The tokens of the first two to nine words of stories."""
    return [tokenizer.encode(" ".join(story.split()[: 2 + number % 8])) for number, story in enumerate(stories)]


def greedy(model: Any, tokenizer: BraidTokenizer, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Braid's own texts, one prompt after another; each ends before the token that ends a text."""
    texts = []
    for prompt in prompts:
        decoder = Decoder(model, 1, len(prompt) + length)
        steps = decode_tokens(decoder, [prompt], length, Sampling(temperature=0), tokenizer.eos_id, 0)
        texts.append([tokens[0] for tokens, _ in steps if tokens[0] not in (None, tokenizer.eos_id)])
    return texts


def their_greedy(theirs: Any, prompt: list[int], length: int) -> list[int]:
    """llama.cpp's text."""
    text: list[int] = []
    for token in islice(theirs.generate(prompt, temp=0.0, repeat_penalty=1.0), length):
        if token == theirs.token_eos():
            break
        text.append(token)
    return text


@torch.no_grad()
def margin(model: Any, prompt: list[int], ours: list[int], theirs: list[int], eos: int) -> float:
    """How far apart Braid's logits of the two tokens are where two texts part."""
    ours, theirs = [*ours, eos], [*theirs, eos]
    at = next(index for index, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    logits = model(torch.tensor([[*prompt, *ours[:at]]])).logits[0, -1]
    return (logits[ours[at]] - logits[theirs[at]]).item()


@torch.no_grad()
def errors(model: Any, theirs: Any, stories: list[list[int]], tokenizer: BraidTokenizer) -> tuple[float, float, float]:
    """Over stories the largest difference of a logit, that of the mean loss, and llama.cpp's bits per byte."""
    largest, losses, total, size = 0.0, [], 0.0, 0
    for ids in stories:
        theirs.reset()
        theirs.eval(ids)
        expected, found = model(torch.tensor([ids])).logits[0], torch.from_numpy(theirs.scores[: len(ids)].copy())
        largest = max(largest, (found - expected).abs().max().item())
        targets = torch.tensor(ids[1:])
        both = [F.cross_entropy(logits[:-1], targets, reduction="sum").item() for logits in (found, expected)]
        losses.append((both[0] - both[1], len(targets)))
        total, size = total + both[0], size + len(tokenizer.decode(ids[1:]).encode())
    differences, tokens = (sum(column) for column in zip(*losses, strict=True))
    return largest, differences / tokens, total / math.log(2) / size


def rows_of(name: str, count: int, length: int) -> list[dict[str, Any]]:
    """A row for each type of weights and of keys and values."""
    model, tokenizer = load(name)
    assert tokenizer.eos_id is not None
    stories = list(documents("stories", seed=7, start=UNSEEN, count=count))
    prompts = prompts_of(tokenizer, stories)
    whole = [tokenizer.encode(story)[: model.config.decoded.context] for story in stories]
    texts = greedy(model, tokenizer, prompts, length)
    rows = []
    for dtype in GgufBridge.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            convert(name, path, to="gguf", dtype=dtype)
            for cache in ("exact", "default"):
                kind = llama_cpp.GGML_TYPE_F32 if cache == "exact" else None
                options: dict[str, Any] = {"type_k": kind, "type_v": kind, "n_threads": 1, "n_threads_batch": 1}
                theirs = llama_cpp.Llama(str(path), n_ctx=0, logits_all=True, verbose=False, **options)
                found = [their_greedy(theirs, prompt, length) for prompt in prompts]
                pairs = [pair for pair in zip(prompts, texts, found, strict=True) if pair[1] != pair[2]]
                margins = [margin(model, *pair, tokenizer.eos_id) for pair in pairs]
                largest, loss, bits = errors(model, theirs, whole, tokenizer)
                rows.append(
                    {
                        "model": open_model(name).title,
                        "dtype": dtype,
                        "keys and values": cache,
                        "MB": path.stat().st_size / 1e6,
                        "largest error of a logit": largest,
                        "loss": loss,
                        "bits per byte": bits,
                        "equal texts": f"{count - len(pairs)} of {count}",
                        "largest margin": max(margins, default=0.0),
                    }
                )
    return rows


def main() -> None:
    """Compare and write a dated result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [row for name in args.models for row in rows_of(name, args.prompts, args.tokens)]
    record("gguf_texts", torch.device("cpu"), rows, args.out)


if __name__ == "__main__":
    main()
