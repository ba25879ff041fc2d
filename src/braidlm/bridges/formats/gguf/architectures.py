"""The architectures of llama.cpp that Braid writes: Llama and GPT-2, as their bridges to Hugging Face know them."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from braidlm.bridges.formats.gpt2 import GPT2Bridge
from braidlm.bridges.formats.llama import LlamaBridge
from braidlm.bridges.hugging_face import HuggingFaceBridge
from braidlm.bridges.model_info import ModelInfo
from braidlm.model.attention.positions import RopeScaling, rope_scalings


class LlamaCppArchitecture(HuggingFaceBridge):
    """A bridge to Hugging Face whose models llama.cpp knows; here tensors still have Hugging Face's names."""

    name: ClassVar[str]
    """As `general.architecture` has it."""

    @abstractmethod
    def add_hyperparameters(self, writer: Any, info: ModelInfo) -> None:
        """Give gguf's writer the sizes and constants of a model."""

    def constants(self, info: ModelInfo) -> dict[str, Tensor]:
        """Tensors that llama.cpp reads and that nobody has trained."""
        return {}


class LlamaCppLlama(LlamaBridge, LlamaCppArchitecture):
    """Llama, whose queries and keys llama.cpp rotates in neighbouring pairs."""

    title = "llama.cpp's Llama"
    name = "llama"
    pairs = "interleaved"

    def add_hyperparameters(self, writer: Any, info: ModelInfo) -> None:
        attention = info.attention
        _add_sizes(writer, info)
        writer.add_head_count_kv(attention.kv_heads)
        writer.add_key_length(attention.head_dim)
        writer.add_value_length(attention.head_dim)
        writer.add_layer_norm_rms_eps(info.block.norm.options.eps)
        writer.add_rope_dimension_count(attention.head_dim)
        writer.add_rope_freq_base(info.architecture.positions.options.theta)
        if (scaling := _scaling(info)) is not None:
            writer.add_rope_scaling_attn_factors(scaling.attention_factor)

    def constants(self, info: ModelInfo) -> dict[str, Tensor]:
        """What llama.cpp divides the frequency of each pair by.

        They express every scaling, where llama.cpp's own linear and YaRN scalings have other options than ours.
        """
        if (scaling := _scaling(info)) is None:
            return {}
        theta, head_dim = info.architecture.positions.options.theta, info.attention.head_dim
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        return {"rope_freqs.weight": frequencies / scaling.scale(frequencies, theta)}


class LlamaCppGPT2(GPT2Bridge, LlamaCppArchitecture):
    """GPT-2, whose activation is the approximation of GELU by tanh."""

    title = "llama.cpp's GPT-2"
    name = "gpt2"

    def export_problems(self, info: ModelInfo) -> list[str]:
        problems = super().export_problems(info)
        if info.is_stack and info.block.feed.kind == "mlp":
            activation = info.block.feed.options.activation
            if activation != "gelu_new":
                problems.append(f"the activation is '{activation}'; {self.title} has 'gelu_new'")
        return problems

    def add_hyperparameters(self, writer: Any, info: ModelInfo) -> None:
        _add_sizes(writer, info)
        writer.add_layer_norm_eps(info.block.norm.options.eps)


def _add_sizes(writer: Any, info: ModelInfo) -> None:
    writer.add_vocab_size(info.config.vocab_size)
    writer.add_context_length(info.architecture.context)
    writer.add_embedding_length(info.architecture.width)
    writer.add_block_count(len(info.layers))
    writer.add_feed_forward_length(info.feed_hidden)
    writer.add_head_count(info.attention.heads)


def _scaling(info: ModelInfo) -> RopeScaling | None:
    choice = info.architecture.positions.options.scaling
    return None if choice is None else rope_scalings.build(choice)
