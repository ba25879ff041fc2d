"""The kernels for expert banks in a training step: the permutation, grouped products, the weighted sum.

python benchmarks/grouped_products.py                # every shape and block
python benchmarks/grouped_products.py --tokens 8192  # one number of tokens

Each product runs with several blocks, beside torch's own grouped product (`F.grouped_mm`, which neither gathers nor
activates) and one dense product of as many rows. Each is replayed as a CUDA graph, and candidates alternate.
It needs torch and Triton only.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import compared_seconds, record
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from braidlm.kernels.ops.launch import Blocks
from braidlm.kernels.routed.combine import Combine, combine
from braidlm.kernels.routed.grouped.products import grouped_backward, grouped_forward
from braidlm.kernels.routed.grouped.weights import WeightLayout, grouped_weight_gradient
from braidlm.kernels.routed.permutation import permute

BATCHES = {8192: 16, 32768: 32, 65536: 128}
"""Sequences, by the number of tokens."""
BLOCKS = [
    Blocks(128, 64, 64, 4, 3),
    Blocks(128, 64, 64, 8, 3),
    Blocks(128, 128, 32, 8, 4),
    Blocks(128, 128, 64, 8, 3),
    Blocks(128, 128, 64, 8, 3, 128),
    Blocks(128, 128, 64, 8, 4),
    Blocks(128, 128, 64, 4, 3),
    Blocks(128, 256, 64, 8, 3),
    Blocks(64, 64, 64, 4, 4),
    Blocks(64, 128, 64, 4, 3),
    Blocks(64, 128, 64, 4, 4),
    Blocks(64, 256, 64, 8, 3),
]
CALLS = 10
"""Calls in one graph, since a graph's launch takes longer than one of these kernels."""


@dataclass(frozen=True)
class Bank:
    """Feed-forward experts."""

    experts: int
    top_k: int
    width: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.top_k} of {self.experts}, {self.width}-{self.hidden}"


SMALL = [Bank(4, 2, 192, 768), Bank(8, 2, 384, 768)]
BANKS = {8192: SMALL, 32768: [Bank(32, 2, 1024, 2048)], 65536: SMALL}
"""By the number of tokens; the large one is ModuleFormer's MoLM."""


@dataclass(frozen=True)
class Work:
    """A product by our kernel and by torch, and its floating-point operations."""

    ours: Callable[[Blocks | None], Any]
    grouped: Callable[[], Any]
    dense: Callable[[], Any]
    flops: int


def replayed(work: Callable[[], Any], calls: int) -> Callable[[], None]:
    """Some calls of the work as a CUDA graph."""
    warmup = torch.cuda.Stream()
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        for _ in range(2):  # kernels are compiled in the first call, which a capture must not contain
            work()
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    return graph.replay


class Shapes:
    """Inputs of the kernels for one bank and number of tokens."""

    def __init__(self, bank: Bank, tokens: int):
        torch.manual_seed(0)
        self.bank, self.tokens, self.batch = bank, tokens, BATCHES[tokens]
        self.weights, self.chosen = torch.rand(tokens, bank.experts, device="cuda").topk(bank.top_k)
        self.weights.requires_grad_()
        self.permutation = permute(self.chosen, bank.experts, self.batch)
        rows = self.permutation.rows
        self.stream, self.narrow, self.narrow_gradient = (
            self._random(size, bank.width) for size in (tokens, rows, rows)
        )
        self.wide, self.wide_gradient, self.inner = (self._random(rows, bank.hidden) for _ in range(3))
        self.up, self.out = (
            self._random(bank.experts, *shape) for shape in ((bank.width, bank.hidden), (bank.hidden, bank.width))
        )
        self.up_bias = torch.randn(bank.experts, bank.hidden, device="cuda")
        for gradient in (self.narrow_gradient, self.wide_gradient):
            gradient[self.permutation.source < 0] = 0

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    def products(self) -> dict[str, Work]:
        """Forward (a), backward (b) and gradients of weights (c), each of the layer up and the layer out."""
        permutation, ends = self.permutation, self.permutation.expert_offsets[1:]
        flops = 2 * self.bank.width * self.bank.hidden * self.tokens * self.bank.top_k
        up, out, narrow, wide = self.up, self.out, self.narrow, self.wide
        narrow_gradient, wide_gradient = self.narrow_gradient, self.wide_gradient
        up_back, out_back = up.transpose(1, 2), out.transpose(1, 2)

        def forward_up(blocks: Blocks | None) -> Any:
            return grouped_forward(self.stream, up, permutation, self.up_bias, True, "gelu_new", blocks=blocks)

        def backward_out(blocks: Blocks | None) -> Any:
            return grouped_backward(narrow_gradient, out, permutation, self.inner, "gelu_new", blocks=blocks)

        def weight_up(blocks: Blocks | None) -> Any:
            return grouped_weight_gradient(
                self.stream, wide_gradient, permutation, "inputs", True, blocks and WeightLayout(blocks)
            )

        return {
            "a up: gather, bias, gelu": Work(
                forward_up, lambda: F.grouped_mm(narrow, up, offs=ends), lambda: narrow @ up[0], flops
            ),
            "a out": Work(
                lambda blocks: grouped_forward(wide, out, permutation, blocks=blocks),
                lambda: F.grouped_mm(wide, out, offs=ends),
                lambda: wide @ out[0],
                flops,
            ),
            "b out: slope": Work(
                backward_out,
                lambda: F.grouped_mm(narrow_gradient, out_back, offs=ends),
                lambda: narrow_gradient @ out_back[0],
                flops,
            ),
            "b up": Work(
                lambda blocks: grouped_backward(wide_gradient, up, permutation, blocks=blocks),
                lambda: F.grouped_mm(wide_gradient, up_back, offs=ends),
                lambda: wide_gradient @ up_back[0],
                flops,
            ),
            "c up: gather, bias": Work(
                weight_up,
                lambda: F.grouped_mm(narrow.t(), wide_gradient, offs=ends),
                lambda: narrow.t() @ wide_gradient,
                flops,
            ),
            "c out": Work(
                lambda blocks: grouped_weight_gradient(
                    wide, narrow_gradient, permutation, layout=blocks and WeightLayout(blocks)
                ),
                lambda: F.grouped_mm(wide.t(), narrow_gradient, offs=ends),
                lambda: wide.t() @ narrow_gradient,
                flops,
            ),
        }

    def passes(self) -> dict[str, Callable[[], Any]]:
        """What only moves numbers."""
        rows = self.narrow.clone().requires_grad_()
        gradient = torch.randn_like(Combine.apply(rows, self.weights, self.permutation))

        def there_and_back() -> Any:
            made = Combine.apply(rows, self.weights, self.permutation)
            return torch.autograd.grad(made, [rows, self.weights], gradient)

        return {
            "permute": lambda: permute(self.chosen, self.bank.experts, self.batch),
            "combine forward": lambda: Combine.apply(rows.detach(), self.weights.detach(), self.permutation),
            "mix forward and backward": there_and_back,
            "sum of a token's rows": lambda: combine(self.narrow, None, self.permutation),
        }


def graphs_of(work: Work) -> dict[str, Callable[[], None]]:
    """The contestants for a product; blocks that the device cannot hold, or peers it does not have, are left out."""
    candidates: dict[str, Callable[[], Any]] = {"F.grouped_mm": work.grouped, "dense product": work.dense}
    candidates["default"] = lambda: work.ours(None)
    candidates |= {_name(blocks): lambda blocks=blocks: work.ours(blocks) for blocks in BLOCKS}
    graphs = {}
    for name, candidate in candidates.items():
        try:
            candidate()
        except (OutOfResources, CompilationError, RuntimeError, AttributeError) as error:
            print(f"  {name}: left out ({str(error).splitlines()[0][:80]})")
            continue
        graphs[name] = replayed(candidate, CALLS)
    return graphs


def _name(blocks: Blocks) -> str:
    limit = "" if blocks.max_registers is None else f", {blocks.max_registers} registers"
    return f"{blocks.rows} x {blocks.columns} x {blocks.inner}, {blocks.warps} warps, {blocks.stages} stages{limit}"


def timed(bank: Bank, tokens: int) -> list[dict[str, Any]]:
    """All products of one shape; prints every candidate."""
    shapes, device, lines = Shapes(bank, tokens), torch.device("cuda"), []
    print(f"\n{bank}, {tokens} tokens, {shapes.permutation.rows} rows at most")
    for what, work in shapes.products().items():
        seconds = compared_seconds(graphs_of(work), calls=5, warmup=2, device=device)
        microseconds = {name: 1e6 * each / CALLS for name, each in seconds.items()}
        print(f"  {what}")
        for name, each in sorted(microseconds.items(), key=lambda item: item[1]):
            print(f"    {each:8.1f} us {work.flops / each / 1e6:7.0f} TFLOP/s  {name}")
        peers = {name: microseconds.pop(name, float("nan")) for name in ("F.grouped_mm", "dense product")}
        default = microseconds.pop("default")
        best = min(microseconds, key=lambda name: microseconds[name])
        lines.append(
            {
                "bank": str(bank),
                "tokens": tokens,
                "work": what,
                "best us": microseconds[best],
                "TFLOP/s": work.flops / microseconds[best] / 1e6,
                "default us": default,
                "grouped_mm us": peers["F.grouped_mm"],
                "dense us": peers["dense product"],
                "best blocks": best,
            }
        )
    graphs = {name: replayed(work, CALLS) for name, work in shapes.passes().items()}
    for what, each in compared_seconds(graphs, calls=5, warmup=2, device=device).items():
        print(f"  {1e6 * each / CALLS:8.1f} us  {what}")
        lines.append(dict.fromkeys(lines[0], "") | {"bank": str(bank), "tokens": tokens, "work": what})
        lines[-1]["best us"] = 1e6 * each / CALLS
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, choices=sorted(BATCHES), help="default: all")
    parser.add_argument("--out", type=Path, help="a folder or .json file for the result (default: benchmarks/results)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device.")
    sizes = sorted(BATCHES) if args.tokens is None else [args.tokens]
    lines = [line for tokens in sizes for bank in BANKS[tokens] for line in timed(bank, tokens)]
    record("grouped_products", torch.device("cuda"), lines, args.out)


if __name__ == "__main__":
    main()
