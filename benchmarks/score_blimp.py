"""Scoring minimal pairs: Braid's scorer against the plain way, on the same random model and sentences, in one run.

The plain way is that of most pipelines: sentences in their order, filled up to batches of 64, the logits of all tokens.

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
from braidlm.evals.formats.minimal_pairs import Pair, pairs_from_divergence, read_pairs
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Request, sentence_requests
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
        chances = out.logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        sums.append((chances * real[:, 1:]).sum(-1).cpu())
    return torch.cat(sums).double().numpy()


def by_pair(sums: np.ndarray) -> np.ndarray:
    """How much more probable each good sentence is."""
    return sums[0::2] - sums[1::2]


def sentences(pairs: list[Pair], most: int | None) -> list[str]:
    """Of the first pairs of each set."""
    seen: dict[str, int] = {}
    found = []
    for pair in pairs:
        seen[pair.of] = seen.get(pair.of, 0) + 1
        if most is None or seen[pair.of] <= most:
            found += [pair.good, pair.bad]
    return found


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
    texts = sentences(read_pairs(args.data).pairs, args.pairs)
    tokenizer = (
        load_tokenizer(args.tokenizer)
        if args.tokenizer
        else BraidTokenizer(train_bpe(texts, VOCABULARY), SpecialTokens())
    )
    requests = sentence_requests(tokenizer, texts)
    parting = pairs_from_divergence(requests)
    torch.manual_seed(0)
    ours = braid_model("gpt2", args.size, 512).to(device).eval()
    peer = peer_model("gpt2", args.size, 512).to(device).eval()
    shared, apart = Scorer(ours), Scorer(ours, share=False)
    works: dict[str, Callable[[], np.ndarray]] = {
        "braid scorer": lambda: by_pair(shared.score(parting).sums),
        "braid scorer, prefixes not shared": lambda: by_pair(apart.score(parting).sums),
        "plain, braid model": lambda: by_pair(plain_sums(ours, requests, device)),
        "plain, transformers model": lambda: by_pair(plain_sums(peer, requests, device)),
    }
    times = compared_seconds(works, calls=1, warmup=1, device=device, rounds=args.rounds)
    expected = works["plain, braid model"]()
    rows = []
    for name, seconds in times.items():
        found = works[name]() if "transformers" not in name else expected  # another model: nothing to compare
        rows.append(
            {
                "what": name,
                "sentences": len(requests),
                "tokens": sum(len(request.ids) for request in requests),
                "computed": PrefixTrees(parting, "not" not in name).places if "scorer" in name else None,
                "seconds": seconds,
                "ratio_to_plain": times["plain, braid model"] / seconds,
                "largest_difference": float(np.abs(found - expected).max()),
                "items_decided_otherwise": int(((found >= 0) != (expected >= 0)).sum()),
            }
        )
    record("score_blimp", device, rows, args.out)


if __name__ == "__main__":
    main()
