"""Layers that texts pass by at random, on a CPU."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from braidlm.kernels.replacing import is_eager_cpu_training, replaces
from braidlm.model.layer_skip import LayerDropout
from braidlm.model.routing.routing import Routings
from braidlm.model.span import Span


@replaces(LayerDropout, on=("cpu",))
class CpuLayerDropout(LayerDropout):
    """In training the texts that pass by a layer cost nothing."""

    def run_kept(self, kept: Tensor, layer: Callable[..., Any], hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        # Where no text is kept, the layer's gradients should still be zero and not missing.
        if self.can_skip_rows and span.is_same_for_all_texts and is_eager_cpu_training(hidden) and bool(kept.any()):
            rows = kept.nonzero()[:, 0]
            output, routings = layer(hidden[rows], span)
            return hidden.index_copy(0, rows, output), routings
        return super().run_kept(kept, layer, hidden, span)
