"""Composing by averaging: whole models side by side, each with its own embedding, blocks, last norm and head.

What is averaged is their probabilities, which is exact from the first step: nothing needs to be trained. In the model
it is a parallel stage whose paths stay apart (`concat`), a norm for each path, and a head of all paths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.edits.composing.path_models import PathModel, PathShape
from braidlm.edits.edit import UNCHANGED, probe_ids
from braidlm.model.config.ranges import Range
from braidlm.model.config.registry import ADVICE, Choice, Registry
from braidlm.model.config.strict import encode
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.average import PosteriorHead
from braidlm.model.paths.joins import JoinConfig, joins

APART = Choice("concat", JoinConfig())
"""The join inside the layers of a model whose paths meet in the head alone."""

averages = Registry("average")


@averages.register("average")
class Average:
    """Every model has the same share."""

    how = "averaged"
    learned = False

    @dataclass
    class Config:
        pass


@averages.register("mixture")
class Mixture:
    """The shares are learned; they begin equal."""

    how = "averaged, until their shares are trained"
    learned = True

    @dataclass
    class Config:
        per_token: bool = False
        """Whether a router that reads the stream changes the shares from token to token."""


@averages.register("posterior")
class Posterior:
    """A model's share is its probability given the text so far, by Bayes' rule: nothing is learned."""

    how = "averaged, each weighed by how well it has predicted the text so far"
    learned = False

    @dataclass
    class Config:
        window: Annotated[int, Range(at_least=2)] | None = None
        """How many tokens back the models are judged by; by default the whole text."""


class ComposingJoins(Registry):
    """What `compose` takes for a join: the joins of parallel layers, and averages."""

    def __contains__(self, name: object) -> bool:
        return name in averages or name in joins

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise BraidError(f"unknown join '{name}'.{did_you_mean(name, list(self))}", todo=ADVICE)
        return averages[name] if name in averages else joins[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted([*averages, *joins]))


composing_joins = ComposingJoins("join")


def averaged_ends(paths: Sequence[PathShape], join: Choice) -> dict[str, Any]:
    """The norm before the head and the head, of a model whose paths are averaged."""
    linear = {path.name: path.architecture.head for path in paths}
    if other := [f"'{name}' has '{head.kind}'" for name, head in linear.items() if head.kind != "linear"]:
        raise BraidError(f"only models with linear heads can be averaged, and {', '.join(other)}")
    biases = {path.name: path.architecture.head.options.bias for path in paths}
    if len(set(biases.values())) > 1:
        having = ", ".join(name for name, bias in biases.items() if bias)
        raise BraidError(f"the heads of some models have a bias ({having}), and others have none")
    parts = [{"name": path.name, "width": path.width} for path in paths]
    norms = [{**part, "norm": encode(path.architecture.norm)} for part, path in zip(parts, paths, strict=True)]
    head = {"kind": join.kind, "paths": parts, "bias": any(biases.values()), **encode(join.options)}
    return {"norm": {"kind": "per_path", "paths": norms}, "head": head}


def check_no_layout(**options: object) -> None:
    """Refuse options of a layout that averaging does not have."""
    if given := [name for name, value in options.items() if value is not None]:
        raise BraidError(
            f"models that are averaged stay as they are: {', '.join(given)} cannot be chosen",
            todo="Leave it out, or choose another join, such as shared_linear.",
        )


@torch.no_grad()
def check_averaged(paths: Sequence[PathModel], composed: BraidForCausalLM) -> None:
    """Compare the composed model's probabilities with those of the models run apart, one after another."""
    ids = probe_ids(composed.config)
    each = torch.stack([path.source.load(dtype=torch.float32)(ids).logits.log_softmax(-1) for path in paths])
    is_judged = isinstance(composed.head, PosteriorHead)
    shares = posterior_shares(each, ids, composed.head.window) if is_judged else torch.zeros(len(paths), 1, 1)
    wanted = (each + shares.log_softmax(0)[..., None]).logsumexp(0)
    change = (composed(ids).logits - wanted).abs().max().item()
    if not change <= UNCHANGED:
        what = "average of the models', weighed by the text so far," if is_judged else "average of the models'"
        raise BraidError(
            f"the probabilities should be the {what} to {UNCHANGED:g}, and one differs by {change:g}",
            todo="Nothing was written. Please report it: this is a mistake of Braid's.",
        )


def posterior_shares(each: Tensor, ids: Tensor, window: int | None) -> Tensor:
    """[model, batch, time]: the logarithms of the models' shares after each token, token by token: a reference.

    `each` are the models' log-probabilities [model, batch, time, vocabulary].
    """
    models, batch, time, _ = each.shape
    said = each[:, :, :-1].gather(-1, ids[None, :, 1:, None].expand(models, -1, -1, 1))[..., 0]
    shares = each.new_zeros(models, batch, time)
    for at in range(1, time):  # `said` begins with the second token
        first = 0 if window is None else max(0, at - window)
        shares[:, :, at] = said[:, :, first:at].sum(-1)
    return shares.log_softmax(0)
