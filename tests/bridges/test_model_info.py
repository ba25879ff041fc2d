"""What a format loses: options are read back, those of each stage's blocks from its own layers."""

from typing import Any

from braidlm.bridges.formats.llama import Qwen2Bridge
from braidlm.bridges.formats.moduleformer import ModuleFormerBridge, ModuleFormerConfig
from braidlm.bridges.model_info import ModelInfo
from braidlm.model.config.braid_config import BraidConfig


def info(architecture: dict[str, Any]) -> ModelInfo:
    return ModelInfo(BraidConfig(architecture, vocab_size=67))


def blocks(layers: int, window: int | None) -> dict[str, Any]:
    return {"block": {"layers": layers, "attention": {"heads": 4, "window": window}}}


def test_stages_of_several_layers_are_compared_with_their_own() -> None:
    def lost(*stages: dict[str, Any]) -> list[str]:
        return Qwen2Bridge().export_problems(info({"width": 32, "context": 24, "stages": [*stages]}))

    assert lost(blocks(2, None), blocks(1, 4)) == []
    assert lost(blocks(3, None), blocks(2, 4), blocks(1, None)) == []
    said = ["stages[2].block.attention.window is 6; Qwen2 has 4"]
    assert lost(blocks(2, None), blocks(2, 4), blocks(1, 6)) == said


def test_of_a_router_all_is_compared_that_the_function_depends_on() -> None:
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2, "att_hidden": 16, "ffd_hidden": 24}
    config = ModuleFormerConfig(vocab_size=67, block_size=24, n_att_experts=3, n_mlp_experts=3, **sizes)

    def lost(**router: Any) -> list[str]:
        ours = config.architecture()
        ours["block"]["feed"]["experts"]["router"] |= router
        return ModuleFormerBridge().export_problems(info(ours))

    assert lost(noise=0.5, compute="dense") == []
    assert lost(renormalise=True) == ["block.feed.experts.router.renormalise is true; ModuleFormer has false"]
