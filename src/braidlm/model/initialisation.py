"""Initialisation of weights, from a module and the model's shape."""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from .config.ranges import NonNegative
from .config.registry import NoOptions, Registry
from .routing.stacked import StackedLinear, fan_in, fill_like_torch, is_vector

initialisations = Registry("initialisation", third_party=True)
LINEAR = (nn.Linear, StackedLinear)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that an initialisation may depend on."""

    width: int
    depth: int  # the number of blocks in sequence


class Initialisation:
    """The base class: subclasses fill matrices; biases begin at 0 and other vectors at 1 in all of them."""

    Config: Any = NoOptions

    def __init__(self, config: Any, shape: ModelShape):
        self.config, self.shape = config, shape

    def __call__(self, module: nn.Module, writes_stream: bool) -> None:
        if getattr(module, "keeps_values", False):  # codes of quantised matrices
            return
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                nn.init.zeros_(parameter)
            elif (fill := getattr(module, "fill", None)) is not None:
                fill(module, parameter)  # a low-rank addition and a gate begin at zero in all of them
            elif is_vector(module, parameter):
                nn.init.ones_(parameter)  # norm scales and the Swish beta
            elif getattr(module, "no_residual", False):
                self.matrix_without_residual(module, parameter)
            else:
                self.matrix(module, parameter, writes_stream)

    def matrix(self, module: nn.Module, parameter: nn.Parameter, writes_stream: bool) -> None:
        raise NotImplementedError("each initialisation fills matrices differently")

    def matrix_without_residual(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """For projections and joins without a residual: a smaller scale would shrink the stream with every layer."""
        nn.init.normal_(parameter, 0.0, 1 / math.sqrt(fan_in(module, parameter)))


@initialisations.register("normal")
class Normal(Initialisation):
    """Every matrix N(0, std), as in Llama and MoEP."""

    @dataclass
    class Config:
        std: NonNegative = 0.02
        """Standard deviation."""
        carriers: NonNegative | None = None
        """Standard deviation of projections and joins, which have no residual around them; by default 1 / sqrt(inputs),
        which keeps the stream's scale. MoEP's code has 0.02 here too."""

    def matrix(self, module: nn.Module, parameter: nn.Parameter, writes_stream: bool) -> None:
        nn.init.normal_(parameter, 0.0, self.config.std)

    def matrix_without_residual(self, module: nn.Module, parameter: nn.Parameter) -> None:
        if self.config.carriers is None:
            super().matrix_without_residual(module, parameter)
        else:
            nn.init.normal_(parameter, 0.0, self.config.carriers)


@initialisations.register("gpt2")
class ScaledNormal(Normal):
    """N(0, std), divided by sqrt(2 x depth) for output projections, as in GPT-2."""

    def matrix(self, module: nn.Module, parameter: nn.Parameter, writes_stream: bool) -> None:
        divisor = math.sqrt(2 * self.shape.depth) if writes_stream else 1.0
        nn.init.normal_(parameter, 0.0, self.config.std / divisor)


@initialisations.register("moduleformer")
class UniformExperts(Normal):
    """Matrices of experts uniform in +-1 / inputs, every other matrix N(0, std) (ModuleFormer's code)."""

    def matrix(self, module: nn.Module, parameter: nn.Parameter, writes_stream: bool) -> None:
        if isinstance(module, StackedLinear):
            bound = 1 / fan_in(module, parameter)
            nn.init.uniform_(parameter, -bound, bound)
        else:
            super().matrix(module, parameter, writes_stream)


@initialisations.register("small")
class Small(Initialisation):
    """N(0, sqrt(2 / 5 width)), and output projections N(0, 2 / depth sqrt(width)) (GPT-NeoX)."""

    def matrix(self, module: nn.Module, parameter: nn.Parameter, writes_stream: bool) -> None:
        wang = 2 / (self.shape.depth * math.sqrt(self.shape.width))
        nn.init.normal_(parameter, 0.0, wang if writes_stream else math.sqrt(2 / (5 * self.shape.width)))


@initialisations.register("fan_in")
class FanIn(Initialisation):
    """Matrices N(0, gain / sqrt(inputs)), embeddings N(0, embedding_std)."""

    @dataclass
    class Config:
        gain: NonNegative = 1.0
        """Standard deviation of a matrix times the root of its inputs."""
        embedding_std: NonNegative = 0.02
        """Standard deviation of embeddings and learned positions."""

    def matrix(self, module: nn.Module, parameter: nn.Parameter, writes_stream: bool) -> None:
        std = self.config.gain / math.sqrt(fan_in(module, parameter))
        nn.init.normal_(parameter, 0.0, std if isinstance(module, LINEAR) else self.config.embedding_std)


@initialisations.register("torch")
class TorchDefault(Initialisation):
    """torch's default: uniform in +-1/sqrt(inputs) for linear layers, N(0, 1) for embeddings (PaPaformer's code)."""

    def matrix(self, module: nn.Module, parameter: nn.Parameter, writes_stream: bool = False) -> None:
        if isinstance(module, LINEAR):
            fill_like_torch(module, parameter)
        else:
            nn.init.normal_(parameter)

    matrix_without_residual = matrix
