"""Qwen2 as Hugging Face stores it: Llama with biases on queries, keys and values, and windows in some layers."""

from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM

from braidlm.bridges.bridge import bridges
from braidlm.bridges.formats.llama import LlamaBridge, feed_bias_problems
from braidlm.bridges.model_info import ModelInfo

FULL, SLIDING = "full_attention", "sliding_attention"


@bridges.register("qwen2")
class Qwen2Bridge(LlamaBridge):
    """Qwen2ForCausalLM."""

    title = "Qwen2"
    config_class = Qwen2Config
    model_class = Qwen2ForCausalLM
    zero_biases = True

    def import_problems(self, config: Any) -> list[str]:
        problems = super().import_problems(config)
        if unknown := sorted(set(config.layer_types) - {FULL, SLIDING}):
            problems.append(f"layers have attention of type {', '.join(unknown)}; Braid has {FULL} and {SLIDING}")
        if SLIDING in config.layer_types and config.sliding_window is None:
            problems.append(f"layer_types names {SLIDING}, but there is no sliding_window")
        return problems

    def windows(self, config: Any) -> list[int | None]:
        return [config.sliding_window if kind == SLIDING else None for kind in config.layer_types]

    def window_problems(self, info: ModelInfo) -> list[str]:
        different = sorted({window for window in info.windows if window is not None})
        if len(different) < 2:
            return []
        return [f"layers have different sliding windows ({', '.join(map(str, different))}); Qwen2 has one size"]

    def window_settings(self, info: ModelInfo) -> dict[str, Any]:
        window = next((window for window in info.windows if window is not None), None)
        if window is None:
            return {"use_sliding_window": False}
        kinds = [FULL if window is None else SLIDING for window in info.windows]
        # Versions before 4.53 know no types, and let the layers from this one on have the window.
        first = kinds.index(SLIDING)
        return {
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": first,
            "layer_types": kinds,
        }

    def biases(self, config: Any) -> dict[str, bool | None]:
        return {"bias": True, "out_bias": False}

    def bias_problems(self, info: ModelInfo) -> list[str]:
        problems = feed_bias_problems(info, self.title)
        if info.attention.out.bias is not None:
            problems.append("attention's output projection has a bias; Qwen2's has none")
        return problems

    def bias_settings(self, info: ModelInfo) -> dict[str, Any]:
        return {}

    def settings(self, info: ModelInfo) -> dict[str, Any]:
        settings = super().settings(info)
        if settings["head_dim"] * settings["num_attention_heads"] == settings["hidden_size"]:
            del settings["head_dim"]  # Qwen2 has the key for other sizes only
        return settings
