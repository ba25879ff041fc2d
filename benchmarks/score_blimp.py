"""Scoring minimal pairs: Braid's scorer against the plain method, on the same random model and sentences, in one run.

The plain method is that of most pipelines: sentences in their order, padded batches of 64, the logits of all tokens.

python benchmarks/score_blimp.py DATA [--device cuda] [--pairs 20] [--tokenizer FILE]
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import compared_seconds, record
from shapes import VOCABULARY, braid_model, peer_model

from braidlm.data.tokenizing.build import load_tokenizer, train_bpe
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens
from braidlm.evals.formats.options import Item, read_pairs
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Request, consecutive_ranges, from_divergence, requests_for
from braidlm.evals.scoring.scorer import Scorer

BATCH = 64


@torch.inference_mode()
def plain_sums(model: torch.nn.Module, requests: list[Request], device: torch.device) -> np.ndarray:
    """Batches of 64 in the order of the file."""
    sums = []
    for at in range(0, len(requests), BATCH):
        rows = [list(request.ids) for request in requests[at : at + BATCH]]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        real = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
        out = model(input_ids=ids[:, :-1], attention_mask=real[:, :-1], use_cache=False)
        log_probabilities = out.logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        sums.append((log_probabilities * real[:, 1:]).sum(-1).cpu())
    return torch.cat(sums).double().numpy()


def by_pair(sums: np.ndarray) -> np.ndarray:
    """By how many nats each good sentence is more probable."""
    return sums[0::2] - sums[1::2]


def sentences(pairs: list[Item], max_pairs: int | None) -> list[str]:
    """The sentences of the first pairs of each set."""
    counts: dict[str, int] = {}
    texts = []
    for pair in pairs:
        counts[pair.of] = counts.get(pair.of, 0) + 1
        if max_pairs is None or counts[pair.of] <= max_pairs:
            texts += pair.answers
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a folder of BLiMP's .jsonl files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="28m")
    parser.add_argument("--pairs", type=int, help="of each set (all)")
    parser.add_argument("--tokenizer", help="by default one is trained on the sentences")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    texts = sentences(read_pairs(args.data).items, args.pairs)
    tokenizer = (
        load_tokenizer(args.tokenizer)
        if args.tokenizer
        else BraidTokenizer(train_bpe(texts, VOCABULARY), SpecialTokens())
    )
    requests = requests_for(tokenizer, [("", text) for text in texts])
    diverging = from_divergence(requests, consecutive_ranges([2] * (len(requests) // 2)))
    torch.manual_seed(0)
    ours = braid_model("gpt2", args.size, 512).to(device).eval()
    peer = peer_model("gpt2", args.size, 512).to(device).eval()
    shared, apart = Scorer(ours), Scorer(ours, share=False)
    works: dict[str, Callable[[], np.ndarray]] = {
        "braid scorer": lambda: by_pair(shared.score(diverging).sums),
        "braid scorer, prefixes not shared": lambda: by_pair(apart.score(diverging).sums),
        "plain, braid model": lambda: by_pair(plain_sums(ours, requests, device)),
        "plain, transformers model": lambda: by_pair(plain_sums(peer, requests, device)),
    }
    times = compared_seconds(works, calls=1, warmup=1, device=device, rounds=args.rounds)
    expected = works["plain, braid model"]()
    rows = []
    for name, seconds in times.items():
        differences = works[name]() if "transformers" not in name else expected  # another model: nothing to compare
        rows.append(
            {
                "what": name,
                "sentences": len(requests),
                "tokens": sum(len(request.ids) for request in requests),
                "computed": PrefixTrees(diverging, "not" not in name).nodes if "scorer" in name else None,
                "seconds": seconds,
                "ratio_to_plain": times["plain, braid model"] / seconds,
                "largest_difference": float(np.abs(differences - expected).max()),
                "items_decided_otherwise": int(((differences >= 0) != (expected >= 0)).sum()),
            }
        )
    record("score_blimp", device, rows, args.out)


if __name__ == "__main__":
    main()
