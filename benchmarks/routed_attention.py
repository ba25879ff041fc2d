"""Attention in which only routed tokens have queries: the kernels of braidlm.kernels.attention.causal, on a GPU.

PYTHONPATH=src:benchmarks python benchmarks/routed_attention.py                   # every tile worth timing
PYTHONPATH=src:benchmarks python benchmarks/routed_attention.py --no-search       # the tiles of the table only
PYTHONPATH=src:benchmarks python benchmarks/routed_attention.py --dropout 0.1

Forward, and forward and backward together, are replayed as CUDA graphs of many calls, so that launches cost
nothing; times are medians of many replays, without clearing caches. `backward_us` is the difference of the two.
The peer is torch's own causal attention with queries of all tokens, on contiguous queries, keys and values.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from measure import record
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.errors import OutOfResources

from braidlm.kernels.attention.causal import AttendRouted
from braidlm.kernels.attention.causal_tiles import TILES, Tile, Tiles

ALIGNED = 128
"""A block's rows begin at multiples of it."""
CALLS, REPLAYS = 20, 30
PEERS = {"torch, flash": SDPBackend.FLASH_ATTENTION, "torch, cuDNN": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer."""

    batch: int
    time: int
    blocks: int
    heads: int
    dim: int
    top_k: int


Passes = tuple[Callable[[], Any], Callable[[], Any]]
"""Forward; forward and backward."""


VARIANTS = {
    "attend": [(64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8)],
    "query_gradient": [(64, 32, 4), (64, 64, 4), (128, 32, 8), (128, 64, 8)],
    "key_gradient": [(32, 64, 4), (64, 64, 4), (32, 128, 8), (64, 128, 8)],
}


def variants(kernel: str) -> list[Tile]:
    """Tiles worth timing for a kernel (a field of `Tiles`), for retuning."""
    return [Tile(*shape, stages) for shape in VARIANTS[kernel] for stages in (2, 3, 4)]


def routed_queries(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Source, sequence offsets and routed of random choices."""
    tokens = shape.batch * shape.time
    chosen = torch.rand(tokens, shape.blocks, device="cuda").topk(shape.top_k, 1).indices
    routed = torch.zeros(tokens, shape.blocks, dtype=torch.uint8, device="cuda").scatter_(1, chosen, 1)
    counts = routed.view(shape.batch, shape.time, shape.blocks).sum(1).t()
    padded = -(-counts.sum(1) // ALIGNED) * ALIGNED
    offsets = (padded.cumsum(0) - padded)[:, None] + F.pad(counts.cumsum(1), (1, 0))
    block, token = routed.t().nonzero().unbind(1)
    index = torch.arange(len(token), device="cuda") - (counts.sum(1).cumsum(0) - counts.sum(1))[block]
    rows = -(-(tokens * shape.top_k + shape.blocks * (ALIGNED - 1)) // ALIGNED) * ALIGNED
    source = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    source[offsets[block, 0] + index] = token.int()
    return source, offsets.int().contiguous(), routed


def ours(shape: Shape, dropout: float) -> Callable[[Tiles], Passes]:
    """A function from tiles to the passes."""
    queries = routed_queries(shape)
    size = (shape.batch * shape.time, shape.blocks, 3, shape.heads, shape.dim)
    qkv = torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(len(queries[0]), shape.heads * shape.dim, device="cuda", dtype=torch.bfloat16)
    seed = torch.zeros(1, dtype=torch.long, device="cuda")

    def passes(tiles: Tiles) -> Passes:
        def forward() -> Tensor:
            out: Tensor = AttendRouted.apply(qkv, *queries, shape.dim**-0.5, dropout, seed, None, tiles)
            return out

        return forward, lambda: torch.autograd.grad(forward(), qkv, upstream)

    return passes


def peer(shape: Shape, dropout: float, backend: SDPBackend) -> Passes:
    """Every token has a query in every block."""
    size = (shape.batch * shape.blocks, shape.heads, shape.time, shape.dim)
    parts = [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(size, device="cuda", dtype=torch.bfloat16)

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*parts, dropout_p=dropout, is_causal=True)

    return forward, lambda: torch.autograd.grad(forward(), parts, upstream)


def microseconds(work: Callable[[], Any]) -> float:
    """The time of one call."""
    warmup = torch.cuda.Stream()
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        for _ in range(3):  # kernels are compiled in the first call, which a capture must not contain
            work()
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in events) * 1e3 / CALLS


def row(shape: Shape, what: str, passes: Passes, tiles: Tiles | None = None) -> dict[str, Any]:
    """A row of the table."""
    forward, both = (microseconds(work) for work in passes)
    names = {kernel: "" if tiles is None else _short(getattr(tiles, kernel)) for kernel in Tiles.__annotations__}
    return {
        "batch": f"{shape.batch} x {shape.time}",
        "what": what,
        **names,
        "forward_us": forward,
        "backward_us": both - forward,
        "both_us": both,
    }


def _short(tile: Tile) -> str:
    return f"{tile.queries}x{tile.keys} w{tile.warps} s{tile.stages}"


def searched(shape: Shape, make: Callable[[Tiles], Passes]) -> Iterator[dict[str, Any]]:
    """Search each kernel's tile in turn, with the best so far for the others; the last row has the best of all."""
    best = TILES[2]
    for kernel in Tiles.__annotations__:
        least = float("inf")
        for tile in variants(kernel):
            tiles = replace(best, **{kernel: tile})
            try:
                result = row(shape, f"search, {kernel}", make(tiles), tiles)
            except OutOfResources:  # too much shared memory
                continue
            yield result
            if result["both_us"] < least:
                least, chosen = result["both_us"], tile
        best = replace(best, **{kernel: chosen})
    yield row(shape, "best found", make(best), best)


def compared(shape: Shape, dropout: float, search: bool) -> list[dict[str, Any]]:
    """All rows of one shape."""
    make = ours(shape, dropout)
    rows = list(searched(shape, make)) if search else []
    rows.append(row(shape, "table", make(TILES[2]), TILES[2]))
    for name, backend in PEERS.items():
        try:
            rows.append(row(shape, f"{name}, all ask", peer(shape, dropout, backend)))
        except RuntimeError as error:
            print(f"{name} does not run: {error}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--time", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--search", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, help="a .json file, or a folder for dated ones")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for batch in args.batches:
        shape = Shape(batch, args.time, args.blocks, args.heads, args.dim, args.top_k)
        rows += compared(shape, args.dropout, args.search)
    record("routed_attention", torch.device("cuda"), rows, args.out)


if __name__ == "__main__":
    main()
