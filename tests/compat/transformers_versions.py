"""Every tiny recipe's folder under other versions of Transformers, in environments of their own: `make compat`.

pytest collects this file only when it is named, since the environments take minutes to install.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from braidlm.core.models.folders import load_model
from tests.compat.tiny_folders import TINY, TinyFolders, check_without_braid, save_tiny_folders
from tests.tiny_models import random_ids

ENVIRONMENTS = Path(__file__).parents[2] / ".venvs"
VERSIONS = ("4.51.3", "4.57.6", "5.0.0", "newest")
TOLERANCE = 1e-5
"""Sums round as the memory that they read is aligned, in processes of one version too."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> TinyFolders:
    return save_tiny_folders(tmp_path_factory.mktemp("saved") / "folders")


@pytest.fixture(scope="module", params=VERSIONS)
def checked(request: Any, saved: TinyFolders) -> tuple[Path, dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Where a process of that version saved its models, what it says, and what it computed."""
    version = request.param
    python = ENVIRONMENTS / f"transformers-{version}" / "bin" / "python"
    out = saved.root.parent / version
    facts, measured = check_without_braid(saved.root, out, python, trains=True)
    assert version in ("newest", facts["transformers"])
    assert facts["imported"] == []
    return out, facts, measured


@pytest.mark.parametrize("name", TINY)
def test_it_computes_the_same(name: str, saved: TinyFolders, checked: Any) -> None:
    _, facts, measured = checked
    expected = dict(saved.measured[name])
    if facts["transformers"] == "5.0.0":
        del expected["drafted"]
    assert measured[name].keys() == expected.keys()
    assert torch.equal(measured[name]["generated"], expected["generated"])
    torch.testing.assert_close(measured[name], expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert facts[name]["text"] == saved.text[name]
    assert facts[name]["example"].startswith("Once upon a time")
    assert max(facts[name]["half"]) < 0.05


@pytest.mark.parametrize("name", TINY)
def test_it_saves_itself_again(name: str, saved: TinyFolders, checked: Any) -> None:
    out, facts, _ = checked
    assert facts[name]["code"] == ["modeling_braid.py"]
    assert facts[name]["again"]
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(load_model(out / name)(ids).logits, saved.models[name](ids).logits)


@pytest.mark.parametrize("name", TINY)
def test_it_trains_with_trainer(name: str, checked: Any) -> None:
    before, after = checked[1][name]["trainer"]["losses"]
    assert after < 0.7 * before
    assert checked[1][name]["trainer"]["again"]


@pytest.mark.parametrize("name", TINY)
def test_it_trains_with_lora(name: str, checked: Any) -> None:
    lora = checked[1][name]["lora"]
    before, after = lora["losses"]
    if name == "average":  # its blocks are stacks, which adapters for linear layers pass by
        assert after < before
        assert lora["changed"] == ["head.mixture.router.weight"]
    else:
        assert after < before - 0.5
    assert lora["again"]
    if name != "shared":  # what one layer's adapter adds cannot be merged into a matrix that layers share
        assert lora["merge_error"] < 1e-4
    assert all(part.endswith(".weight") for part in lora["changed"])
    if name == "moep":
        assert any(".router." in part for part in lora["changed"])
