"""What every test shares: no network, no caches outside a temporary folder, one thread for tiny models."""

import contextlib
import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import triton_interpreter, warm_python
from tests.outcome import Outcome

# In memory, where there is enough: on a disk each of the suite's thousands of writes waits until it is safe.
_memory = Path("/dev/shm")
if "TMPDIR" not in os.environ and os.access(_memory, os.W_OK) and shutil.disk_usage(_memory).free > 4 * 2**30:
    os.environ["TMPDIR"], tempfile.tempdir = str(_memory), None

# Before anything imports transformers, which reads these once.
_cache = tempfile.TemporaryDirectory(prefix="braid-tests-")
os.environ["HF_HOME"] = _cache.name
os.environ["HF_MODULES_CACHE"] = str(Path(_cache.name) / "modules")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# A shell lets what it starts in the background ignore Ctrl+C, which tests send to themselves and to commands.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The libraries and the collected tests are a million objects, which the collector would go through again and again.
gc.set_threshold(50_000, 20, 20)

if importlib.util.find_spec("triton") is not None:
    import torch

    # Before anything imports Triton, which reads it once: without a device its kernels run in the interpreter.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        triton_interpreter.hasten()

with contextlib.suppress(ImportError):  # a GPU machine may have no hypothesis; tests without properties run there
    from hypothesis import settings

    # Examples take milliseconds, but a busy machine may pause in the middle of one.
    settings.register_profile("braid", deadline=None, max_examples=50)
    settings.load_profile("braid")


def pytest_configure(config: pytest.Config) -> None:
    """The processes that share the tests share a warm Python too, which imports while they collect."""
    if config.getoption("numprocesses", None):
        warm_python.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a CUDA device. The fuzz tests come last, since their audit hook slows all others."""
    items.sort(key=lambda item: "fuzz" in item.path.parts)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What lives until the end need not be looked at for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports() -> Iterator[None]:
    """Nor need what a file's tests have imported, which training looks through before it measures its memory."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _parse_code_once() -> None:
    """The suite opens hundreds of folders with the same code."""
    if "transformers" in sys.modules:
        from tests.compat.check_folder import parse_code_once

        parse_code_once()


@pytest.fixture(autouse=True, scope="session")
def _few_trials() -> Iterator[None]:
    """Runs of a few steps need not know for certain which of two equal computations is faster."""
    compute = sys.modules.get("braidlm.training.step.compute")
    with pytest.MonkeyPatch.context() as patch:
        if compute is not None:
            patch.setattr(compute, "TRIALS", 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny models are slower on two threads, and the other core may be busy; nor do processes pack little text faster,
    of which `prepare` starts one for each core unless it is told how many."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 1)
        yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    """A test that forgets to seed still does the same every time."""
    import torch

    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():  # elsewhere torch writes down the stack for a device that may come, in a millisecond
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _not_quiet() -> Iterator[None]:
    """A command with --quiet or --json that ran in this process must not silence the tests after it."""
    from braidlm.core import console

    yield
    console.set_quiet(False)


@pytest.fixture
def braid(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run `braid ...` in this process."""
    from braidlm.cli.main import main

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed data set with a tokenizer of its own, for all tests that train."""
    from braidlm.data.packing.prepare import prepare

    folder = tmp_path_factory.mktemp("data") / "stories"
    prepare("stories", folder, documents=120, tokenizer="bpe", vocab_size=300, workers=1)
    return folder


@pytest.fixture(scope="session")
def maths(stories: Path) -> Path:
    """A second packed data set, with the tokenizer of the first."""
    from braidlm.data.packing.prepare import prepare

    folder = stories.parent / "maths"
    prepare("maths", folder, documents=120, tokenizer=stories / "tokenizer", workers=1)
    return folder
