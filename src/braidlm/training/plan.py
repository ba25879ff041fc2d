"""What a training takes on many GPUs, before it is paid for: memory, traffic and time of each process.

Memory and traffic are counted: the first from the model and from what autograd keeps of a pass over tensors without
values, the second from where FSDP2 gathers and adds up. Time follows from speeds that the plan is told.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from braidlm.core.devices import training_state_bytes, weights_bytes
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import freeze
from braidlm.model.routing.router import RoutedExperts, TopKRouter
from braidlm.model.routing.stacked import StackedLinear
from braidlm.training.machines import GPU_MEMORY, PEAK_BF16, Machines
from braidlm.training.monitoring.speed import TRAINING_FLOPS, tokens_of
from braidlm.training.recipe import Recipe
from braidlm.training.step.layout import Layout, alone_with_parameters, fitting, layout_of
from braidlm.training.step.objective import Objective
from braidlm.training.trainable import TrainableBraid

USABLE = 0.92  # the share of a GPU's memory that tensors can fill; the rest is CUDA's own and gaps between them
GATHERED, SUMMED = 2, 4
"""Bytes of a weight as it is gathered, in bf16, and of its gradient as it is added up, in float32."""
MAX_GPUS = 1 << 16


@dataclass(frozen=True)
class ModelSize:
    """What a plan needs to know of a model; counts of parameters but for the bytes of activations."""

    layers: int  # what is gathered layer by layer, without banks of experts
    ends: int  # what stands around the layers, and is gathered once in a forward pass
    experts: int  # banks of experts
    largest: int  # the largest layer, with its experts
    state_bytes: int  # weights, gradients and AdamW's moments together
    row_bytes: int  # what autograd keeps of one sequence
    layer_row_bytes: int  # what a layer keeps of one sequence, where activations are recomputed layer by layer; else 0
    expert_values: int  # numbers sent to experts for one token, over all layers: the stream, once for each chosen one
    flops_per_token: int


def plan_training(recipe: Recipe, config: BraidConfig, gpus: int, machines: Machines) -> dict[str, Any]:
    """The plan of a recipe on so many GPUs, as plain data; an error that says what would fit if this does not."""
    training = recipe.training
    recompute, weights = training.activation_checkpointing, training.parallel.weights
    made = _plan(recipe, model_size(config, recipe, recompute), gpus, machines, training.batch, recompute, weights)
    memory = GPU_MEMORY[machines.gpu] * USABLE * 1e9
    if made["memory"]["all"] > memory:
        *parts, (_, needed) = ((name, _gb(amount)) for name, amount in made["memory"].items())
        raise BraidError(
            f"this does not fit: a process needs {needed} ({', '.join(map(' '.join, parts))}), and tensors can have "
            f"{_gb(memory)} of an {machines.gpu}",
            f"{gpus} GPUs, {made['layout']}",
            _what_would(recipe, config, gpus, machines, memory),
        )
    tokens = tokens_of(training.budget, made["tokens_per_step"])
    hours = tokens / made["tokens_per_second"] / 3600
    assumed = [
        f"{machines.gpu}: {GPU_MEMORY[machines.gpu]} GB, of which tensors can fill {USABLE:.0%}, and "
        f"{machines.utilisation:.0%} of {PEAK_BF16[machines.gpu] / 1e12:.0f} TFLOP/s in bf16 (--utilisation).",
        f"{machines.per_machine} GPUs in a machine (--per-machine), each sending {machines.within:g} GB/s within it "
        f"(--within) and {machines.between:g} GB/s to others (--between).",
        "State is weights, gradients and AdamW's moments in float32; products are in bf16. Activations are what "
        "autograd keeps in the plain pass, and kernels keep less.",
        "Gathering and adding up go on beside the computation; tokens that go to experts are waited for. Launching "
        "kernels, which decides below about 100M parameters, validation, samples and saving are not counted.",
    ]
    made |= {"steps": -(-tokens // made["tokens_per_step"]), "hours": hours}
    return made | {"gpu_hours": gpus * tokens / made["tokens_per_second"] / 3600, "assumptions": assumed}


def _what_would(recipe: Recipe, config: BraidConfig, gpus: int, machines: Machines, memory: float) -> str:
    """The smallest changes that let a plan fit, each alone or after those before it."""
    training, found = recipe.training, []
    batch, own, weights = training.batch, training.activation_checkpointing, training.parallel.weights
    sizes = {recompute: model_size(config, recipe, recompute) for recompute in (False, True)}

    def fits(gpus: int, batch: int, recompute: bool, weights: str) -> bool:
        made = _plan(recipe, sizes[recompute], gpus, machines, batch, recompute, weights)
        return bool(made["memory"]["all"] <= memory)

    halves = (batch >> power for power in range(batch.bit_length()))
    rows = next((n for n in halves if fits(gpus, n, True, "sharded")), None)
    doubles = (gpus << power for power in range(1, MAX_GPUS.bit_length()) if gpus << power <= MAX_GPUS)
    more_gpus = next((n for n in doubles if fits(n, batch, own, "sharded")), None)
    if gpus > 1 and weights != "sharded" and fits(gpus, batch, own, "sharded"):
        found.append("training.parallel=sharded")
    if not own and fits(gpus, batch, True, weights):
        found.append("training.activation_checkpointing=true")
    elif rows is not None and rows < batch:
        more = f"training.batch={rows} training.accumulation={training.accumulation * batch // rows}"
        shard = " training.parallel=sharded" if gpus > 1 else ""
        found.append(f"{more} training.activation_checkpointing=true{shard}")
    if more_gpus is not None:
        found.append(f"--gpus {more_gpus} with training.parallel=sharded")
    if not found:
        return "Nothing that a plan can change would: make the model smaller, or take GPUs with more memory."
    return f"This would fit: {'; or '.join(found)}."


def _plan(
    recipe: Recipe, size: ModelSize, gpus: int, machines: Machines, batch: int, recompute: bool, weights: str
) -> dict[str, Any]:
    """One process of a training, in bytes, and the step of all, as plain data."""
    training, here = recipe.training, min(gpus, machines.per_machine)
    parallel = replace(training.parallel, weights=weights)
    if parallel.weights == "auto":
        parallel = replace(parallel, weights=fitting(size.state_bytes, GPU_MEMORY[machines.gpu] * 1e9, here))
    layout = Layout(1, 1) if gpus == 1 else layout_of(parallel, gpus, here)
    tokens = batch * training.accumulation * recipe.data.length
    traffic = step_traffic(size, layout, training.accumulation, tokens)
    rate = {"copies": machines.between if gpus > here else machines.within}
    rate["shards"] = machines.between if layout.shards > here else machines.within
    rate["experts"] = machines.between if layout.experts > here else machines.within
    passes = TRAINING_FLOPS + (1 if recompute else 0)
    computing = passes * size.flops_per_token * tokens / (PEAK_BF16[machines.gpu] * machines.utilisation)
    links = {"weights gathered": "shards", "gradients of shards": "shards", "gradients of copies": "copies"}
    sending = {name: sent / rate[links.get(name, "experts")] / 1e9 for name, sent in traffic.items()}
    seconds, waits = {"computing": computing} | sending, sending["tokens to experts"]
    # Gathering and adding up go on beside the computation; tokens that go to experts are waited for.
    step = max(computing, sum(seconds.values()) - computing - waits) + waits
    memory = process_memory(size, layout, gpus, batch)
    return {
        "gpus": gpus,
        "layout": str(layout),
        "memory": memory | {"all": sum(memory.values())},
        "traffic": traffic | {"all": sum(traffic.values())},
        "seconds": seconds | {"step": step},
        "tokens_per_step": gpus * tokens,
        "tokens_per_second": gpus * tokens / step,
    }


def process_memory(size: ModelSize, layout: Layout, gpus: int, batch: int) -> dict[str, int]:
    """The bytes of one process while it computes."""
    share = size.experts / max(size.experts + size.layers + size.ends, 1)
    spread = (1 - share) / layout.shards + share / max(layout.shards, layout.experts)
    # Two layers are there at a time, the one that computes and the next, and the gradient of one that is added up.
    gathered = GATHERED * (2 * size.largest + size.ends) + SUMMED * size.largest if gpus > 1 else 0
    activations = batch * (size.row_bytes + size.layer_row_bytes)
    return {"state": round(size.state_bytes * spread), "gathered layers": gathered, "activations": activations}


def step_traffic(
    size: ModelSize, layout: Layout, accumulation: int, tokens: int, gathered: int = GATHERED
) -> dict[str, int]:
    """The bytes that one process sends in a step of so many tokens of its own, where rings gather and add up."""
    shards, copies = layout.shards, layout.copies
    own = size.experts / layout.experts  # of the experts that this process has a part of
    expert_shards = max(1, shards // layout.experts)
    expert_copies = copies if shards > 1 else copies // layout.experts
    part, expert_part = (shards - 1) / shards, (expert_shards - 1) / expert_shards
    weights = part * (2 * size.layers + size.ends) + expert_part * 2 * own
    summed = part * (size.layers + size.ends) + expert_part * own
    added = 2 * (copies - 1) / copies * (size.layers + size.ends) / shards
    added += 2 * (expert_copies - 1) / expert_copies * own / expert_shards
    # There and back, and their gradients.
    sent = 4 * (layout.experts - 1) / layout.experts * size.expert_values * tokens
    counts = {
        "weights gathered": accumulation * gathered * weights,
        "gradients of shards": accumulation * SUMMED * summed,
        "gradients of copies": SUMMED * added,
        "tokens to experts": gathered * sent,
    }
    return {name: round(count) for name, count in counts.items()}


def model_size(config: BraidConfig, recipe: Recipe, recompute: bool) -> ModelSize:
    """Count a model; with `recompute` only the inputs of layers are kept for the backward pass."""
    training, length = recipe.training, recipe.data.length
    model = skeleton(config)
    freeze(model, training.freeze)
    units = alone_with_parameters(TrainableBraid(model).units())
    inside = {id(p) for unit in units for p in unit.parameters()}
    banks: list[Any] = [
        part for part in model.modules() if isinstance(part, RoutedExperts) and isinstance(part, nn.Module)
    ]
    stacks = [[part for part in bank.modules() if isinstance(part, StackedLinear)] for bank in banks]
    experts = {id(p): p.numel() for parts in stacks for part in parts for p in part.parameters()}
    chosen = [sum(part.config.top_k for part in bank.modules() if isinstance(part, TopKRouter)) for bank in banks]
    # The stream that the experts of a bank read has the width of its first matrices.
    sent = sum(k * parts[0].weight.shape[1] for k, parts in zip(chosen, stacks, strict=True))
    everything = {id(p): p.numel() for p in model.parameters()}
    layers = sum(count for p, count in everything.items() if p in inside and p not in experts)
    plain, layer_count = kept_bytes(config, length, False), max(1, len(units))
    return ModelSize(
        layers=layers,
        ends=sum(everything.values()) - layers - sum(experts.values()),
        experts=sum(experts.values()),
        largest=max((sum(p.numel() for p in unit.parameters()) for unit in units), default=0),
        state_bytes=weights_bytes(model) + training_state_bytes(model),
        row_bytes=kept_bytes(config, length, True) if recompute else plain,
        layer_row_bytes=plain // layer_count if recompute else 0,
        expert_values=sent,
        flops_per_token=model_cost(model, length).flops_per_token,
    )


class _NoValues(TorchFunctionMode):
    """Answers what routed parts ask of values that are not there: each expert has an equal share of the rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "__bool__":
            return False
        if name == "item":
            return _Unknown()
        if name == "split" and isinstance(args[1], list) and isinstance(args[1][0], _Unknown):
            return args[0].tensor_split(len(args[1]))
        return func(*args, **(kwargs or {}))


class _Unknown(int):
    """A number of rows that is not known."""


def kept_bytes(config: BraidConfig, length: int, recompute: bool, dtype: torch.dtype = torch.bfloat16) -> int:
    """The bytes that autograd keeps of a pass over one sequence, parameters and their copies not counted."""
    counts = []
    for rows in (2, 4):  # what does not grow with the rows are weights, cast
        kept: dict[int, Any] = {}
        with FakeTensorMode(), _NoValues():
            model = BraidForCausalLM(config).train()
            for part in model.modules():
                if getattr(part, "compute", None) == "measured":
                    part.compute = "sparse"  # type: ignore[assignment]
            if recompute:
                model.gradient_checkpointing_enable()
            own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

            def keep(tensor: Tensor, own: set[int] = own, kept: dict[int, Any] = kept) -> Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in own:
                    kept[storage._cdata] = storage
                return tensor

            ids = torch.zeros(rows, length, dtype=torch.long)
            with (
                torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
                torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False),
            ):
                Objective(model)(ids, ids, torch.tensor(float(ids.numel())))
        counts.append(sum(storage.nbytes() for storage in kept.values()))
    return (counts[1] - counts[0]) // 2


def _gb(amount: float) -> str:
    return f"{amount / 1e9:,.3g} GB"
