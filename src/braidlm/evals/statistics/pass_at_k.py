"""pass@k: the chance that one of k samples passes, estimated without bias from more than k (Chen and others, 2021)."""

import numpy as np


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """1 - C(samples - passed, k) / C(samples, k): k of the samples drawn without replacement, at least one passes.

    As a product of ratios below 1, because the binomials themselves overflow.
    """
    if not 0 <= passed <= samples:
        raise ValueError(f"{passed} of {samples} samples cannot have passed")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples")
    if samples - passed < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - passed + 1, samples + 1)))
