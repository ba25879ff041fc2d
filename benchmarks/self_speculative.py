"""Self-speculative decoding against plain decoding of the same trained model, in one run: the same text, sooner?

python benchmarks/self_speculative.py MODEL [--layers 2 3 4] [--drafts 4 6 8] [--prompts 100]

A few prompts choose layer and number of drafts; then every prompt is decoded both ways, in turns, and the texts are
compared. On a machine that does other work too, the ratio of processor time says more than that of the clock.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from measure import record

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.decoding.early_exits import SpeculativeDecoder, decode_speculatively
from braidlm.core.devices import choose_device
from braidlm.data.corpora.builtin import documents
from braidlm.opening.open import open_model

GREEDY = Sampling(temperature=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--drafts", nargs="+", type=int, default=[4, 6, 8])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--calibration", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    opened, device = open_model(args.model), torch.device(choose_device(args.device))
    model, length = opened.load(device), args.prompt_tokens + args.tokens
    texts = documents("stories", seed=12345, count=args.prompts + args.calibration)
    prompts = [opened.tokenizer.encode(text)[: args.prompt_tokens] for text in texts]
    first, prompts = prompts[: args.calibration], prompts[args.calibration :]
    plain = Decoder(model, 1, length)
    rows, best = [], (0.0, 0, 0)
    for layer in args.layers:
        for drafts in args.drafts:
            row = _compare(plain, SpeculativeDecoder(model, 1, length, layer, drafts), first, args.tokens)
            rows.append(row)
            best = max(best, (row["ratio_cpu"], layer, drafts))
    _, layer, drafts = best
    rows.append(_compare(plain, SpeculativeDecoder(model, 1, length, layer, drafts), prompts, args.tokens))
    record("self_speculative", device, rows, args.out)


def _compare(plain: Decoder, drafting: SpeculativeDecoder, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    clock, cpu, equal, count = [0.0, 0.0], [0.0, 0.0], 0, 0
    for prompt in prompts:
        texts = []
        for which, loop in enumerate(
            (decode_tokens(plain, [prompt], tokens, GREEDY), decode_speculatively(drafting, [prompt], tokens, GREEDY))
        ):
            begun = time.perf_counter(), time.process_time()
            texts.append([token for (token,), _ in loop])
            clock[which] += time.perf_counter() - begun[0]
            cpu[which] += time.process_time() - begun[1]
        equal += texts[0] == texts[1]
        count += len(texts[0])
    return {
        "layer": drafting.layer,
        "drafts": drafting.drafts,
        "prompts": len(prompts),
        "equal": equal,
        "accepted": drafting.accepted_share,
        "plain_tokens_per_second": count / clock[0],
        "tokens_per_second": count / clock[1],
        "ratio": clock[0] / clock[1],
        "ratio_cpu": cpu[0] / cpu[1],
    }


if __name__ == "__main__":
    main()
