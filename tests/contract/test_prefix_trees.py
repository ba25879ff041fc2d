"""Every registered part reads rows of prefix trees as it reads single sequences: scores may share common beginnings."""

import numpy as np
import pytest
import torch

from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import Scorer
from tests.contract.test_parts import IN_USE, VARIANTS
from tests.tiny_models import VOCABULARY, random_ids, tiny_model


def with_common_beginnings() -> list[Request]:
    stem = random_ids(1, 12, seed=5)[0].tolist()
    branches = [random_ids(1, 4, seed=seed)[0].tolist() for seed in range(6)]
    found = [Request([*stem[:keep], *branch]) for keep, branch in zip((0, 3, 3, 7, 12, 12), branches, strict=True)]
    return [*found, Request(stem), Request(stem[:5]), Request(random_ids(1, 9, seed=77)[0].tolist(), first=4)]


@pytest.mark.parametrize("variant", IN_USE)
def test_a_tree_gives_what_its_sequences_give(variant: str) -> None:
    model = tiny_model(torch.float64, **VARIANTS[variant])
    requests = with_common_beginnings()
    shared = Scorer(model, dtype=torch.float64).score(requests)
    alone = Scorer(model, share=False, tokens_per_pass=1, dtype=torch.float64).score(requests)
    assert len(shared.tokens) == sum(len(request.ids) - request.first for request in requests)
    np.testing.assert_allclose(shared.tokens, alone.tokens, rtol=0, atol=1e-9)
    assert (shared.tokens < 0).all()
    assert np.ptp(shared.tokens) > 0.1, f"a vocabulary of {VOCABULARY} should not look alike everywhere"
