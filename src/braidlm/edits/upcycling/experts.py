"""Experts in place of feed-forward parts: the stages of the sparse model, and the origin of each of its tensors."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from braidlm.bridges.model_info import ModelInfo
from braidlm.edits.account import Account, Derived, Fresh, Part, Transform, targets
from braidlm.edits.edit import SOURCE
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import encode
from braidlm.model.feed.feeds import feeds
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.routed_join import Routed

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
