"""How often an edit builds models: its source for the plan and again where both are compared, and the new one."""

from pathlib import Path
from typing import Any

import pytest

from braidlm.edits.compose import compose
from braidlm.edits.edit import edit
from tests.edits.small_models import BANKS, model_folder, text_file
from tests.tiny_models import models_built


@pytest.mark.parametrize(
    ("kind", "options", "times"),
    [
        ("share", {"what": "feeds"}, 2),
        ("insert", {"modules": 1}, 3),
        ("gate", {}, 3),
        ("quantize", {}, 3),
        ("prune", {"threshold": 0.0}, 4),
    ],
)
def test_each_model_is_built_for_one_purpose(tmp_path: Path, kind: str, options: dict[str, Any], times: int) -> None:
    """Prune runs its source before the plan too, to measure the use of its modules."""
    folder = model_folder(tmp_path / "m", **({} if kind == "share" else BANKS))
    text = {"text": str(text_file(tmp_path))} if kind == "prune" else {}
    with models_built() as built:
        edit(kind, folder, tmp_path / "out", **options, **text)
    assert len(built) == times


@pytest.mark.parametrize(("join", "times"), [("shared_linear", 3), ("average", 5)])
def test_composing_builds_each_model_for_one_purpose(tmp_path: Path, join: str, times: int) -> None:
    paths = [model_folder(tmp_path / name) for name in ("a", "b")]
    with models_built() as built:
        compose(paths, tmp_path / "out", join=join)
    assert len(built) == times


def test_a_dry_run_builds_the_old_model_and_the_new_one(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", **BANKS)
    with models_built() as built:
        edit("insert", folder, dry_run=True, modules=1)
    assert len(built) == 2
