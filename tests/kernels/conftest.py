"""The kernels' tests run in Triton's interpreter, and on the device where there is one."""

from pathlib import Path

import pytest
import torch

ON_DEVICE = torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a machine with a device `pytest -m gpu` runs all of them."""
    for item in items:
        if ON_DEVICE and Path(__file__).parent in item.path.parents:
            item.add_marker("gpu")


@pytest.fixture
def device() -> str:
    return "cuda" if ON_DEVICE else "cpu"


@pytest.fixture(params=[torch.float32, torch.bfloat16] if ON_DEVICE else [torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The type of activations."""
    return request.param
