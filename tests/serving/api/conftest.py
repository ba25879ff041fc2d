"""What the tests of the API share: one server with two small models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from braidlm.serving.api.safety import Limits
from tests.serving.servers import Running, running, save_chat_model


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two paths and a template for chats."""
    return save_chat_model(tmp_path_factory.mktemp("served") / "chat")


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without paths, and without a template."""
    return save_chat_model(tmp_path_factory.mktemp("served") / "plain", None, 1, stages=["block"])


@pytest.fixture(scope="session")
def served(chat_model: Path, plain_model: Path) -> Iterator[Running]:
    """Both of them."""
    with running([chat_model, plain_model], Limits(max_body=200_000, max_seconds=60, body_seconds=1)) as server:
        yield server


@pytest.fixture(autouse=True)
def _rows_return(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, no row is lost."""
    from tests.serving.servers import until

    yield
    if "served" in request.fixturenames:
        until(request.getfixturevalue("served").all_rows_are_free)
