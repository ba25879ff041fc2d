"""What a launch over many tensors reads on the device: their addresses and sizes, and the factors of weights."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class AddressTable:
    """Integers [row, column] on the device: addresses and sizes, the same number of columns for each tensor."""

    def __init__(self, rows: int, columns: int, device: torch.device):
        self.tensor = torch.empty(rows, columns, dtype=torch.int64, device=device)
        self.captured: Tensor | None = None

    def write(self, rows: list[list[int]]) -> Tensor:
        """The table with these rows; inside of a capture, which refuses copies from the host, they are kept for later.

        Gradients have other addresses in a captured step than in the eager steps before.
        """
        if self.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            self.captured = torch.tensor(rows)
        else:
            self.tensor.copy_(torch.tensor(rows))
        return self.tensor

    def write_captured(self) -> None:
        """After a capture, write the rows that the captured step reads in each replay."""
        if self.captured is not None:
            self.tensor.copy_(self.captured)
            self.captured = None


def factors_of(parameters: Sequence[Tensor], factors: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """The factor of each parameter on its device, 1 for one that has none; a kernel reads them there in each step."""
    one = torch.ones((), device=parameters[0].device)
    return [factors.get(parameter, one) for parameter in parameters]
