"""Steps of models of billions of parameters on one GPU: what FSDP2 costs there, and a model of the paper's size beside
a dense model of equal active parameters and transformers' Mixtral of the same shape.

python benchmarks/large_step.py --device cuda                                  # both parts, on a GPU of 140 GB
python benchmarks/large_step.py --tiny --length 32 --batch 2 --steps 2         # the same code on a CPU
"""

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import compared_seconds, record
from shapes import VOCABULARY
from train_step import step_of_torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.core.models.presets import config_from
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.strict import decode
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.machines import PEAK_BF16
from braidlm.training.monitoring.speed import TRAINING_FLOPS
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid

PRESET = "models/molm-4b-k2"


def dense(width: int, layers: int, vocabulary: int) -> BraidConfig:
    """A Llama: about 12 x layers x width^2 parameters between embedding and head."""
    architecture = {"width": width, "context": 2048, "block": {"attention": {"heads": width // 64}}}
    return BraidConfig({**architecture, "stages": [{"block": {"layers": layers}}]}, vocab_size=vocabulary)


def mixtral(tiny: bool, device: torch.device) -> PreTrainedModel:
    """The layers, width, experts and feed-forward parameters of the preset; attention is dense."""
    size = {"hidden_size": 64, "num_hidden_layers": 2} if tiny else {"hidden_size": 1024, "num_hidden_layers": 24}
    inner = -(-size["hidden_size"] * 4 // 24) * 8  # three matrices in place of two; products need multiples of 8
    experts = {"num_local_experts": 32, "num_experts_per_tok": 2, "intermediate_size": inner}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    with device:
        return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY if tiny else 50295, **size, **experts, **heads))


def our_step(config: BraidConfig, args: argparse.Namespace, **training: Any) -> tuple[Callable, float]:
    """A step through the code that `braid train` runs, and its products in FLOPs."""
    device, dtype = torch.device(args.device), torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.device(args.device):
        model = BraidForCausalLM(config)
    flops = TRAINING_FLOPS * model_cost(model, args.length).flops_per_token * args.batch * args.length
    options = {"budget": 1, "batch": args.batch, **training}
    stepper = Stepper(TrainableBraid(model), decode(TrainingConfig, options), Rank(0, 1, device), dtype)
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, (args.batch, args.length + 1))
    inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    return lambda: stepper.step(inputs, labels, inputs.size, 1e-4), flops


def measured(name: str, make: Callable[[], tuple[Callable, float]], args: argparse.Namespace) -> dict[str, Any]:
    """One contestant alone: speed, share of the peak, memory."""
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step, flops = make()
    (seconds,) = compared_seconds({name: step}, args.steps, 5, device).values()
    row = {"model": name, "ms": seconds * 1e3, "tokens_per_second": args.batch * args.length / seconds}
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        peak = next((each for key, each in PEAK_BF16.items() if key in gpu), None)
        row |= {"mfu": flops / seconds / peak} if peak and flops else {}
        row["gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
    del step
    gc.collect()
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small models, to try this file")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    one = dense(64, 2, VOCABULARY) if args.tiny else dense(2048, 20, 50295)
    ways: dict[str, dict[str, Any]] = {
        "1B by kernels": {},
        "1B": {"graph": False},
        "1B, FSDP2": {"parallel": "sharded"},
    }
    steps = {name: our_step(one, args, **training)[0] for name, training in ways.items()}
    seconds = compared_seconds(steps, args.steps, 5, device)
    rows = [{"model": name, "ms": each * 1e3, "ratio": each / seconds["1B"]} for name, each in seconds.items()]
    print(rows, flush=True)
    steps.clear()
    gc.collect()
    routed = one if args.tiny else config_from(PRESET)
    active = model_cost(skeleton(routed), args.length).active_parameters
    twin = one if args.tiny else dense(1024, max(1, round(active / (12 * 1024**2))), 50295)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    theirs = lambda: (step_of_torch(mixtral(args.tiny, device), args.batch, args.length, device, dtype, False), 0.0)  # noqa: E731
    contestants = {"routed": lambda: our_step(routed, args), "dense": lambda: our_step(twin, args), "mixtral": theirs}
    rows += [measured(name, make, args) for name, make in contestants.items()]
    record("large_step", device, rows, args.out)


if __name__ == "__main__":
    main()
