"""Mistral as Hugging Face stores it: Llama with one sliding window for all layers, and without biases."""

from typing import Any

from transformers import MistralConfig, MistralForCausalLM

from braidlm.bridges.bridge import bridges
from braidlm.bridges.formats.llama import LlamaBridge, feed_bias_problems
from braidlm.bridges.model_info import ModelInfo


@bridges.register("mistral")
class MistralBridge(LlamaBridge):
    """MistralForCausalLM."""

    title = "Mistral"
    config_class = MistralConfig
    model_class = MistralForCausalLM

    def import_problems(self, config: Any) -> list[str]:
        kinds = sorted(set(getattr(config, "layer_types", None) or ()))
        mixed = [f"layers have attention of several types ({', '.join(kinds)}), which Mistral does not have"]
        return super().import_problems(config) + (mixed if len(kinds) > 1 else [])

    def windows(self, config: Any) -> list[int | None]:
        return [config.sliding_window] * config.num_hidden_layers

    def window_problems(self, info: ModelInfo) -> list[str]:
        if len(set(info.windows)) == 1:
            return []
        shown = ", ".join("none" if window is None else str(window) for window in dict.fromkeys(info.windows))
        return [f"layers have different sliding windows ({shown}); Mistral has one for all"]

    def window_settings(self, info: ModelInfo) -> dict[str, Any]:
        return {"sliding_window": info.windows[0]}

    def biases(self, config: Any) -> dict[str, bool | None]:
        return {"bias": False}

    def bias_problems(self, info: ModelInfo) -> list[str]:
        projections = (info.attention.qkv, info.attention.out)
        has_any = any(projection.bias is not None for projection in projections)
        attention = ["attention has biases; Mistral's has none"] if has_any else []
        return attention + feed_bias_problems(info, self.title)

    def bias_settings(self, info: ModelInfo) -> dict[str, Any]:
        return {}
