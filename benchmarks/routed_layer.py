"""A routed layer of MoEP on a CPU at top 1, 2 and 4 of 4 blocks: what choosing fewer blocks saves in time.

python benchmarks/routed_layer.py

Width 192, 3 heads, feed-forward 768, biases, layer norm; float32, one thread; the same weights each time. Sparse
computes the chosen blocks only (but keys and values of all), dense computes all and hides. A model by itself takes the
faster of the two, so ratios are to the faster at top 4.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import compared_seconds, record

from braidlm.core.models.accounting import cost_of
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidModel

WIDTH = 192
CONTESTANTS = [(1, "sparse"), (2, "sparse"), (4, "sparse"), (2, "dense"), (4, "dense")]


def body(top_k: int, compute: str, length: int) -> BraidModel:
    """A model that is one routed layer."""
    layer = {
        "paths": 4,
        "norm": "layer",
        "attention": {"heads": 3, "bias": True},
        "feed": {"kind": "mlp", "hidden": 4 * WIDTH, "activation": "gelu_new", "bias": True},
        "join": {"kind": "routed", "top_k": top_k, "compute": compute},
    }
    architecture = {"width": WIDTH, "context": length, "positions": "learned", "stages": [{"parallel": layer}]}
    torch.manual_seed(0)
    return BraidModel(BraidConfig(architecture=architecture, vocab_size=1)).train()


def passes(model: BraidModel, batch: int, length: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward pass alone; and with the gradients of every weight and of the stream that came in."""
    torch.manual_seed(1)
    hidden = torch.randn(batch, length, WIDTH, requires_grad=True)
    upstream = torch.randn(batch, length, WIDTH)
    (stage,), span = model.stages, model.span(hidden)
    weights = list(stage.parameters())

    @torch.no_grad()
    def forward() -> Any:
        return stage(hidden, span)

    def both() -> Any:
        return torch.autograd.grad(stage(hidden, span)[0], [hidden, *weights], upstream)

    return forward, both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="a .json file, or a folder for dated ones")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    models = {(top_k, way): body(top_k, way, args.length) for top_k, way in CONTESTANTS}
    made = {key: passes(model, args.batch, args.length) for key, model in models.items()}
    forward, both = (
        compared_seconds({key: made[key][index] for key in made}, 1, 1, device, args.rounds) for index in (0, 1)
    )
    whole = [min(seconds[4, "sparse"], seconds[4, "dense"]) for seconds in (forward, both)]
    rows = [
        {
            "top_k": top_k,
            "way": way,
            "batch": args.batch,
            "length": args.length,
            "MFLOP per token": cost_of(models[top_k, way].stages, args.length).flops_per_token / 1e6,
            "forward ms": forward[top_k, way] * 1e3,
            "of top 4": forward[top_k, way] / whole[0],
            "forward and backward ms": both[top_k, way] * 1e3,
            "of top 4 in training": both[top_k, way] / whole[1],
        }
        for top_k, way in CONTESTANTS
    ]
    record("routed_layer", device, rows, args.out)


if __name__ == "__main__":
    main()
