"""Facts about a model of ours, from its configuration and modules without weights."""

from functools import cached_property
from typing import Any

from torch import Tensor

from braidlm.core.differences import as_yaml, differences
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
    """What bridges and edits need to know; what is said of layers and blocks holds where every stage has blocks."""

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

    def unequal_blocks(self) -> list[str]:
        """A problem for each stage whose blocks differ from the first stage's."""
        problems = []
        first, *others = (self.block_options(stage) for stage in range(len(self.architecture.stages)))
        for stage, own in enumerate(others, start=1):
            if differing := " and ".join(part for part in own if own[part] != first[part]):
                problems.append(f"the blocks of stage {stage} have another {differing} than those of stage 0")
        return problems

    @cached_property
    def explicit(self) -> dict[str, Any]:
        """The architecture as plain data, where `block` is the first stage's, for formats that have one for all."""
        own, block = encode(self.architecture), self.block_options(0)
        dropout = own["dropout"] | block["dropout"]
        initialisation = own["initialisation"] | {"std": self.initial_std}
        return own | {"block": block, "dropout": dropout, "initialisation": initialisation, "layers": len(self.layers)}

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


def other_stages(info: ModelInfo, title: str) -> list[str]:
    """Why a model is not a plain stack of blocks."""
    stages = zip(info.architecture.stages, info.model.model.stages, strict=True)
    other = [(at, choice.kind) for at, (choice, stage) in enumerate(stages) if not isinstance(stage, BlockStage)]
    return [f"stage {at} is '{kind}'; {title} is a plain stack of blocks" for at, kind in other]


TRAINING_ONLY = ("dropout", "initialisation", "losses", "compute", "noise", "sampled")
"""Sections and options that the function of a trained model does not depend on."""


def function_of(options: Any) -> Any:
    """The options that decide about a function, without those that only training reads; experts need no names."""
    if isinstance(options, list):
        return [function_of(option) for option in options]
    if not isinstance(options, dict):
        return options
    own = {key: function_of(value) for key, value in options.items() if key not in TRAINING_ONLY}
    return own | ({"names": len(own["names"])} if "names" in own else {})


def lost_options(info: ModelInfo, again: ModelInfo, title: str, zero_biases: bool) -> list[str]:
    """The options that a stack of blocks has and that a format changes; `again` is what the format's model becomes.

    Where a format has `zero_biases`, zeros take the place of those that our model lacks.
    """
    ours, theirs = (function_of(encode(own.architecture)) for own in (info, again))
    for tree in (ours, theirs):
        tree["positions"].pop("pairs", None)  # rows of queries and keys are reordered
        del tree["stages"], tree["compression"]
    stages = info.model.model.stages
    blocks = [again.block_options(at) for at, stage in enumerate(again.model.model.stages) for _ in stage.layers]
    for number in range(len(stages)):
        pair = info.block_options(number), blocks[sum(len(before.layers) for before in stages[:number])]
        name = "block" if len(stages) == 1 else f"stages[{number}].block"
        ours[name], theirs[name] = map(function_of, pair)
    found = differences({"ours": ours, "theirs": theirs})
    others = {key.removesuffix(".kind") for key in found if key.endswith(".kind")}  # whose options say nothing more
    compressed = [
        f"matrices are compressed ({one.kind}); {title} stores each as it is" for one in info.architecture.compression
    ]
    return compressed + [
        f"{key} is {_said(values['ours'])}; {title} has {_said(values['theirs'])}"
        for key, values in found.items()
        if key.endswith(".kind") or not any(key.startswith(f"{other}.") for other in others)
        if not (zero_biases and key.endswith("bias") and not values["ours"])
    ]


def _said(value: Any) -> str:
    return "none" if value is None else as_yaml(value)
