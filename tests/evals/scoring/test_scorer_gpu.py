"""In bf16 on a GPU whole texts are scored by kernels: the same scores as by the plain forward, to its rounding."""

import numpy as np
import pytest
import torch

from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import Scorer
from braidlm.kernels import lower
from tests.tiny_models import random_ids, tiny_model

ARCHITECTURES = {
    "dense": {"positions": "learned"},
    "modules": {
        "positions": "none",
        "block": {
            "norm": "layer",
            "attention": {"kind": "stick_breaking", "heads": 1, "experts": {"names": 2, "keys": "stream"}},
        },
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_by_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(**ARCHITECTURES[name]).cuda().eval()
    requests = [Request(tuple(ids), 1) for ids in random_ids(4, 12).tolist()]
    used = lower.lower_forward(model, torch.bfloat16)
    assert used is not None, "kernels serve this model"
    by_kernels = Scorer(model, dtype=torch.bfloat16, share=False).score(requests).tokens
    monkeypatch.setattr(lower, "HAS_TRITON", False)
    plain = Scorer(model, dtype=torch.bfloat16, share=False).score(requests).tokens
    exact = Scorer(model, share=False).score(requests).tokens
    assert np.abs(by_kernels - exact).max() <= 2 * np.abs(plain - exact).max() + 1e-2
