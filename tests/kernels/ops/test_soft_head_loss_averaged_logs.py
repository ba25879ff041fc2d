"""Averaged probabilities by the kernel against the plain average."""

import pytest

pytest.importorskip("triton")
import torch

from braidlm.kernels.ops.soft_head_loss import averaged_logs
from braidlm.training.features.distill.teachers import averaged_log_probabilities


@pytest.mark.parametrize("shares", [[1.0], [0.25, 0.75], [0.1, 0.2, 0.3, 0.4]], ids=len)
@pytest.mark.parametrize("vocabulary", [37, 4997])
def test_it_equals_the_plain_average(shares: list[float], vocabulary: int, device: str, dtype: torch.dtype) -> None:
    """Rows may be cut out of wider ones, as those of a padded vocabulary are."""
    torch.manual_seed(0)
    wide = [3 * torch.randn(2, 3, vocabulary + 8, device=device).to(dtype) for _ in shares]
    logits = [each[..., :vocabulary] for each in wide]
    expected = averaged_log_probabilities(logits, shares, 1.0)
    found = averaged_logs(logits, shares)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)


def test_what_no_probability_in_float32_can_hold(device: str) -> None:
    logits = [torch.tensor([[0.0, -200.0, -300.0, -torch.inf]], device=device) for _ in range(2)]
    logits[1][0, 1] = -250.0
    found = averaged_logs(logits, [0.5, 0.5])[0].tolist()
    assert found == pytest.approx([0.0, -200 - 0.6931472, -300.0, -torch.inf], rel=1e-6, abs=1e-6)
