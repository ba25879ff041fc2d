"""One training pass (forward and backward) of a parallel layer of four equal paths against dense layers of its FLOPs.

python benchmarks/parallel_layer.py                     # CPU, float32
python benchmarks/parallel_layer.py --device cuda       # bf16, compiled, each pass replayed as a CUDA graph

The contestants, all made of Braid's own parts and timed in turns in one run:
- parallel, stacked: four paths computed as one (what Braid does), joined by a shared linear layer;
- parallel, module per path: the same four paths one after another, the plain reference;
- dense, same stream: one block on the same stream with four times the heads and feed-forward of a path, and a linear
  layer of the join's size: the same products in one, so exactly the same FLOPs;
- dense, twice the width: a square block whose feed-forward is cut so that its FLOPs agree within 1%. It has half the
  attention channels, and the FLOPs it saves there are in matrix products, which are cheaper in time.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import compared_seconds, record
from torch import Tensor

from braidlm.core.models.accounting import cost_of
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.feed.feeds import gated_hidden
from braidlm.model.modeling_braid import BraidModel
from braidlm.training.step.compute import autocast

PATHS = 4
HEAD = 32
"""Channels of an attention head, everywhere."""


def body(width: int, length: int, stages: list[Any]) -> BraidModel:
    """A model of these stages."""
    architecture = {"width": width, "context": length, "positions": "rope", "stages": stages}
    return BraidModel(BraidConfig(architecture=architecture, vocab_size=1)).train()


def block(heads: int, hidden: int) -> dict[str, Any]:
    """The options of a block."""
    return {"attention": {"heads": heads, "head_dim": HEAD}, "feed": {"kind": "swiglu", "hidden": hidden}}


def parallel(width: int, length: int, stacked: bool) -> BraidModel:
    """Four paths as wide as the stream."""
    options = block(width // HEAD, gated_hidden(width))
    return body(width, length, [{"parallel": {"paths": PATHS, "stacked": stacked, **options}}])


def same_stream(width: int, length: int) -> BraidModel:
    """The same products in one block, and one of the join's size."""
    wide = block(PATHS * width // HEAD, PATHS * gated_hidden(width))
    return body(width, length, [{"block": wide}, {"project": {"to": PATHS * width}}])


def twice_the_width(width: int, length: int, flops: int) -> BraidModel:
    """A square block of as many FLOPs."""

    def sized(hidden: int) -> BraidModel:
        return body(2 * width, length, [{"block": block(2 * width // HEAD, hidden)}])

    one, two = (flops_of(sized(hidden), length) for hidden in (8, 16))
    return sized(8 * (1 + round((flops - one) / (two - one))))


def flops_of(model: BraidModel, length: int) -> int:
    """Forward FLOPs per token of the stages."""
    return cost_of(model.stages, length).flops_per_token


def score_flops_of(model: BraidModel, length: int) -> int:
    """Those of them that are attention's scores and mixing."""
    return sum(attention.score_flops(length) for attention in model.attentions)


def training_pass(model: BraidModel, batch: int, length: int, device: torch.device) -> Callable[[], Any]:
    """Forward and backward of the stages: gradients of every weight and of the stream that came in."""
    torch.manual_seed(0)
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    stages, weights = model.to(device).stages, list(model.stages.parameters())
    hidden = torch.randn(batch, length, model.config.hidden_size, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.randn(batch, length, model.width_out, device=device, dtype=dtype)

    def run(stream: Tensor) -> Tensor:
        span = model.span(stream)
        for stage in stages:
            stream, _ = stage(stream, span)
        return stream

    forward = torch.compile(run, dynamic=False) if gpu else run

    def work() -> tuple[Tensor, ...]:
        with autocast(device, dtype):
            made = forward(hidden)
        return torch.autograd.grad(made, [hidden, *weights], upstream)

    return replayed(work) if gpu else work


def replayed(work: Callable[[], Any]) -> Callable[[], None]:
    """The work as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # kernels are compiled and chosen in the first calls, which a capture must not contain
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--widths", nargs="+", type=int, default=[128, 256], help="of a path, and of the stream")
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--calls", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, help="a .json file, or a folder for dated ones")
    args = parser.parse_args()
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    length = args.length or (512 if gpu else 256)
    calls, rounds = args.calls or (50 if gpu else 3), args.rounds or (10 if gpu else 8)
    rows = []
    for width in args.widths:
        for batch in args.batches or ([16, 64] if gpu else [8]):
            rows += compared(width, batch, length, device, calls, rounds)
    record("parallel_layer", device, rows, args.out)


def compared(
    width: int, batch: int, length: int, device: torch.device, calls: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each contestant at one shape."""
    torch.compiler.reset()
    stacked = parallel(width, length, stacked=True)
    dense = {
        "dense, same stream": same_stream(width, length),
        "dense, twice the width": twice_the_width(width, length, flops_of(stacked, length)),
    }
    paths = {"parallel, stacked": stacked, "parallel, module per path": parallel(width, length, stacked=False)}
    models = dense | paths
    works = {name: training_pass(model, batch, length, device) for name, model in models.items()}
    seconds = compared_seconds(works, calls, warmup=2, device=device, rounds=rounds)
    return [
        {
            "path_width": width,
            "batch": f"{batch} x {length}",
            "what": name,
            "flops_per_token": flops_of(model, length),
            "of_them_attention": score_flops_of(model, length),
            "ms": seconds[name] * 1e3,
            **{f"ratio to {peer}": seconds[name] / seconds[peer] for peer in dense},
        }
        for name, model in models.items()
    ]


if __name__ == "__main__":
    main()
