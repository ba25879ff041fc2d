"""Which parts of a model kernels serve.

A part that is refused runs its own plain forward inside the same pass, so that only its layer is slower.
"""

from typing import Any

from torch import nn

from braidlm.kernels.honoured_options import refusal
from braidlm.model.block import Block
from braidlm.model.mixture_of_depths import MixtureOfDepths, MixtureOfDepthsStage
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.parallel import ParallelStage
from braidlm.model.stages import BlockStage


class Lowered:
    """Which parts of a model kernels serve, and why the others run their plain forward."""

    def __init__(self, model: BraidForCausalLM):
        self.body: Any = model.model
        self.parts: set[nn.Module] = set()
        self.refusals: dict[str, str] = {}
        """By the address of a part in the model."""
        self.layers: list[tuple[Any, nn.Module]] = []
        """Stage and layer, in order; a stage that has no layers of its own is its only layer."""
        self.addresses: list[str] = []
        """Of the layers."""
        self.skips = _skipped_layers(self.body)
        """Why every layer is refused, if only the plain pass knows which of them are run."""
        positions = refusal(self.body.positions, self.body)
        self._add("embedding", self.body.embedding, positions and f"positions: {positions}")
        for index, stage in enumerate(self.body.stages):
            if type(stage) in (BlockStage, MixtureOfDepthsStage, ParallelStage):
                layers: Any = stage.layers
                for number, layer in enumerate(layers):
                    self._add_layer(f"stages.{index}.layers.{number}", stage, layer)
            else:
                self._add_layer(f"stages.{index}", stage, stage)
        self._add("norm", self.body.norm)
        self._add("head", model.head)

    @property
    def serves_layers(self) -> bool:
        """Whether kernels serve at least a part of a layer."""
        parts = [(layer.attention, layer.feed) if isinstance(layer, Block) else (layer,) for _, layer in self.layers]
        return any(part in self.parts for some in parts for part in some)

    def summary(self) -> str:
        """One line: how many layers are lowered, and what is not with its reason."""
        plain: dict[str, list[str]] = {}
        for address, reason in self.refusals.items():
            plain.setdefault(reason, []).append(address)
        partly = {address for address in self.addresses for refused in self.refusals if _is_in(refused, address)}
        text = f"kernels serve {len(self.addresses) - len(partly)} of {len(self.addresses)} layers whole"
        for reason, refused in plain.items():
            shown = ", ".join(refused[:3]) + (f" and {len(refused) - 3} more" if len(refused) > 3 else "")
            text += f"; plain: {shown} ({reason})"
        return text

    def _add_layer(self, address: str, stage: Any, layer: Any) -> None:
        self.layers.append((stage, layer))
        self.addresses.append(address)
        if not self._add(address, layer, self.skips):
            return
        if isinstance(layer, MixtureOfDepths):
            self.parts |= {layer.block, layer.block.attention, layer.block.feed}
        if isinstance(layer, Block):
            for name, norm in (("attention", layer.attention_norm), ("feed", layer.feed_norm)):
                reason = refusal(norm, self.body)
                self._add(f"{address}.{name}", getattr(layer, name), reason and f"norm: {reason}")

    def _add(self, address: str, part: nn.Module, reason: str | None = None) -> bool:
        reason = reason or refusal(part, self.body)
        if reason is None:
            self.parts.add(part)
        else:
            self.refusals[address] = reason
        return reason is None


def _skipped_layers(body: Any) -> str | None:
    if any(stage.training and getattr(stage, "drops", None) is not None for stage in body.stages):
        return "texts pass by layers at random (dropout.layer)"
    return None if body.exit_layer is None else f"passes end after layer {body.exit_layer}"


def _is_in(part: str, layer: str) -> bool:
    return part == layer or part.startswith(f"{layer}.")
