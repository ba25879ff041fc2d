"""Decoding speed of Braid's loop against transformers' `generate` on a model of the same shape, in one run.

python benchmarks/generate.py [--device cuda]
"""

import argparse
from pathlib import Path

import torch
from measure import compared_seconds, record
from shapes import VOCABULARY, braid_model, peer_model

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens

PROMPT = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--families", nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--size", default="28m")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    # bf16 weights on a GPU for both: half the memory to read for each token.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    for family in args.families:
        for batch in (1, 8):
            prompt = torch.randint(1, VOCABULARY, (batch, PROMPT), device=device)
            peer = peer_model(family, args.size, 512).to(device, dtype).eval()
            ours = braid_model(family, args.size, 512).to(device, dtype).eval()
            decoder = Decoder(ours, batch, 512)
            prompts = prompt.tolist()

            def run_ours(decoder: Decoder = decoder, prompts: list = prompts) -> None:
                for _ in decode_tokens(decoder, prompts, args.tokens, Sampling(temperature=0)):
                    pass

            def run_peer(peer: torch.nn.Module = peer, prompt: torch.Tensor = prompt) -> None:
                peer.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=args.tokens,
                    min_new_tokens=args.tokens,
                    do_sample=False,
                )

            works = {"braid": run_ours, "transformers generate": run_peer}
            times = compared_seconds(works, calls=1, warmup=2, device=device, rounds=3)
            for name, value in times.items():
                rows.append(
                    {
                        "family": family,
                        "size": args.size,
                        "batch": batch,
                        "what": name,
                        "tokens_per_second": batch * args.tokens / value,
                        "ratio_to_peer": times["transformers generate"] / value,
                    }
                )
    record("generate", device, rows, args.out)


if __name__ == "__main__":
    main()
