"""`braid edit upcycle`: a sparse model whose experts are copies of a dense model's feed-forward parts.

The weights of the experts that a token takes sum to 1, and the copies are equal: right after the edit the model
computes what it did, for every number of experts and whatever the fresh routers choose (arXiv 2212.05055).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from braidlm.bridges.model_info import ModelInfo
from braidlm.core import console
from braidlm.core.differences import bullet_list
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.core.models.logits import probe_ids
from braidlm.core.reading import given_path, read_json
from braidlm.edits.account import Account, Derived, Fresh, Transform, from_source, targets
from braidlm.edits.edit import Edit, EditPlan, edits, show_plan
from braidlm.edits.mixtral import MIXTRAL_SOURCES, plan_mixtral, write_mixtral
from braidlm.edits.modules import check_uncompressed
from braidlm.model.config.ranges import MAX_ITEMS, Choices, NonNegative, Range
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import encode
from braidlm.model.feed.feeds import feeds
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.routed_join import Routed
from braidlm.opening.braid import BRAID, OpenedBraid
from braidlm.opening.opened_model import OpenedModel

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What transformers' configurations call the number of experts."""


@edits.register("upcycle")
@dataclass(frozen=True)
class Upcycle(Edit):
    """How many copies there are, and how many of them a token takes."""

    about: ClassVar[str] = (
        "make a dense model sparse: experts that begin as copies of its feed-forward parts, and routers"
    )
    backend = "any"

    experts: Annotated[int, Range(at_least=2, at_most=MAX_ITEMS)] = 2
    """How many experts each feed-forward part becomes."""
    top_k: Choices = 1
    """How many of them a token takes. With 1 its weight is always 1, so that only balance losses train the router."""
    noise: NonNegative = 0.0
    """Normal noise on the copies, as a share of each matrix's standard deviation; with any, predictions change at once.
    By default the copies are equal, and part ways because they are trained on different tokens."""
    to: Literal["braid", "mixtral"] | None = None
    """What the result is: a Braid model, or a Mixtral folder, which plain transformers opens without further code. By
    default Mixtral for Llama and Mistral folders, and Braid for others."""

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise BraidError(f"top_k is {self.top_k}, and there are only {self.experts} experts")

    def apply(self, model: OpenedModel, out: str | Path | None, record: dict[str, Any], dry_run: bool) -> Path | None:
        kind, counts = model.kind, [key for key in read_json(model.folder / "config.json") if key in EXPERT_COUNTS]
        if kind != BRAID and counts:
            raise BraidError(f"this '{kind}' model is sparse already (config.json has {counts[0]})", str(model.folder))
        if self.to == "braid" or (self.to is None and kind not in MIXTRAL_SOURCES):
            return super().apply(model, out, record, dry_run)
        if kind not in MIXTRAL_SOURCES:
            what = f"this folder holds a '{kind}' model; {' and '.join(MIXTRAL_SOURCES)} become Mixtral"
            todo = "Leave out `--to mixtral`; or write a Llama folder first, with `braid convert MODEL --to llama`."
            raise BraidError(what, str(model.folder), todo)
        plan = plan_mixtral(model, self.experts, self.top_k)
        plan.notes.extend(self._notes())
        plan.notes.append("other trainers than Braid's add the balance loss only with `output_router_logits=True`")
        if show_plan([plan.title], plan.account, plan.notes, dry_run):
            return None
        assert out is not None
        write_mixtral(plan, given_path(out), record, self.noise)
        return given_path(out)

    def plan(self, source: OpenedBraid) -> EditPlan:
        check_uncompressed(source.info)
        experts = {"names": self.experts, "router": {"top_k": self.top_k, "renormalise": True}}
        stages, dense = _upcycled_stages(source.info, experts)
        model, known = skeleton(source.config_with(stages=stages)), source.info.tensors
        origins = {n: from_source(n) if n in known else _origin(n, self.experts) for n in targets(model)}
        if not any(name not in known for name in origins):
            what = f"no feed-forward part of this model can become experts:{bullet_list(dense)}"
            raise BraidError(what, source.title)
        notes = [*source.notes, *(f"stays as it is: {text}" for text in dense), *self._notes()]
        before, after = model_cost(source.info.model), model_cost(model)
        title = (
            f"Upcycle {source.title}: {self.experts} experts for each feed-forward part, of which a token takes "
            f"{self.top_k}; {after.parameters:,} parameters in place of {before.parameters:,}, "
            f"{after.active_parameters:,} active per token in place of {before.active_parameters:,}"
        )
        plan = EditPlan(title, model, Account(origins), notes)
        if self.noise:
            copied = [name for name, origin in origins.items() if isinstance(origin, Derived) and origin.transform]
            plan.finish = partial(_perturb, copied=copied, noise=self.noise)
            plan.measure = partial(_change_of_logits, source)
        else:
            plan.unchanged_on = probe_ids(model.config)
        return plan

    def _notes(self) -> list[str]:
        """What the options mean, for the plan."""
        equal = "the copies are equal and the weights of those that a token takes sum to 1: no logit changes"
        noisy = f"the copies differ by noise of {self.noise:g} of each matrix's standard deviation: predictions change"
        only = "only balance losses train the routers, and with `--top-k 2` the text trains them too"
        weight = f"a token takes one expert, whose weight is always 1: {only}"
        return [noisy if self.noise else equal, *[weight] * (self.top_k == 1)]


@torch.no_grad()
def _change_of_logits(source: OpenedBraid, edited: BraidForCausalLM) -> dict[str, Any]:
    """Compare an edited model with its source on random tokens, say the change of logits and return the numbers."""
    ids = probe_ids(edited.config)
    before, after = source.load(dtype=torch.float32)(ids).logits, edited(ids).logits
    change, spread = (after - before).abs().max().item(), before.std().item()
    console.say(f"  a logit changed by at most {change:.3g} (they spread by {spread:.3g})")
    return {"largest_change_of_a_logit": change, "standard_deviation_of_logits": spread}


ROUTED_FEED = re.compile(r"(?P<feed>.+\.feed)\.(?P<part>router|bank)\.(?P<own>.+)")
"""The name of a tensor of a feed-forward part with experts."""
IN_STACK = re.compile(r".+\.layers\.\d+\.stack\..+")
"""The name of a tensor of paths in a stack."""


def _upcycled_stages(info: ModelInfo, experts: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The stages with experts for every dense feed-forward part, and the titles of those that have none now, with the
    reason why they stay."""
    stages, dense = [], []
    for number, (choice, built) in enumerate(zip(info.architecture.stages, info.model.model.stages, strict=True)):
        options = encode(choice.options)
        for holder in options.get("paths") or [options]:  # the blocks of a path, or of the stage
            if reason := _reason_to_stay(choice, holder.get("feed")):
                path = f" of path '{holder['name']}'" if "paths" in options else ""
                dense.append(f"stages.{number} ({choice.kind}){path}: {reason}")
            else:
                holder["feed"]["experts"] = experts
        if any(getattr(layer, "stack", None) is not None for layer in getattr(built, "layers", ())):
            options["stacked"] = "with_experts"  # a stack of paths stays one
        stages.append({choice.kind: options})
    return stages, dense


def _reason_to_stay(stage: Choice, feed: dict[str, Any] | None) -> str | None:
    if feed is None:
        return "it has no feed-forward part"
    if isinstance(getattr(getattr(stage.options, "join", None), "options", None), Routed.Config):
        return "a router chooses among its paths already"
    if feed.get("experts") is not None:
        return "its feed-forward parts are experts already"
    if "experts" not in feed or not getattr(feeds[feed["kind"]], "stackable", False):
        return f"its feed-forward part '{feed['kind']}' cannot be one of several experts"
    return None


def _origin(name: str, count: int) -> Derived | Fresh:
    """A tensor of a part that has experts now: `count` copies in a bank of experts, or fresh in a router."""
    routed = ROUTED_FEED.fullmatch(name)
    assert routed is not None, name
    if routed["part"] == "router":
        return Fresh("routers", f"{routed['feed']}.router")

    def copies(tensor: Tensor) -> Tensor:
        """[count, in, out] of a matrix [out, in]; in the bank of a stack copies of each member one after another."""
        if IN_STACK.fullmatch(name):
            return tensor.repeat_interleave(count, dim=0)
        return torch.stack([tensor.t() if tensor.ndim == 2 else tensor] * count)

    return from_source(f"{routed['feed']}.{routed['own']}", Transform(copies, f"{count} copies"))


def _perturb(model: BraidForCausalLM, copied: Collection[str], noise: float) -> None:
    """Let the copies differ, by normal noise of this share of each matrix's standard deviation."""
    for name, parameter in model.named_parameters():
        if name in copied and parameter.ndim == 3:
            parameter.add_(noise * parameter.std(dim=(1, 2), keepdim=True) * torch.randn_like(parameter))
