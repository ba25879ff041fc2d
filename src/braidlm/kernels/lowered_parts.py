"""Which parts of a model kernels serve: the question that the pass, `braid show` and a run's log put to lowerings.

A part that is refused runs its own plain forward inside the same pass, so that only its layer is slower.
"""

from typing import Any

from torch import nn

from braidlm.kernels import lowerings
from braidlm.kernels.lowerings.lowering import refusal
from braidlm.kernels.planning import layer_inside, sublayers
from braidlm.model.config.registry import import_files
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.stages import Stage

import_files(lowerings.__name__)


class Lowered:
    """Which parts of a model kernels serve, and why the others run their plain forward."""

    def __init__(self, model: BraidForCausalLM):
        self.body: Any = model.model
        self.parts: set[nn.Module] = set()
        self.refusals: dict[str, str] = {}
        """By the address of a part in the model."""
        self.layers: list[tuple[Any, nn.Module]] = []
        """Stage and layer, in order; a stage that does not run its layers one by one is its only layer."""
        self.addresses: list[str] = []
        """The addresses of the layers."""
        self.skips = _skipped_layers(self.body)
        """Why every layer is refused, if only the plain pass knows which of them are run."""
        self._add("embedding", self.body.embedding)
        for index, stage in enumerate(self.body.stages):
            kind: Any = type(stage)
            if kind.forward is Stage.forward and kind.run_some is Stage.run_some:
                for number, layer in enumerate(stage.layers):  # type: ignore[arg-type]
                    self._add_layer(f"stages.{index}.layers.{number}", stage, layer)
            else:
                self._add_layer(f"stages.{index}", stage, stage)
        self._add("norm", self.body.norm)
        self._add("head", model.head)

    @property
    def serves_layers(self) -> bool:
        """Whether kernels serve at least a part of a layer."""
        parts = [[part for *_, part in sublayers(layer)] or [layer] for _, layer in self.layers]
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

    def _add_layer(self, address: str, stage: Any, layer: nn.Module) -> None:
        self.layers.append((stage, layer))
        self.addresses.append(address)
        if not self._add(address, layer, self.skips):
            return
        inside = layer_inside(layer, 1)
        if inside is not None:
            self.parts |= {inside[0], *(part for *_, part in sublayers(inside[0]))}
        for kind, norm, part in sublayers(layer):
            reason = refusal(norm, self.body)
            self._add(f"{address}.{kind}", part, reason and f"norm: {reason}")

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
