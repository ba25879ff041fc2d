"""GPUs by their data sheets, and what a plan is told of machines with them; without torch."""

from dataclasses import dataclass

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.model.config.ranges import Count, Positive

PEAK_BF16 = {
    "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "A10G": 70e12, "A10": 125e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "RTX A6000": 155e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip
"""Dense bf16 (or fp16 where there is no bf16) FLOP/s of the matrix units, by the vendors' data sheets."""
GPU_MEMORY = {
    "H200": 141, "H100": 80, "A100": 80, "L40S": 48, "L40": 48, "L4": 24, "A10G": 24, "A10": 24,
    "RTX 4090": 24, "RTX 3090": 24, "RTX A6000": 48, "V100": 32, "T4": 16,
}  # fmt: skip
"""GB of memory, of the larger kind where there are two."""


@dataclass
class Machines:
    """What a plan is told of the machines."""

    gpu: str = "H200"
    """The GPU, by the name in its data sheet: H200, H100, A100, L40S, L4 and others."""
    per_machine: Count = 8
    """GPUs of one machine."""
    within: Positive = 450.0
    """GB/s that a GPU sends to others of its machine: 450 is NVLink of an H100 or H200; PCIe 4 has about 25."""
    between: Positive = 50.0
    """GB/s that a GPU sends to other machines: 50 is a network card of 400 Gb/s for each GPU."""
    utilisation: Positive = 0.3
    """The share of the GPU's bf16 peak that is reached while it computes: the MFU of a run's log."""

    def __post_init__(self) -> None:
        if self.gpu not in GPU_MEMORY:
            raise BraidError(f"--gpu: '{self.gpu}' is not known.{did_you_mean(self.gpu, GPU_MEMORY)}")
