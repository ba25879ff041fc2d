"""What cases share: an empty folder to be in, and packed text."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from braidlm.data.packing.prepare import prepare
from braidlm.edits import matrices
from braidlm.training.monitoring import speed
from braidlm.training.step import compute


@pytest.fixture(scope="module", autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Relative paths lead to an empty folder, and speeds are not measured: a run computes as another of its recipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "_product_speed", lambda device: 1e9)
        patch.setattr(compute, "_time", lambda part, hidden, rest: 1.0)
        patch.setattr(matrices, "speeds", lambda models, length, steps: dict.fromkeys(models, 1.0))
        patch.chdir(tmp_path_factory.mktemp("empty"))
        yield


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two packed sets of one tokenizer that has a token for every role; of the second only answers are trained on."""
    home, tokens = tmp_path_factory.mktemp("sets"), ["eos=</s>", "pad=<pad>", "mask=<mask>", "<pause>"]
    stories: dict[str, object] = {"documents": 40, "tokenizer": "bpe", "vocab_size": 300, "special_tokens": tokens}
    maths = {"documents": 40, "tokenizer": home / "stories/tokenizer", "fields": ("question",), "answer": "answer"}
    for name, options in (("stories", stories), ("maths", maths)):
        prepare(name, home / name, workers=1, **options)  # type: ignore[arg-type]
    return {name: str(Path(home / name)) for name in ("stories", "maths")}
