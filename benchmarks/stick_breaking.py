"""Stick-breaking attention beside torch's softmax attention: forward, and forward with backward.

python benchmarks/stick_breaking.py --device cuda

Batch 8, 16 heads, 2048 tokens, dimension 64, bf16, unless said otherwise. How much the kernel reads depends on the
scores: with random queries and keys a stick is gone after about a hundred keys; with scores around -8 it reaches to the
first token, so nothing can be left out.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import compared_seconds, record
from torch import Tensor

from braidlm.kernels.attention.stick_breaking import StickBreaking
from braidlm.kernels.attention.stick_breaking_wide import WideStickBreaking


def inputs(args: argparse.Namespace, shift: float) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(args.heads, 0.0), (args.kv_heads or args.heads, shift), (args.kv_heads or args.heads, 0.0)]
    made = []
    for heads, added in shapes:
        x = torch.randn(args.batch, args.length, heads, args.dim, device=args.device)
        if shift:  # one channel moves every score by `shift`
            x[..., 0] = 1.0 if added == 0.0 else added * args.dim**0.5
        made.append(x.to(torch.bfloat16).requires_grad_())
    return made


def works(function: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    upstream = torch.randn_like(tensors[0])

    @torch.no_grad()
    def forward() -> Any:
        return function(*tensors)

    def both() -> Any:
        return torch.autograd.grad(function(*tensors), tensors, upstream)

    return forward, both


def softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--out", type=Path, help="a .json file, or a folder for dated ones")
    args = parser.parse_args()
    device = torch.device(args.device)
    function = StickBreaking if args.dim <= 128 else WideStickBreaking

    def stick_breaking(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return function.apply(query, key, value, args.dim**-0.5)[0]  # type: ignore[no-any-return]

    contestants = {
        "stick-breaking, random scores": works(stick_breaking, inputs(args, 0.0)),
        "stick-breaking, scores around -8": works(stick_breaking, inputs(args, -8.0)),
        "softmax (scaled_dot_product_attention)": works(softmax, inputs(args, 0.0)),
    }
    forward, both = (
        compared_seconds({name: made[index] for name, made in contestants.items()}, 20, 5, device) for index in (0, 1)
    )
    shape = f"{args.batch} x {args.length}, {args.heads} heads of {args.dim}"
    rows = [
        {
            "shape": shape,
            "what": name,
            "forward ms": forward[name] * 1e3,
            "forward + backward ms": both[name] * 1e3,
            "ratio to softmax": both[name] / both["softmax (scaled_dot_product_attention)"],
        }
        for name in contestants
    ]
    record("stick_breaking", device, rows, args.out)


if __name__ == "__main__":
    main()
