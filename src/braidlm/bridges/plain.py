"""A model of ours as bridges ask for it; most formats know only a plain stack of equal blocks."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from braidlm.core.models.accounting import skeleton
from braidlm.model.config.architecture import Architecture
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.strict import encode
from braidlm.model.stages import BlockStage


@dataclass
class PlainModel:
    """Facts that bridges ask for, from the configuration and from modules without memory."""

    config: BraidConfig

    @cached_property
    def architecture(self) -> Architecture:
        return self.config.decoded()

    @cached_property
    def model(self) -> Any:
        return skeleton(self.config)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the model, without memory; a tied head is the embedding and not listed."""
        tensors = dict(self.model.state_dict())
        if self.architecture.tie_embeddings:
            del tensors["head.weight"]
        return tensors

    @cached_property
    def is_stack(self) -> bool:
        """Whether there is nothing but blocks, so that the facts below can be asked for."""
        return all(isinstance(stage, BlockStage) for stage in self.model.model.stages)

    @cached_property
    def layers(self) -> list[str]:
        """The addresses of the blocks in order."""
        return [
            f"model.stages.{s}.layers.{i}"
            for s, stage in enumerate(self.model.model.stages)
            for i in range(len(stage.layers))
        ]

    @cached_property
    def block(self) -> Any:
        """The configuration of the first block, for which all stand."""
        return self.architecture.stages[0].options

    @cached_property
    def attention(self) -> Any:
        """The first attention, whose sizes are known."""
        return self.model.model.stages[0].layers[0].attention

    @property
    def feed_hidden(self) -> int:
        """The inner size of the feed-forward."""
        return self.model.model.stages[0].layers[0].feed.out.in_features

    @property
    def token_ids(self) -> dict[str, Any]:
        """The ids of special tokens; named also when None, because formats have defaults of their own."""
        return {name: getattr(self.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}

    @property
    def initial_std(self) -> float:
        """For training on in the other format; 0.02 is what the formats themselves take."""
        return getattr(self.architecture.initialisation.options, "std", 0.02)

    def uneven_dropout(self) -> list[str]:
        """A note where stages have different dropout, of which formats know one."""
        if len({str(encode(stage.options.dropout)) for stage in self.architecture.stages}) > 1:
            return ["stages have different dropout; the first stage's is written for all (logits do not change)"]
        return []


def stack_problems(plain: PlainModel, title: str) -> list[str]:
    """Why a model is not a plain stack of equal blocks with a plain embedding and head."""
    architecture = plain.architecture
    problems = [
        f"stage {i} is '{stage.kind}'; {title} is a plain stack of blocks"
        for i, stage in enumerate(architecture.stages)
        if not isinstance(plain.model.model.stages[i], BlockStage)
    ]
    if problems:
        return problems
    first = _described(plain, 0)
    for i in range(1, len(architecture.stages)):
        differing = [part for part, options in _described(plain, i).items() if options != first[part]]
        if differing:
            problems.append(f"the blocks of stage {i} have another {' and '.join(differing)} than those of stage 0")
    if encode(architecture.norm) != encode(plain.block.norm):
        problems.append(f"the norm before the head differs from that of the blocks; {title} has one kind throughout")
    if architecture.embedding.kind != "tokens":
        problems.append(f"the embedding is '{architecture.embedding.kind}'; {title} embeds tokens")
    if architecture.head.kind != "linear":
        problems.append(f"the head is '{architecture.head.kind}'; {title}'s is linear")
    elif architecture.head.options.bias:
        problems.append(f"the head has a bias; {title}'s has none")
    if plain.block.attention.kind == "softmax":
        problems += _attention_problems(plain.block.attention.options, title)
    else:
        problems.append(f"attention is '{plain.block.attention.kind}'; {title}'s is softmax")
    return problems


def wrong_kind(what: str, kind: str, wanted: str, title: str) -> list[str]:
    """A problem if a part is of another kind than the format's."""
    return [] if kind == wanted else [f"{what} '{kind}'; {title} has '{wanted}'"]


def _attention_problems(options: Any, title: str) -> list[str]:
    problems = []
    if not options.out_projection:
        problems.append(f"attention has no output projection (out_projection: false); {title}'s always has one")
    if options.window is not None:
        problems.append(f"attention has a sliding window of {options.window}; {title}'s sees everything before")
    return problems


def _described(plain: PlainModel, index: int) -> dict[str, Any]:
    """A stage's block with defaults spelled out, so that equal blocks are equal however they were written."""
    options, block = plain.architecture.stages[index].options, plain.model.model.stages[index].layers[0]
    parts = {name: encode(getattr(options, name)) for name in ("norm", "attention", "feed")}
    for part, name, value in (
        ("attention", "kv_heads", getattr(block.attention, "kv_heads", None)),
        ("attention", "head_dim", getattr(block.attention, "head_dim", None)),
        ("feed", "hidden", getattr(getattr(block.feed, "out", None), "in_features", None)),
    ):
        if name in parts[part]:
            parts[part][name] = value
    return parts
