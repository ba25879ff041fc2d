"""What the gradients of single rows cost: row by row, at once (torch.func), by opacus, and beside them a plain batch.

python benchmarks/row_gradients.py                        # a CPU
python benchmarks/row_gradients.py --device cuda --shapes small
"""

import argparse
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measure import interleaved_clocks, record
from torch import Tensor

from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.step.objective import Objective
from braidlm.training.step.row_gradients import gradients_at_once, gradients_one_by_one
from braidlm.training.trainable import TrainableBraid

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"width": 64, "layers": 2, "vocabulary": 512, "rows": 16},
    "middle": {"width": 128, "layers": 2, "vocabulary": 2048, "rows": 16},
    "small": {"width": 256, "layers": 4, "vocabulary": 4096, "rows": 16},
}
LENGTH = 128


def make(width: int, layers: int, vocabulary: int) -> BraidForCausalLM:
    torch.manual_seed(0)
    block = {"norm": "rms", "attention": {"heads": width // 16}, "feed": "swiglu"}
    stages = [{"block": {"layers": layers}}]
    architecture = {"width": width, "context": LENGTH, "positions": "rope", "block": block, "stages": stages}
    return BraidForCausalLM(BraidConfig(architecture, vocab_size=vocabulary)).train()


def summed(gradients: list[Tensor]) -> None:
    """What every way does with the gradients [row, ...]: shorten each row's and add them."""
    factors = (1 / torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)).clamp(max=1.0)
    for gradient in gradients:
        torch.tensordot(factors, gradient, 1)


def ways(model: BraidForCausalLM, rows: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    from opacus import GradSampleModule

    tokens = torch.randint(0, model.config.vocab_size, (rows, LENGTH + 1), device=device)
    inputs, labels, count = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.tensor(float(LENGTH))
    plain, replaced = Objective(copy.deepcopy(model)), TrainableBraid(model).objective()
    sampled = GradSampleModule(plain.model, batch_first=True, loss_reduction="sum", strict=False)
    parameters, own = dict(replaced.named_parameters()), list(plain.parameters())

    def batch() -> None:
        torch.autograd.grad(replaced(inputs, labels, count).text, list(parameters.values()))

    def each(way: Any) -> None:
        for gradients, _ in way(replaced, parameters, inputs, labels, count.to(device)):
            summed(gradients)

    def by_opacus() -> None:
        logits = sampled(input_ids=inputs, use_cache=False).logits
        (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / LENGTH).backward()
        summed([p.grad_sample for p in own])
        for parameter in own:
            parameter.grad = parameter.grad_sample = None

    named = {"row by row": gradients_one_by_one, "at once": gradients_at_once}
    return {"plain batch": batch, "opacus": by_opacus, **{k: lambda way=way: each(way) for k, way in named.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device, results = torch.device(options.device), []
    for name in options.shapes:
        shape = dict(SHAPES[name])
        rows = shape.pop("rows")
        clocks = interleaved_clocks(ways(make(**shape).to(device), rows, device), 2, 2, device, rounds=7)
        wall, host = ({way: 1000 * min(found[kind]) for way, found in clocks.items()} for kind in (0, 1))
        for way in clocks:
            facts = {"ms": wall[way], "cpu_ms": host[way], "of_row_by_row": host[way] / host["row by row"]}
            results.append({"shape": name, **shape, "rows": rows, "length": LENGTH, "way": way, **facts})
    record("row-gradients", device, results)


if __name__ == "__main__":
    main()
