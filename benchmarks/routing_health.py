"""How evenly the routers of a small MoEP share the tokens after a training: with the Switch loss, balanced without a
loss, and left alone.

python benchmarks/routing_health.py

The same weights and batches of the built-in stories each time: width 64, routed layers of width 32 with the top 2 of 4
blocks, projections with 4 experts. A load is the share of the picks that a block or expert has on held-out stories; of
4, 0.25 is even. The columns are the routers, with the smallest load that one of its choices has.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import record

from braidlm.core.models.folders import load_model
from braidlm.core.models.runs import last_records
from braidlm.core.recipes import compose_recipe
from braidlm.data.loading.open_data import open_data
from braidlm.data.loading.validation import validation_windows
from braidlm.model.heads.losses import IGNORED
from braidlm.model.routing.losses import loads
from braidlm.training.recipe import decode_recipe
from braidlm.training.train import train

ROUTERS: dict[str, dict[str, Any]] = {
    "switch 0.2": {"losses": {"switch": 0.2}},
    "loss-free 0.001": {"losses": {}, "balance_rate": 0.001},
    "none": {"losses": {}},
}
"""Options of all routers, by what balances them."""


def health_recipe(router: dict[str, Any], steps: int, layers: int, folder: Path) -> dict[str, Any]:
    """The tiny MoEP with these routers."""
    recipe = compose_recipe("tiny/moep")
    experts = {"names": 4, "router": {"top_k": 2, **router}}
    routed = {"paths": 4, "attention": {"heads": 2}, "join": {"kind": "routed", "top_k": 2, **router}}
    recipe["model"] |= {
        "dropout": 0.0,
        "stages": [
            "block",
            {"project": {"to": 32, "bias": True, "experts": experts}},
            {"parallel": {"layers": layers, **routed}},
            {"project": {"to": 64, "bias": True, "experts": experts}},
            "block",
        ],
    }
    recipe["data"] |= {"length": 64, "chunking": "contiguous", "cache": str(folder / "data")}
    recipe["training"] |= {"budget": f"{steps} steps", "warmup": "100 steps", "batch": 8}
    recipe["validation"] = {"every": f"{steps} steps", "tokens": 10000}
    recipe["checkpoints"] = {"every": f"{steps} steps"}
    recipe["log"] = {"every": 100}
    recipe.pop("samples", None)
    return recipe


@torch.no_grad()
def held_out_loads(model_folder: Path, recipe: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of each router, the share of the picks of each of its choices."""
    model, config = load_model(model_folder), decode_recipe(recipe).recipe
    (stream,) = open_data(config.data).validation
    total: dict[str, torch.Tensor] = {}
    for inputs, labels in validation_windows(stream, config.data.length, config.validation.tokens, rows=8):
        real = torch.from_numpy(labels) != IGNORED
        for name, load in loads(model(torch.from_numpy(inputs), use_cache=False).routings, real).items():
            total[name] = total.get(name, 0.0) + load * real.sum()
    return {name: load / load.sum() for name, load in total.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=4, help="routed ones")
    parser.add_argument("--out", type=Path, help="a .json file, or a folder for dated ones")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number, (name, router) in enumerate(ROUTERS.items()):
            recipe = health_recipe(router, args.steps, args.layers, folder)
            recipe["out"] = str(folder / f"run-{number}")
            run = train(recipe, device="cpu")
            smallest = {place: float(load.min()) for place, load in held_out_loads(run.model, recipe).items()}
            bits = last_records(run.folder)["validation"]["bits_per_byte"]
            rows.append({"balanced by": name, "steps": args.steps, "bits per byte": bits, **smallest})
    record("routing_health", torch.device("cpu"), rows, args.out)


if __name__ == "__main__":
    main()
