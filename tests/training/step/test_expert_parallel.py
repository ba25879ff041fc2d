"""Which experts several processes can share, and what each of them keeps; that steps are equal: test_sharding."""

from typing import Any

import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.training.step.expert_parallel import check_banks, expert_banks, spread_banks
from tests.tiny_models import tiny_model

ROUTED = {"kind": "swiglu", "hidden": 24, "experts": {"names": 4, "router": {"top_k": 2}}}


class OneOfTwo:
    """A mesh in which this is the second of two processes."""

    def __getitem__(self, name: str) -> "OneOfTwo":
        return self

    def size(self) -> int:
        return 2

    def get_local_rank(self, name: str) -> int:
        return 1


def test_each_process_keeps_its_own_experts() -> None:
    model = tiny_model(block={"feed": ROUTED})
    whole = {name: parameter.clone() for name, parameter in model.named_parameters()}
    banks = spread_banks(model, OneOfTwo())  # type: ignore[arg-type]
    assert len(banks) == 2
    for name, parameter in model.named_parameters():
        expected = whole[name][2:] if ".bank." in name else whole[name]
        assert torch.equal(parameter, expected)
    assert {layer.stack for bank in banks for layer in (bank.gate_up, bank.out)} == {2}  # type: ignore[union-attr]
    assert all(part.compute == "sparse" for _, part, _ in expert_banks(model))


HEADS = {"heads": 2, "experts": {"names": 4, "router": {"top_k": 2}, "keys": "own"}}
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no experts": ({}, 2, "no bank of experts that processes could share"),
    "keys of their own": ({"block": {"attention": HEADS}}, 2, "no bank of experts that processes could share"),
    "a remainder": ({"block": {"feed": ROUTED}}, 3, r"3 processes cannot share 4 experts \(model\.stages\.0\.layers"),
    "shared": (
        {"stages": [{"block": {"layers": 2, "share": "feeds"}}], "block": {"feed": ROUTED}},
        2,
        "layers share these experts",
    ),
}


@pytest.mark.parametrize(("architecture", "processes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_shared_is_refused(architecture: dict[str, Any], processes: int, message: str) -> None:
    with pytest.raises(BraidError, match=message):
        check_banks(tiny_model(**architecture), processes)


def test_what_can_be_shared_is_not() -> None:
    check_banks(tiny_model(block={"feed": ROUTED}), 4)
