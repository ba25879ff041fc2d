"""`braid edit upcycle`: a sparse model whose experts are copies of a dense model's feed-forward parts.

The weights of the experts that a token takes sum to 1, and the copies are equal: right after the edit the model
computes what it did, for every number of experts and whatever the fresh routers choose (arXiv 2212.05055).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from braidlm.bridges.bridge import bullet_list
from braidlm.bridges.model_info import ModelInfo
from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.core.reading import given_path, read_json
from braidlm.edits.account import Account, Derived, Fresh, Part, Transform, targets
from braidlm.edits.edit import SOURCE, Edit, EditPlan, edits, probe_ids
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
        kind = model.kind
        _refuse_experts(model.folder, kind)
        if self.to == "braid" or (self.to is None and kind not in MIXTRAL_SOURCES):
            return super().apply(model, out, record, dry_run)
        if kind not in MIXTRAL_SOURCES:
            raise BraidError(
                f"this folder holds a '{kind}' model; {' and '.join(MIXTRAL_SOURCES)} become Mixtral",
                str(model.folder),
                "Leave out `--to mixtral`; or write a Llama folder first, with `braid convert MODEL --to llama`.",
            )
        plan = plan_mixtral(model, self.experts, self.top_k)
        notes = (
            *self.notes(),
            "other trainers than Braid's add the balance loss only with `output_router_logits=True`",
        )
        for line in (*plan.lines(), *(f"  note: {note}" for note in notes)):
            (console.show if dry_run else console.say)(line)
        if dry_run:
            return None
        assert out is not None
        write_mixtral(plan, given_path(out), record, self.noise)
        return given_path(out)

    def plan(self, source: OpenedBraid) -> EditPlan:
        check_uncompressed(source.info)
        router = {"top_k": self.top_k, "renormalise": True}
        stages, sparse, dense = upcycled_stages(source.info, {"names": self.experts, "router": router})
        if not sparse:
            raise BraidError(
                f"no feed-forward part of this model can become experts:{bullet_list(dense)}", source.title
            )
        config = source.config_with(stages=stages)
        model = skeleton(config)
        account = upcycled_account(model, source.info, self.experts)
        notes = [*source.notes, *(f"stays as it is: {text}" for text in dense), *self.notes()]
        plan = EditPlan(self._title(source, model), model, account, notes)
        if self.noise:
            plan.finish, plan.measure = noise_for(account, self.noise), _change_of_logits(source)
        else:
            plan.unchanged_on = probe_ids(config)
        return plan

    def notes(self) -> list[str]:
        """What the options mean, for the plan."""
        weight = (
            "a token takes one expert, whose weight is always 1: only balance losses train the routers, and with "
            "`--top-k 2` the text trains them too"
        )
        equal = "the copies are equal and the weights of those that a token takes sum to 1: no logit changes"
        noisy = f"the copies differ by noise of {self.noise:g} of each matrix's standard deviation: predictions change"
        return [noisy if self.noise else equal, *([weight] if self.top_k == 1 else [])]

    def _title(self, source: OpenedBraid, model: BraidForCausalLM) -> str:
        before, after = model_cost(source.info.model), model_cost(model)
        return (
            f"Upcycle {source.title}: {self.experts} experts for each feed-forward part, of which a token takes "
            f"{self.top_k}; {after.parameters:,} parameters in place of {before.parameters:,}, "
            f"{after.active_parameters:,} active per token in place of {before.active_parameters:,}"
        )


def _refuse_experts(folder: Path, kind: str) -> None:
    """Refuse a sparse model of another format, whose configuration counts experts."""
    counts = [key for key in read_json(folder / "config.json") if key in EXPERT_COUNTS]
    if kind != BRAID and counts:
        raise BraidError(f"this '{kind}' model is sparse already (config.json has {counts[0]})", str(folder))


def _change_of_logits(source: OpenedBraid) -> Callable[[BraidForCausalLM], dict[str, Any]]:
    """A function that compares an edited model with its source on random tokens, says it and returns the numbers."""

    @torch.no_grad()
    def measured(edited: BraidForCausalLM) -> dict[str, Any]:
        ids = probe_ids(edited.config)
        before, after = source.load(dtype=torch.float32)(ids).logits, edited(ids).logits
        change = (after - before).abs().max().item()
        console.say(f"  a logit changed by at most {change:.3g} (they spread by {before.std().item():.3g})")
        return {"largest_change_of_a_logit": change, "standard_deviation_of_logits": before.std().item()}

    return measured


ROUTED_FEED = re.compile(r"(?P<feed>.+\.feed)\.(?P<part>router|bank)\.(?P<own>.+)")
"""The name of a tensor of a feed-forward part with experts."""
IN_STACK = re.compile(r".+\.layers\.\d+\.stack\..+")
"""The name of a tensor of paths in a stack."""


def upcycled_stages(info: ModelInfo, experts: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """The stages with experts for every dense feed-forward part, the titles of those that have some now, and of the
    others with the reason why they stay.
    """
    stages, sparse, dense = [], [], []
    for number, (choice, built) in enumerate(zip(info.architecture.stages, info.model.model.stages, strict=True)):
        options = encode(choice.options)
        for holder in options.get("paths") or [options]:  # the blocks of a path, or of the stage
            path = f" of path '{holder['name']}'" if "paths" in options else ""
            title = f"stages.{number} ({choice.kind}){path}"
            if reason := _reason_to_stay(choice, holder.get("feed")):
                dense.append(f"{title}: {reason}")
            else:
                holder["feed"]["experts"] = experts
                sparse.append(title)
        if any(getattr(layer, "stack", None) is not None for layer in getattr(built, "layers", ())):
            options["stacked"] = "with_experts"  # a stack of paths stays one
        stages.append({choice.kind: options})
    return stages, sparse, dense


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


def upcycled_account(model: BraidForCausalLM, info: ModelInfo, count: int) -> Account:
    """Every tensor as it was, `count` copies of it in a bank of experts, or fresh in a router."""
    account = Account()
    for name in targets(model):
        account.origins[name] = Derived((Part(SOURCE, name),)) if name in info.tensors else _origin(name, info, count)
    account.check(targets(model), {SOURCE: info.tensors})
    return account


def _origin(name: str, info: ModelInfo, count: int) -> Derived | Fresh:
    routed = ROUTED_FEED.fullmatch(name)
    assert routed is not None, name
    if routed["part"] == "router":
        return Fresh("routers", f"{routed['feed']}.router")
    copies = _copies_in_stack if IN_STACK.fullmatch(name) else _copies
    old = Part(SOURCE, f"{routed['feed']}.{routed['own']}")
    return Derived((old,), transform=Transform(partial(copies, count), f"{count} copies"))


def _copies(count: int, tensor: Tensor) -> Tensor:
    """[count, in, out] of a matrix [out, in]."""
    return torch.stack([tensor.t() if tensor.ndim == 2 else tensor] * count)


def _copies_in_stack(count: int, members: Tensor) -> Tensor:
    """The copies of each member one after another, as in the bank of a stack."""
    return members.repeat_interleave(count, dim=0)


def noise_for(account: Account, noise: float) -> Callable[[BraidForCausalLM], None]:
    """A function that lets the copies differ, by normal noise of this share of each matrix's standard deviation."""
    copied = {name for name in account.derived if (match := ROUTED_FEED.fullmatch(name)) and match["part"] == "bank"}

    def perturb(model: BraidForCausalLM) -> None:
        for name, parameter in model.named_parameters():
            if name in copied and parameter.ndim == 3:
                parameter += noise * parameter.std(dim=(1, 2), keepdim=True) * torch.randn_like(parameter)

    return perturb
