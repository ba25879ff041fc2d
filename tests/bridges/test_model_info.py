"""What a format loses: the blocks of each stage are compared with those of its own layers."""

from typing import Any

from braidlm.bridges.bridge import bridges
from braidlm.bridges.model_info import ModelInfo
from braidlm.model.config.braid_config import BraidConfig


def lost(to: str, *stages: dict[str, Any]) -> list[str]:
    """Why a format cannot express a model of these stages."""
    config = BraidConfig({"width": 32, "context": 24, "stages": [*stages]}, vocab_size=67)
    return bridges[to]().export_problems(ModelInfo(config))


def blocks(layers: int, window: int | None) -> dict[str, Any]:
    return {"block": {"layers": layers, "attention": {"heads": 4, "window": window}}}


def test_stages_of_several_layers_are_compared_with_their_own() -> None:
    assert lost("qwen2", blocks(2, None), blocks(1, 4)) == []
    assert lost("qwen2", blocks(3, None), blocks(2, 4), blocks(1, None)) == []
    said = ["stages[2].block.attention.window is 6; Qwen2 has 4"]
    assert lost("qwen2", blocks(2, None), blocks(2, 4), blocks(1, 6)) == said
