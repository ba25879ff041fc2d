"""Gates: zero-initialised bypasses around the layers of a trained model (Self-MoE).

A layer B with a gate G computes B(h) + G(h) of its input h. A gate begins at zero, so that adding it changes nothing.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .config.ranges import Layers, Size
from .config.registry import Choice, NoOptions, Registry
from .config.strict import PartOf
from .errors import BraidError
from .routing.dispatch import compute_dtype
from .routing.stacked import fill_like_torch, fill_zeros

gate_kinds = Registry("gate", third_party=True)


def fill_gate(gate: Any, parameter: nn.Parameter) -> None:
    """Zero, but for the first of two factors: of two zeros neither would learn."""
    (fill_like_torch if parameter is getattr(gate, "down", None) else fill_zeros)(gate, parameter)


class Gate(nn.Module):
    """The base class: subclasses say what is added to the output of a layer."""

    is_off = False  # whether the gate adds nothing for now
    choice: Choice  # its kind and options
    fill = staticmethod(fill_gate)

    def forward(self, hidden: Tensor, output: Tensor | None = None) -> Tensor:
        """What the gate makes of a layer's input; with the layer's `output`, the sum of both, in one pass."""
        output = torch.zeros_like(hidden) if output is None else output
        return output if self.is_off else self.add(hidden, output)

    def add(self, hidden: Tensor, output: Tensor) -> Tensor:
        """The output plus what the gate makes of the input, in the type of the output."""
        raise NotImplementedError("each kind of gate adds something else")


@gate_kinds.register("vector")
class VectorGate(Gate):
    """One factor for each channel of the stream."""

    Config = NoOptions

    def __init__(self, config: NoOptions, width: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(width))

    def add(self, hidden: Tensor, output: Tensor) -> Tensor:
        # A Module's own lookup would take a third of the time of the product; FSDP keeps the weight elsewhere.
        found = self._parameters.get("weight")
        weight: Tensor = self.weight if found is None else found
        dtype = output.dtype
        if weight.dtype is not dtype or hidden.dtype is not dtype:
            weight, hidden = weight.to(dtype), hidden.to(dtype)
        return torch.addcmul(output, hidden, weight)


@gate_kinds.register("scalar")
class ScalarGate(VectorGate):
    """One factor for all channels of the stream."""

    def __init__(self, config: NoOptions, width: int):
        super().__init__(config, 1)  # not a number without dimensions, which FSDP cannot divide


@gate_kinds.register("matrix")
class MatrixGate(Gate):
    """A matrix from channels to channels."""

    @dataclass
    class Config:
        bias: bool = False
        """Whether a vector is added too."""
        rank: Size | None = None
        """Rank of the matrix, which is then the product of two narrow ones; by default it is a full one."""

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.config, rank = config, config.rank
        if rank is not None and rank >= width:
            raise BraidError(f"a gate of rank {rank} is no smaller than a whole one of width {width}: leave out rank")
        self.weight = nn.Parameter(torch.empty(width, width if rank is None else rank))
        self.down = None if rank is None else nn.Parameter(torch.empty(rank, width))
        self.bias = nn.Parameter(torch.empty(width)) if config.bias else None

    def add(self, hidden: Tensor, output: Tensor) -> Tensor:
        dtype = compute_dtype(hidden)
        inner, weight, down, bias = hidden.to(dtype), self.weight.to(dtype), self.down, self.bias
        if down is not None:
            inner = F.linear(inner, down.to(dtype))
        # Not `addmm`: it copies the output first, and under autocast it would round the stream itself.
        return output + F.linear(inner, weight, None if bias is None else bias.to(dtype))


@dataclass
class GatesConfig:
    """Which layers of a model have gates, and of which kind."""

    kind: Annotated[Choice, PartOf(gate_kinds, "vector")] = "vector"  # type: ignore[assignment]
    """What a gate computes: one factor for each channel, one for all, or a matrix."""
    layers: list[Layers] | None = None
    """The layers, counted from 1 over all stages; by default all but the first."""

    def for_depth(self, depth: int) -> "GatesConfig":
        """The configuration with its layers listed, for a model of so many layers."""
        layers = list(range(2, depth + 1)) if self.layers is None else sorted(self.layers)
        if not layers:
            raise BraidError("gates.layers: no layer is left" if depth > 1 else "gates: a model of one layer has none")
        if len(set(layers)) < len(layers):
            raise BraidError("gates.layers: a layer is listed twice")
        if layers[-1] > depth:
            raise BraidError(f"gates.layers: there is no layer {layers[-1]}: the model has {depth}")
        return replace(self, layers=layers)

    def add_to(self, stages: Any, width: int) -> None:
        """Give layers of a Braid model their gates."""
        number = 0
        for stage in stages:
            layers: Any = getattr(stage, "layers", ())
            for index, layer in enumerate(layers):
                number += 1
                width_in, width = width, getattr(layer, "width_out", width)
                if number in (self.layers or ()):
                    if width != width_in:
                        what = f"layer {number} changes the stream's width, from {width_in} to {width}: no gate fits it"
                        raise BraidError(what, "gates.layers", "List the other layers.")
                    layers[index] = gated(layer, make_gate(self.kind, width))
            width = stage.width_out


def make_gate(choice: Choice, width: int) -> Gate:
    """A gate at zero."""
    gate: Gate = gate_kinds.build(choice, width)
    gate.choice = choice
    for parameter in gate.parameters():
        fill_gate(gate, parameter)
    return gate


class GatedLayer(nn.Module):
    """Mixed into the class of a layer: what the layer returns, plus what its gate makes of the layer's input."""

    gate: Gate
    plain_class: type[nn.Module]  # the layer's own class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A Module's own calls take longer than the product of a factor, which a pass of one text would feel. They are
        # left out where no gradient, no hook and no other `forward` of this very layer (accelerate's) needs them. What
        # follows is `forward` written out: one more function for both would take a fifth of a gate's time.
        gate: Any = self._modules["gate"]
        hooks = self._forward_hooks or self._forward_pre_hooks or gate._forward_hooks or gate._forward_pre_hooks
        if torch.is_grad_enabled() or hooks or _has_any_global_hook() or "forward" in self.__dict__:
            return super().__call__(*args, **kwargs)
        output: Any = self.plain_class.forward(self, *args, **kwargs)
        if gate.is_off:
            return output
        hidden = args[0] if args else kwargs["hidden_states"]
        if isinstance(output, Tensor):
            return gate.add(hidden, output)
        return (gate.add(hidden, output[0]), *output[1:])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)  # type: ignore[misc]
        hidden = args[0] if args else kwargs["hidden_states"]
        if isinstance(output, Tensor):
            return self.gate(hidden, output)
        return (self.gate(hidden, output[0]), *output[1:])


@cache
def gated_class(plain: type[nn.Module]) -> type[GatedLayer]:
    """A layer's class with a gate. It keeps the name, by which other libraries know what not to divide."""
    names = {"__module__": plain.__module__, "__doc__": plain.__doc__, "plain_class": plain}
    return type(plain.__name__, (GatedLayer, plain), names)  # type: ignore[return-value]


def gated(layer: nn.Module, gate: Gate) -> GatedLayer:
    """The layer with a gate: a new module, which holds what the layer holds, under the same names, and the gate."""
    if isinstance(layer, GatedLayer):
        raise BraidError("this layer has a gate already")
    if hasattr(layer, "gate"):
        raise BraidError(f"{type(layer).__name__} has a part of its own that is called 'gate'")
    made = object.__new__(gated_class(type(layer)))  # type: ignore[arg-type]
    made.__dict__ = layer.__dict__ | {"_modules": {**layer._modules, "gate": gate}}
    return made


def ungated(layer: GatedLayer) -> nn.Module:
    """The layer without its gate: a new module of its own class, which holds everything else."""
    made = object.__new__(layer.plain_class)
    others = {name: child for name, child in layer._modules.items() if name != "gate"}
    made.__dict__ = layer.__dict__ | {"_modules": others}
    return made


class GatedDecoder:
    """Mixed into a decoder's class: gates around the layers that `config.gates` lists.

    `config.gates` has `kind` (with its options), `layers` (counted from 1) and `inside`, the name of their list.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        options = dict(config.gates["kind"])
        kind = options.pop("kind")
        choice = Choice(kind, gate_kinds[kind].Config(**options))
        model: Any = self
        layers, width = model.get_submodule(config.gates["inside"]), config.get_text_config().hidden_size
        for number in config.gates["layers"]:
            layers[number - 1] = gated(layers[number - 1], make_gate(choice, width))
