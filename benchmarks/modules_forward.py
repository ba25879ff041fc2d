"""MoLM's forward pass beside dense models of transformers, and its expert feed-forward beside torch's grouped product.

python benchmarks/modules_forward.py --device cuda

Random weights in bf16, batch 32 x 1024, logits of every token; peak memory is that of the whole process, weights
included. ModuleFormer promises half the latency of a dense model of 1.4B parameters (Pythia's shape). The feed-forward
part has 32,768 tokens and 32 experts of 1024 x 2048, of which a token uses two.

With --full-memory the batch doubles until memory is full, and each model's throughput is that of its best batch.
"""

import argparse
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import compared_seconds, record
from profile_step import print_profile
from torch import Tensor

from braidlm.core.models.presets import config_from
from braidlm.kernels.lowered_model import LoweredModel
from braidlm.kernels.routed.combine import Combine
from braidlm.kernels.routed.grouped.layers import FeedConfig, GroupedFeed
from braidlm.kernels.routed.permutation import permute
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.dispatch import sort_by_expert

PYTHIA = {"Pythia-410M shape": (1024, 24, 16), "Pythia-1.4B shape": (2048, 24, 16), "Pythia-2.8B shape": (2560, 32, 32)}
"""Width, layers and heads."""
EXPERTS, WIDTH, HIDDEN, TOP_K = 32, 1024, 2048, 2


def molm(preset: str, device: torch.device) -> Callable[[Tensor], Any]:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = BraidForCausalLM(config_from(f"models/{preset}")).eval()
    torch.set_default_dtype(torch.float32)
    lowered = LoweredModel(model)
    print(preset, lowered.lowered.summary(), flush=True)
    return lowered.logits


def pythia(name: str, device: torch.device) -> Callable[[Tensor], Any]:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    width, layers, heads = PYTHIA[name]
    config = GPTNeoXConfig(
        vocab_size=50304, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, rotary_pct=0.25, max_position_embeddings=2048,
    )  # fmt: skip
    with torch.device(device):
        model = GPTNeoXForCausalLM(config).to(torch.bfloat16).eval()
    return lambda ids: model(ids, use_cache=False).logits


def forward_row(name: str, make: Callable[..., Callable[[Tensor], Any]], args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    torch.manual_seed(0)
    run = make(name, device)
    ids = torch.randint(50000, (args.batch, args.length), device=device)
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        seconds = compared_seconds({name: partial(run, ids)}, 5, 3, device, rounds=4)[name]
        row = {"what": name, "forward ms": seconds * 1e3, "peak GB": torch.cuda.max_memory_allocated() / 1e9}
        if args.profile:
            print_profile(partial(run, ids), name)
        if args.full_memory:
            row |= full_memory(name, run, args)
    print(row, flush=True)
    del run
    gc.collect()
    torch.cuda.empty_cache()
    return row


def full_memory(name: str, run: Callable[[Tensor], Any], args: argparse.Namespace) -> dict[str, Any]:
    """The batch with the best throughput, of those that double until memory is full; and the largest that fits."""
    rates: dict[int, float] = {}
    batch, device = args.batch, torch.device(args.device)
    while True:
        gc.collect()
        torch.cuda.empty_cache()
        ids = torch.randint(50000, (batch, args.length), device=device)
        try:
            seconds = compared_seconds({name: partial(run, ids)}, 1, 1, device, rounds=3)[name]
        except torch.cuda.OutOfMemoryError:
            break
        rates[batch] = batch * args.length / seconds
        batch *= 2
    best = max(rates, key=lambda batch: rates[batch])
    return {"tokens/s": rates[best], "best batch": best, "largest batch": max(rates)}


def feed_rows(device: torch.device, tokens: int = 32768) -> list[dict[str, Any]]:
    """Forward, and forward with backward, of the bank alone: routing is done before."""
    torch.manual_seed(0)
    x = torch.randn(tokens, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    up = (torch.randn(EXPERTS, WIDTH, HIDDEN, device=device) * 0.02).bfloat16().requires_grad_()
    out = (torch.randn(EXPERTS, HIDDEN, WIDTH, device=device) * 0.02).bfloat16().requires_grad_()
    chosen = torch.randn(tokens, EXPERTS, device=device).topk(TOP_K).indices
    weights = torch.rand(tokens, TOP_K, device=device, requires_grad=True)
    permutation, order = permute(chosen, EXPERTS, 32), sort_by_expert(chosen, EXPERTS)
    dense_up = (torch.randn(TOP_K * HIDDEN, WIDTH, device=device) * 0.02).bfloat16().requires_grad_()
    dense_out = (torch.randn(WIDTH, TOP_K * HIDDEN, device=device) * 0.02).bfloat16().requires_grad_()

    def braid() -> Tensor:
        config = FeedConfig(permutation, "gelu_new", gated=False)
        rows = GroupedFeed.apply(x, up, up.detach(), None, out, out.detach(), None, None, config)
        return Combine.apply(rows, weights, permutation)

    def grouped() -> Tensor:
        inner = F.gelu(F.grouped_mm(order.gather(x), up, offs=order.groups.ends_E), approximate="tanh")
        return order.combine(F.grouped_mm(inner, out, offs=order.groups.ends_E), weights)

    def dense() -> Tensor:
        return F.linear(F.gelu(F.linear(x, dense_up), approximate="tanh"), dense_out)

    rows: list[dict[str, Any]] = []
    works = {"braid": braid, "torch grouped product": grouped, "dense of the same FLOPs": dense}
    upstream = torch.randn_like(x)
    inputs = {"dense of the same FLOPs": [x, dense_up, dense_out]}
    forward, both = {}, {}
    for name, work in works.items():
        forward[name] = torch.no_grad()(work)
        tensors = inputs.get(name, [x, up, out, weights])
        both[name] = lambda work=work, tensors=tensors: torch.autograd.grad(work(), tensors, upstream)
    seconds = compared_seconds(forward, 20, 5, device), compared_seconds(both, 20, 5, device)
    for name in works:
        rows.append({"what": name, "forward ms": seconds[0][name] * 1e3, "with backward ms": seconds[1][name] * 1e3})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--full-memory", action="store_true", help="throughput of the best batch that fits, too")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take most of the time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    record("expert_feed", device, feed_rows(device), args.out)
    rows = [forward_row(name, molm, args) for name in ("molm-4b-k2", "molm-4b-k4", "molm-8b-k2")]
    rows += [forward_row(name, pythia, args) for name in PYTHIA]
    dense = next(row["forward ms"] for row in rows if row["what"] == "Pythia-1.4B shape")
    record("modules_forward", device, [row | {"ratio to 1.4B": row["forward ms"] / dense} for row in rows], args.out)


if __name__ == "__main__":
    main()
