"""Tables of addresses, through which one launch reads many tensors."""

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
