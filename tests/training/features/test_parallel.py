"""What does not go together with several processes is refused by name, before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from braidlm.core.errors import BraidError
from braidlm.training.recipe import decode_recipe
from braidlm.training.train import train
from tests.training.tiny_runs import tiny_recipe

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a graph": ({"graph": True, "parallel": "sharded"}, "training.graph: a step is replayed as a graph by one process"),
    "LoRA": ({"lora": {"rank": 2}, "parallel": "hybrid"}, "training.lora: adapters are merged into whole matrices"),
    "an unknown word": ({"parallel": "shraded"}, r"parallel\.weights: 'shraded' is not one of auto, replicated"),
    "an unknown key": ({"parallel": {"expert": 2}}, r"unknown key 'expert'.*'experts'"),
}


@pytest.mark.parametrize(("training", "message"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused(training: dict[str, Any], message: str, tmp_path: Path) -> None:
    recipe = tiny_recipe({"stories": tmp_path / "data"}, tmp_path / "run", training=training)
    with pytest.raises(BraidError, match=message):
        decode_recipe({**recipe, "start_from": "somewhere"})


def test_experts_that_a_model_does_not_have(stories: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe({"stories": stories}, tmp_path / "run", training={"parallel": {"experts": 2}})
    with pytest.raises(BraidError, match="this model has no bank of experts that processes could share"):
        train(recipe)
    assert not (tmp_path / "run").exists()
