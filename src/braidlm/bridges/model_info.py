"""Facts about a model of ours, from its configuration and modules without weights."""

from functools import cached_property
from typing import Any

from torch import Tensor

from braidlm.core.models.accounting import CountedModel
from braidlm.model.compression import sizes_of
from braidlm.model.config.braid_config import Architecture, BraidConfig
from braidlm.model.config.strict import encode
from braidlm.model.initialisation import LINEAR
from braidlm.model.stages import BlockStage

BODY = "model."
"""The beginning of the names of all tensors but the head's."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class ModelInfo:
    """What bridges and edits need to know; most formats hold only a plain stack of equal blocks."""

    def __init__(self, config: BraidConfig):
        self.config = config
        self.architecture: Architecture = config.decoded

    @cached_property
    def model(self) -> Any:
        return CountedModel(self.config)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the model on the meta device under the name that it is saved under."""
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in self.model.tied}

    def saved(self, tensor: str) -> str:
        """The name that a tensor is saved under; layers may share it."""
        return str(self.model.tied.get(tensor, tensor))

    @property
    def parameters(self) -> int:
        """How many numbers the saved tensors hold."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @cached_property
    def uses(self) -> dict[str, Tensor]:
        """The saved tensors, and shared ones under the names of every layer that uses them, without a tied head."""
        tied = {name for name in self.model.tied if not name.startswith(BODY)}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in tied}

    @cached_property
    def is_stack(self) -> bool:
        """Whether every stage consists of blocks; the properties below hold only for such a model."""
        return all(isinstance(stage, BlockStage) for stage in self.model.model.stages)

    @cached_property
    def layers(self) -> list[str]:
        """The addresses of the blocks in order."""
        sizes = enumerate(len(stage.layers) for stage in self.model.model.stages)
        return [f"model.stages.{stage}.layers.{layer}" for stage, layers in sizes for layer in range(layers)]

    @cached_property
    def block(self) -> Any:
        """The configuration of the first block, which stands for all."""
        return self.architecture.stages[0].options

    @cached_property
    def attention(self) -> Any:
        """The first block's attention, for its sizes."""
        return self.model.model.stages[0].layers[0].attention

    @property
    def has_plain_attention(self) -> bool:
        """Whether the blocks' attention is one softmax attention, and no bank of experts."""
        return self.is_stack and self.block.attention.kind == "softmax" and self.block.attention.options.experts is None

    @property
    def windows(self) -> list[int | None]:
        """The sliding window of each block's attention; None: it sees everything before."""
        options = [stage.options for stage in self.architecture.stages]
        return [getattr(own.attention.options, "window", None) for own in options for _ in range(own.layers)]

    @property
    def feed_hidden(self) -> int:
        """The inner size of the feed-forward."""
        return self.model.model.stages[0].layers[0].feed.out.in_features

    @property
    def token_ids(self) -> dict[str, Any]:
        """The ids of special tokens, also those that are None, because formats have other defaults."""
        return {name: getattr(self.config, name) for name in TOKEN_IDS}

    @property
    def initial_std(self) -> float:
        """The standard deviation for initialisation; 0.02 is the default of the formats."""
        return getattr(self.architecture.initialisation.options, "std", 0.02)

    def block_options(self, stage: int) -> dict[str, Any]:
        """The options of a stage's blocks. Defaults that follow from the width are made explicit, so that equal blocks
        compare equal however their recipes were written, and keep their sizes in a composed model."""
        options = encode(self.architecture.stages[stage].options)
        del options["layers"], options["share"]
        block = self.model.model.stages[stage].layers[0]
        attention, feed = (getattr(part, "bank", part) for part in (block.attention, block.feed))
        out = getattr(feed, "out", None)
        for part, key, value in (
            ("attention", "kv_heads", getattr(attention, "kv_heads", None)),
            ("attention", "head_dim", getattr(attention, "head_dim", None)),
            ("attention", "out_bias", getattr(getattr(attention, "out", None), "bias", None) is not None),
            ("feed", "hidden", sizes_of(out)[0] if isinstance(out, LINEAR) else None),
        ):
            if key in options[part]:
                options[part][key] = value
        return options

    def unequal_blocks(self, *parts: str, windows: bool = True) -> list[str]:
        """A problem for each stage whose blocks differ from the first stage's, in these parts or in any. Without
        `windows` it does not matter whether these differ."""
        problems = []
        first, *others = (self.block_options(stage) for stage in range(len(self.architecture.stages)))
        for stage, own in enumerate(others, start=1):
            if not windows:
                own["attention"]["window"] = first["attention"].get("window")
            if differing := " and ".join(part for part in parts or own if own[part] != first[part]):
                problems.append(f"the blocks of stage {stage} have another {differing} than those of stage 0")
        return problems

    def copied_weights(self) -> list[str]:
        """A note if layers share weights, because formats have weights of each layer."""
        if any(name.startswith(BODY) for name in self.model.tied):
            return ["layers share weights; each has a copy of its own there (logits do not change)"]
        return []

    def uneven_dropout(self) -> list[str]:
        """A note if stages have different dropout, because formats have one rate for all."""
        if len({str(encode(stage.options.dropout)) for stage in self.architecture.stages}) > 1:
            return ["stages have different dropout; the first stage's is written for all (logits do not change)"]
        return []


def stack_problems(info: ModelInfo, title: str, positions: str, norm: str, feed: str) -> list[str]:
    """Why a model is not a plain stack of equal blocks of these kinds with a plain embedding and head. Sliding windows
    are each format's own concern."""
    architecture, block = info.architecture, info.block
    problems = [
        f"stage {i} is '{choice.kind}'; {title} is a plain stack of blocks"
        for i, (choice, stage) in enumerate(zip(architecture.stages, info.model.model.stages, strict=True))
        if not isinstance(stage, BlockStage)
    ]
    kinds = {"positions are": (architecture.positions.kind, positions)}
    if info.is_stack:
        kinds |= {"the norm is": (block.norm.kind, norm), "the feed-forward is": (block.feed.kind, feed)}
    problems += [f"{what} '{kind}'; {title} has '{own}'" for what, (kind, own) in kinds.items() if kind != own]
    if not info.is_stack:
        return problems
    problems += info.unequal_blocks("norm", "attention", "feed", windows=False)
    problems += [
        f"matrices are compressed ({one.kind}); {title} stores each as it is" for one in architecture.compression
    ]
    if encode(architecture.norm) != encode(block.norm):
        problems.append(f"the norm before the head differs from that of the blocks; {title} has one kind throughout")
    for what, part in {"attention": block.attention, "the feed-forward": block.feed}.items():
        if getattr(part.options, "experts", None) is not None:
            problems.append(f"{what} has experts; {title}'s has none")
    if architecture.embedding.kind != "tokens":
        problems.append(f"the embedding is '{architecture.embedding.kind}'; {title} embeds tokens")
    if architecture.head.kind != "linear":
        problems.append(f"the head is '{architecture.head.kind}'; {title}'s is linear")
    elif architecture.head.options.bias:
        problems.append(f"the head has a bias; {title}'s has none")
    if block.attention.kind != "softmax":
        problems.append(f"attention is '{block.attention.kind}'; {title}'s is softmax")
    elif not block.attention.options.out_projection:
        problems.append(f"attention has no output projection (out_projection: false); {title}'s always has one")
    return problems


def window_problems(info: ModelInfo, title: str) -> list[str]:
    """A problem for each sliding window, where a format has none."""
    return [
        f"attention has a sliding window of {window}; {title}'s sees everything before"
        for window in dict.fromkeys(info.windows)
        if window is not None
    ]
