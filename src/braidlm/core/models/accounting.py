"""What a model costs: parameters, active parameters, FLOPs, memory; counted from the modules themselves."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from braidlm.core.devices import weights_bytes
from braidlm.core.errors import BraidError
from braidlm.model.compression import untrainable
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.ranges import Length
from braidlm.model.config.strict import decode
from braidlm.model.gates import Gate
from braidlm.model.heads.ends import Embedding
from braidlm.model.language_model import Body, LanguageModel, tie
from braidlm.model.paths.parallel import ParallelStage
from braidlm.model.routing.stacked import StackedLinear

if TYPE_CHECKING:
    from braidlm.model.modeling_braid import BraidForCausalLM


@dataclass
class Cost:
    """Parameters, those that take part in computing one token, and forward FLOPs per token."""

    parameters: int = 0
    active_parameters: int = 0
    flops_per_token: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class CountedModel(LanguageModel):
    """A model without memory for its weights and without what runs it: enough to look at its parts and count them."""

    def __init__(self, config: BraidConfig):
        super().__init__()
        self.config = config
        with torch.device("meta"), _NoInitialisation():
            self.model = _CountedBody(config)
            self.add_head(config)
        tie(self)


class _CountedBody(Body):
    """The body of one."""

    def __init__(self, config: BraidConfig):
        super().__init__()
        self.config = config
        self.add_parts(config)


class _NoInitialisation(TorchFunctionMode):
    """Weights without memory are not drawn: for that torch would import its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if kwargs else args[0]
        return func(*args, **(kwargs or {}))


def skeleton(config: BraidConfig) -> "BraidForCausalLM":
    """The model without memory for its weights: to be filled, or planned."""
    from braidlm.model.modeling_braid import BraidForCausalLM  # what only counts does without transformers' classes

    with torch.device("meta"):
        return BraidForCausalLM(config)


def cost_of(module: nn.Module, length: int, counted: dict[nn.Parameter, float] | None = None) -> Cost:
    """The cost of a module at sequences of `length`; a part that is not all used for a token has its own `cost`.

    A parameter that several modules share is counted once, as active as the use that needs most of it, and its products
    for every use. `counted` has those that are counted already, each with its active share; others are added to it.
    """
    counted = {} if counted is None else counted
    settling = getattr(module, "settling", None) if isinstance(module, ParallelStage) else None
    if settling is None or not settling.saves(length):
        return _cost_of_all(module, length, counted)
    start = settling.after - 1  # a text's beginning, read by all paths
    beginning = _cost_of_all(module, start, dict(counted)).flops_per_token * start / length
    whole = _cost_of_all(module, length, counted)
    return replace(whole, flops_per_token=round(beginning + whole.flops_per_token / settling.paths))


def _cost_of_all(module: nn.Module, length: int, counted: dict[nn.Parameter, float]) -> Cost:
    """The cost of a module that is computed for every token."""
    if (own_cost := getattr(module, "cost", None)) is not None:
        return own_cost(length)
    if isinstance(adapted := getattr(module, "base_layer", None), nn.Module):
        return cost_of(adapted, length, counted)  # peft's layer around it adds little
    share, own, active = getattr(module, "active_share", 1.0), 0, 0.0
    for name, parameter in module.named_parameters(recurse=False):
        weights, before = weights_in(module, name, parameter), counted.get(parameter)
        own += weights if before is None else 0
        active += weights * max(share - (before or 0.0), 0.0)
        counted[parameter] = max(share, before or 0.0)
    multiplies = isinstance(module, (nn.Linear, StackedLinear)) or hasattr(module, "represents")
    looked_up = isinstance(module, Embedding)
    products = weights_in(module, "weight", module.weight) if multiplies and not looked_up else 0
    if isinstance(module, Gate):  # each of its factors, of which a low-rank gate has two matrices
        products = sum(parameter.numel() for name, parameter in module.named_parameters() if name != "bias")
    by_length = getattr(module, "product_share_at", None)
    product_share = getattr(module, "product_share", 1.0) if by_length is None else by_length(length)
    total = Cost(own, round(active), round(2 * products * product_share))
    if (score_flops := getattr(module, "score_flops", None)) is not None:
        total.flops_per_token += score_flops(length)
    for child in module.children():
        total += cost_of(child, length, counted)
    return total


def weights_in(module: nn.Module, name: str, parameter: Any) -> int:
    """How many weights a parameter of a module has: codes may be packed, and the factors beside them are no weights."""
    represented = getattr(module, "represents", None)
    if represented is None or name == "bias":
        return int(parameter.numel())
    return represented if name == "weight" else 0


def model_cost(model: LanguageModel, length: int | None = None) -> Cost:
    """The whole model's cost, a shared matrix counted once (its products still cost FLOPs)."""
    return cost_of(model, length or model.config.max_position_embeddings)


def stage_table(model: LanguageModel, length: int | None = None) -> list[dict[str, Any]]:
    """One row for embedding, positions, each stage, norm and head."""
    length = length or model.config.max_position_embeddings
    body = model.model
    named: list[tuple[str, nn.Module]] = [("embedding", body.embedding), ("positions", body.positions)]
    choices = model.config.decoded.stages
    named += [(f"{i}: {c.kind}", s) for i, (c, s) in enumerate(zip(choices, body.stages, strict=True))]
    named += [("norm", body.norm), ("head", model.head)]
    rows = []
    counted: dict[nn.Parameter, float] = {}
    for name, module in named:
        cost = cost_of(module, length, counted)
        row: dict[str, Any] = {"name": name, "layers": len(getattr(module, "layers", [])) or None}
        if isinstance(module, ParallelStage):
            row |= {"paths": list(module.names), "join": module.join_kind}
        if (settle := getattr(module, "settle", None)) is not None:
            row["settles"] = settle
        if (share := getattr(getattr(module, "config", None), "share", None)) is not None:
            lora = share.options.lora
            each = "" if lora is None else f" (LoRA of rank {lora} in each layer)"
            row["shared"] = f"{share.kind} of {share.options.layers} layers{each}"
        rows.append(row | vars(cost))
    return rows


def cost_facts(cost: Cost, length: int, cached: int, compressed: int | None = None, **others: Any) -> dict[str, Any]:
    """What is told of a model: its cost at sequences of `length`, other facts, and bytes of memory.

    `cached` are the numbers that a token leaves in the cache, and `compressed` the bytes of compressed weights. Those
    of a model that cannot be trained are never floating point numbers.
    """
    memory = {} if compressed is None else {"weights_compressed": compressed}
    if others.get("trainable", True):
        memory |= {"weights_float32": 4 * cost.parameters, "weights_bfloat16": 2 * cost.parameters}
        # Weights, gradients and two moments in float32; activations come on top.
        memory["training_adamw"] = 16 * cost.parameters
    memory["cache_float32"] = 4 * cached * length
    return {**vars(cost), "length": length, **others, "memory": memory}


def model_facts(model: LanguageModel, length: int | None = None) -> dict[str, Any]:
    """What a model (a skeleton will do) costs: its size, a token at sequences of `length` or the context, memory."""
    decode(Length | None, length, "length")
    config = model.config
    limit = model.model.positions.limit
    if length is not None and limit is not None and length > limit:
        raise BraidError(f"length {length} is more than the model's {limit} learned positions")
    length = length or config.max_position_embeddings
    forms = [choice.kind for choice in config.decoded.compression]
    stages = stage_table(model, length)
    ends = sum(row["parameters"] for row in stages if row["name"] in ("embedding", "head"))
    table = config.vocab_size * config.hidden_size  # of tokens
    shares = {"parameters": ends, "of_tied_tables": ends / table, "of_untied_tables": ends / (2 * table)}
    return cost_facts(
        model_cost(model, length),
        length,
        sum(2 * heads * size for heads, size in model.model.cache_shapes),
        weights_bytes(model) if forms else None,
        vocab_size=config.vocab_size,
        width=config.hidden_size,
        context=config.max_position_embeddings,
        layers=config.num_hidden_layers,
        stages=stages,
        ends=shares if ends < table else None,
        compression=forms,
        trainable=not untrainable(config.decoded.compression),
    )
