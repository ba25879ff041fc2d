"""Values that follow from tensors and are computed again once these have changed."""

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

V = TypeVar("V")


class Remembered(Generic[V]):
    """One such value; it is not part of a module's state."""

    def __init__(self) -> None:
        self.state: Any = None
        self.value: V | None = None

    @torch.compiler.disable  # it looks at addresses of tensors
    def get(self, tensors: Iterable[Tensor], compute: Callable[[], V], *also: Any) -> V:
        """The value of `compute`, which depends on the tensors and on `also`."""
        state = (*also, *map(_state, tensors))
        if self.value is None or state != self.state:
            # A tensor that is made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                self.value, self.state = compute(), state
        return self.value

    def forget(self) -> None:
        """Free the memory."""
        self.state = self.value = None


def _state(tensor: Tensor) -> tuple[Any, ...]:
    """Differs after a tensor was written to, moved or replaced."""
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tensor.device
