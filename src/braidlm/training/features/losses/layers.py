"""Losses that read the stream before the last layer: of early exits, and of the embedded tokens."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from braidlm.core.decoding.early_exits import early_layers
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Choices, Layers, Range
from braidlm.model.heads.losses import IGNORED
from braidlm.model.language_model import LanguageModel
from braidlm.model.layer_skip import check_exit
from braidlm.training.features.extra_losses import ExtraLoss, ExtraLossConfig, TrainingPass, extra_losses


@dataclass
class EarlyExitConfig(ExtraLossConfig):
    """The options of the early-exit loss (LayerSkip, arXiv 2404.16710)."""

    layers: list[Layers] | None = None
    """The layers that count, from 1; by default all before the last. To draft with one layer, that one is enough."""
    weights: Literal["depth", "equal"] = "depth"
    """Whether deeper layers count more, as in the paper, or all as much as the last."""
    scale: Annotated[float, Range(above=0, at_most=1000)] = 0.2
    """How much earlier layers count by depth (the paper's e_scale): layer l of L has the weight scale x l(l - 1)/2,
    against L - 1 + scale x (L - 1)(L - 2)/2 of the last, whose factor is 1."""
    curriculum: Literal["rotate", "gradual", "all"] = "rotate"
    """Which layers count in a step: every `every`-th, in turns; from the last towards the first, all of them from the
    middle of the training on; or all from the beginning."""
    every: Choices = 4
    """In turns of how many steps the layers count."""


@extra_losses.register("early_exit")
class EarlyExitLoss(ExtraLoss):
    """The next-token losses after earlier layers, weighted by their depth, so that the model can be left there."""

    Config = EarlyExitConfig
    needs_layers = True
    chosen: Tensor
    weights: Tensor

    def __init__(self, config: EarlyExitConfig, model: LanguageModel):
        super().__init__(config, model)
        self.depth = model.config.decoded.depth
        for layer in config.layers or ():
            check_exit(model.model.stages, model.model.width_out, layer)
        chosen = config.layers or early_layers(model)
        self.exits = [layer for layer in chosen if layer < self.depth and self.weight_of(layer) > 0]
        if not self.exits:
            what = "no layer counts: by depth the first one's weight is 0, and the last one's loss is the text's own"
            todo = "Name others, give the model more layers at the head's width, or leave out the loss."
            raise BraidError(what, "training.losses: early_exit", todo)
        turns = range(config.every) if config.curriculum == "rotate" else ()
        counted = [sum(self.counts(layer, step, 0.0) for layer in self.exits) for step in turns]
        places = max(counted, default=len(self.exits))
        # What a captured step reads: so many exits, of which some may count 0.
        self.register_buffer("chosen", torch.zeros(places, dtype=torch.long), persistent=False)
        self.register_buffer("weights", torch.zeros(places), persistent=False)
        self.enabled: list[int] = []  # the indices of the exits that count in this step
        self.begin_step(0, 0.0)

    def weight_of(self, layer: int) -> float:
        """The weight of a layer, counted from 1, relative to that of the last."""
        if self.config.weights == "equal":
            return 1.0
        scale, last = self.config.scale, self.depth
        return scale * layer * (layer - 1) / 2 / (last - 1 + scale * (last - 1) * (last - 2) / 2)  # type: ignore[no-any-return]

    def counts(self, layer: int, step: int, share: float) -> bool:
        """Whether the curriculum has a layer, counted from 1, in a step."""
        if self.config.curriculum == "rotate":
            return (layer - step) % self.config.every == 0  # type: ignore[no-any-return]
        return self.config.curriculum == "all" or self.depth - layer <= 2 * self.depth * share

    def begin_step(self, step: int, share: float) -> bool:
        self.enabled = [index for index, layer in enumerate(self.exits) if self.counts(layer, step, share)]
        unused = len(self.chosen) - len(self.enabled)
        weights = [self.weight_of(self.exits[index]) for index in self.enabled]
        self.chosen.copy_(torch.tensor(self.enabled + [0] * unused))
        self.weights.copy_(torch.tensor(weights + [0.0] * unused))
        return False

    def forward(self, done: TrainingPass) -> Tensor:
        layers = [done.layers[layer] for layer in self.exits]
        if done.hidden.is_cuda or torch.compiler.is_compiling():
            # A captured or compiled step is the same every time: it finds its exits by index.
            read = torch.stack(layers).index_select(0, self.chosen).unbind()
        else:
            read = tuple(layers[index] for index in self.enabled)
        total = torch.zeros((), device=done.hidden.device)
        for weight, stream in zip(self.weights, read, strict=False):
            total = total + weight * done.model.head.loss(done.model.model.norm(stream), done.labels, done.count)
        return total


@extra_losses.register("reconstruction")
class Reconstruction(ExtraLoss):
    """The head's loss of each input token, read from its embedding: with bytes, the token's spelling."""

    needs_layers = True

    def __init__(self, config: Any, model: LanguageModel):
        super().__init__(config, model)
        width, width_out = model.config.hidden_size, model.model.width_out
        if width != width_out:
            what = f"the head reads a width of {width_out} and the embedding has {width}: it cannot read an embedding"
            todo = "Leave out the loss `reconstruction`, or let the last stage end at the embedding's width."
            raise BraidError(what, "training.losses", todo)

    def forward(self, done: TrainingPass) -> Tensor:
        own = done.inputs.masked_fill(done.labels == IGNORED, IGNORED)
        return done.model.head.loss(done.model.model.norm(done.layers[0]), own, done.count)
