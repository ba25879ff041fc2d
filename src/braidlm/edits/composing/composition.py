"""Composing models: the plan, shown before anything is computed, and the origin of every tensor of the result."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from braidlm.core.models.accounting import model_facts, skeleton
from braidlm.edits.account import Account, Derived, Fresh, Part, columns, targets
from braidlm.edits.composing.path_models import PathModel, aligned_sections, averages, check_averaged
from braidlm.edits.edit import EditPlan
from braidlm.inspection.layers import routing_modules
from braidlm.model.attention.experts import MemberAttentionExperts
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.registry import Choice
from braidlm.model.feed.feeds import RoutedFeedStack
from braidlm.model.heads.ends import ModelEnd
from braidlm.model.paths.average import AverageHead, MixtureHead, PerPathNorm
from braidlm.model.paths.joins import GumbelJoin, Join, SameWidthJoin, SharedLinear
from braidlm.model.paths.parallel import ParallelLayer, ParallelStage, blocks_in_layer
from braidlm.model.paths.project import ProjectStage
from braidlm.model.routing.stacked import StackedLinear
from braidlm.model.stages import BlockStage

if TYPE_CHECKING:
    from braidlm.model.modeling_braid import BraidForCausalLM

TRAINED_BYTES = 12
"""The bytes that training needs for a parameter beside its own four: gradient and AdamW's moments in float32."""


def plan_composition(
    paths: Sequence[PathModel], join: Choice, layout: dict[str, Any], notes: list[str], frozen: list[str], start: str
) -> EditPlan:
    """Build the model on the meta device, as it was laid out with these notes, and account for its tensors."""
    first, names = paths[0].plain, [path.name for path in paths]
    config = BraidConfig(layout, vocab_size=first.config.vocab_size, frozen=frozen, **first.token_ids)
    model, averaged = skeleton(config), join.kind in averages
    title = f"Compose {' + '.join(names)}: width {config.hidden_size}, join {join.kind}"
    account, parameters = account_for(model, paths), dict(model.named_parameters())
    count = sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
    facts = model_facts(model)
    weights = facts["memory"]["weights_float32"]
    memory, training = (f"{amount / 1e6:,.1f} MB" for amount in (weights, weights + TRAINED_BYTES * count))
    stages = []
    for choice in config.decoded.stages:  # `block x 2` or `project to 64`
        depth, to = getattr(choice.options, "layers", None), getattr(choice.options, "to", None)
        stages.append(" ".join(filter(None, (choice.kind, depth and f"x {depth}", to and f"to {to}"))))
    details = [
        f"  stages: {', '.join(stages)}",
        *_alignment(model, paths),
        f"  parameters   {facts['parameters']:,}, {facts['active_parameters']:,} active for a token",
        f"  trained      {count:,} ({count / facts['parameters']:.0%})",
        f"  memory       weights {memory}, in training with AdamW {training} (float32, activations on top)",
    ]
    notes = [*notes, _stacking(model, paths)]
    if kinds := [kind for kind in fresh_parts(account) if kind in ("projections", "joins")]:
        notes.append(f"{' and '.join(kinds)} begin {STARTS[start]}")
    sources = {path.name: path.source for path in paths if path.source is not None}
    notes += [f"'{name}': {note}" for name, source in sources.items() for note in source.notes]
    roles = {name: source.tokenizer.identity()["roles"] for name, source in sources.items()}
    if differing := ", ".join(name for name, own in roles.items() if own != roles[names[0]]):
        notes.append(f"special tokens have other roles in {differing}; those of '{names[0]}' count")
    if parts := ", ".join(config.frozen):
        still = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        left = [origin.kind for name, origin in account.fresh.items() if name in still]
        also = f" (so also the fresh {', '.join(dict.fromkeys(left))})" if left else ""
        nothing = "" if count else "; nothing is left to train"
        notes.append(f"training will leave as they are: {parts}{also}{nothing}")
    finish = initialise_as_mean if start == "mean" and not averaged else None
    check = partial(check_averaged, paths) if averaged else None
    return EditPlan(title, model, account, notes, details, names, finish=finish, check=check)


def fresh_parts(account: Account) -> list[str]:
    """The kinds of part that are newly initialised."""
    return list(dict.fromkeys(origin.kind for origin in account.fresh.values()))


def shows_routes(model: "BraidForCausalLM", paths: Sequence[PathModel]) -> bool:
    """Whether `braid routes` can tell which path a token takes: there is a router, or paths as wide as the join."""
    joins, widths = routing_modules(model), {path.width for path in paths}
    return any(not isinstance(one, Join) or hasattr(one, "router") or widths == {one.width_out} for one in joins)


def _alignment(model: "BraidForCausalLM", paths: Sequence[PathModel]) -> list[str]:
    """Which of each path's blocks, counted from 0, are in which layer."""
    rows = [["blocks in", *(f"{path.name} (width {path.width}, {path.depth} blocks)" for path in paths)]]
    before = [0] * len(paths)
    stages = [stage for stage in model.model.stages if isinstance(stage, ParallelStage)]
    for stage, sections in zip(stages, aligned_sections(paths), strict=True):
        depths = [len(section.blocks) for section in sections]
        for layer in range(len(stage.layers)):
            cells = [f"layer {len(rows) - 1}"]
            for first, depth in zip(before, depths, strict=True):
                blocks = (str(first + block) for block in blocks_in_layer(depth, len(stage.layers), layer))
                cells.append(", ".join(blocks) or "none: passes on what it reads")
            rows.append(cells)
        before = [first + depth for first, depth in zip(before, depths, strict=True)]
    return columns(rows)


def _stacking(model: "BraidForCausalLM", paths: Sequence[PathModel]) -> str:
    """Whether the paths are computed together, and else why not."""
    if all(layer.stack is not None for layer in model.modules() if isinstance(layer, ParallelLayer)):
        return "the paths have one shape and are computed as one stacked product"
    first, *shapes = (
        {"width": path.width, "depth": path.depth}
        | {part: [section.options[part] for section in path.sections] for part in path.sections[0].options}
        for path in paths
    )
    differing = ", ".join(key for key in first if any(shape[key] != first[key] for shape in shapes))
    because = f"they differ in {differing}" if differing else "a part of theirs cannot be stacked"
    return f"the paths are computed one by one, which is slower: {because}"


POSITIONS = "model.positions.weight"
FINAL_NORM = "model.norm"
AVERAGED_HEAD = {"weight": "side by side", "bias": "stacked"}
"""How the head of an average is made of linear heads."""


def account_for(model: "BraidForCausalLM", paths: Sequence[PathModel]) -> Account:
    """The account of composing `paths` into `model`, which may be on the meta device."""
    tensors, account = targets(model), Account()
    origins = account.origins
    for address in ("model.embedding", "head"):
        end = model.get_submodule(address)
        assert isinstance(end, ModelEnd)
        for own, operation in (AVERAGED_HEAD if isinstance(end, AverageHead) else end.composed).items():
            if (name := f"{address}.{own}") in tensors:
                # A tied head is the embedding's.
                saved = {path.name: path.plain.saved(name) for path in paths}
                having = [path.name for path in paths if saved[path.name] in path.plain.tensors]
                origins[name] = Derived(tuple(Part(path, saved[path]) for path in having), operation)
    if POSITIONS in tensors:
        max_context = max(path.architecture.context for path in paths)
        rows = len(tensors[POSITIONS]) if max_context > len(tensors[POSITIONS]) else None
        origins[POSITIONS] = Derived(tuple(Part(path.name, POSITIONS) for path in paths), "side by side", rows)
    sections = iter(aligned_sections(paths))
    for number, stage in enumerate(model.model.stages):
        address = f"model.stages.{number}"
        if isinstance(stage, ParallelStage):
            blocks = [section.blocks for section in next(sections)]
            for index, layer in enumerate(stage.layers):
                assert isinstance(layer, ParallelLayer)
                inside = [[own[i] for i in blocks_in_layer(len(own), len(stage.layers), index)] for own in blocks]
                origins |= _layer_origins(f"{address}.layers.{index}", layer, paths, inside)
        elif isinstance(stage, (BlockStage, ProjectStage)):
            origins |= _fresh(stage, "full-width blocks" if isinstance(stage, BlockStage) else "projections", address)
    for path in paths:
        for name in [name for name in path.plain.tensors if name.startswith(f"{FINAL_NORM}.")]:
            part = Part(path.name, name)
            if isinstance(model.model.norm, PerPathNorm):
                origins[f"{FINAL_NORM}.paths.{path.name}{name.removeprefix(FINAL_NORM)}"] = Derived((part,))
            else:
                account.left_out[part] = "the path's norm before its own head; the composed stream has a fresh one"
    if not isinstance(model.model.norm, PerPathNorm):
        origins |= _fresh(model.model.norm, "final norm", FINAL_NORM)
    if isinstance(model.head, MixtureHead):
        origins |= _fresh(model.head.mixture, "mixture", "head.mixture")
    account.check(tensors, {path.name: path.plain.tensors for path in paths})
    account.origins = {name: origins[name] for name in tensors}  # in the model's own order
    return account


def _fresh(module: nn.Module, kind: str, address: str) -> dict[str, Derived | Fresh]:
    """The tensors of a part that is newly initialised."""
    return {f"{address}.{name}": Fresh(kind, address) for name in module.state_dict()}


def _layer_origins(
    address: str, layer: ParallelLayer, paths: Sequence[PathModel], inside: Sequence[Sequence[str]]
) -> dict[str, Derived | Fresh]:
    """The tensors of the blocks of each path that are `inside` this layer, of its projections and of its join."""
    origins: dict[str, Derived | Fresh] = {}
    for number, block in enumerate(layer.stack or ()):
        for name in block.state_dict():
            member, own, operation = in_stack(block, name)
            owners = [(path, here) for path, here in zip(paths, inside, strict=True) if member in (None, path.name)]
            parts = tuple(Part(path.name, path.plain.saved(f"{here[number]}.{own}")) for path, here in owners)
            origins[f"{address}.stack.{number}.{name}"] = Derived(parts, operation)
    for path, here in zip(paths, inside, strict=True) if layer.paths is not None else ():
        for number, block in enumerate(layer.blocks(path.name)):
            for name in block.state_dict():
                part = Part(path.name, path.plain.saved(f"{here[number]}.{name}"))
                origins[f"{address}.paths.{path.name}.{number}.{name}"] = Derived((part,))
    for own, kind in (("enter", "projections"), ("join", "joins")):
        if (module := getattr(layer, own)) is not None:
            origins |= _fresh(module, kind, f"{address}.{own}")
    return origins


def in_stack(block: Any, name: str) -> tuple[str | None, str, str]:
    """The member that owns a tensor of a stack (None: all do), its name in a single block, and how it is made."""
    routed = isinstance(block.feed, RoutedFeedStack)
    if routed and name.startswith("feed.bank."):
        return None, name, "one after another"
    by_member = {"feed.router": routed, "attention": isinstance(block.attention, MemberAttentionExperts)}
    for part, is_by_member in by_member.items():
        if is_by_member and name.startswith(f"{part}."):
            member, _, own = name.removeprefix(f"{part}.").partition(".")
            return member, f"{part}.{own}", "as it is"
    owner, _, own = name.rpartition(".")
    is_matrix = own == "weight" and isinstance(block.get_submodule(owner), StackedLinear)
    return None, name, "stacked, transposed" if is_matrix else "stacked"


STARTS = {
    "mean": "by passing on the paths' outputs, the mean of all or each path's own part (`--start random`: at random)",
    "random": "at random, as the initialisation says (`--start mean`: by passing on the paths' outputs)",
}
"""Initialisations of joins and projections, in words.

`mean` lets them pass on the outputs of the paths: each path's own part where the stream has one for each, the mean of
all where the stream is as narrow as a path. What the paths have learned is then used from the first step;
docs/compose.md has the numbers. `random` is PaPaformer's: as the model's initialisation says, like all fresh parts.
"""


@torch.no_grad()
def initialise_as_mean(model: nn.Module) -> None:
    """Set projections and joins to pass on their inputs; routers, and joins of other packages, stay as they are."""
    layers = [module for module in model.modules() if isinstance(module, ParallelLayer)]
    widths = layers[0].widths
    passing = {ProjectStage: "linear", SharedLinear: "linear", GumbelJoin: "combine", SameWidthJoin: "out"}
    for module in model.modules():
        for linear in (getattr(module, part) for kind, part in passing.items() if isinstance(module, kind)):
            if linear is not None:
                linear.weight.copy_(_passing(linear.out_features, linear.in_features, widths))
    for layer in layers:
        own = dict(zip(layer.names, torch.eye(sum(widths)).split(widths), strict=True))
        enter: Any = layer.enter if isinstance(layer.enter, nn.ModuleDict) else {}
        leave: Any = layer.join.leave if isinstance(layer.join, SameWidthJoin) else {}
        for name, linear in enter.items():
            linear.weight.copy_(own[name])
        for name, linear in leave.items():
            linear.weight.copy_(own[name].t())


def _passing(rows: int, columns: int, widths: Sequence[int]) -> Tensor:
    """The identity; to a narrower stream the mean of all parts, from a narrower one the same copy for all parts."""
    if rows == columns:
        return torch.eye(rows)
    narrow, parts = torch.eye(widths[0]), len(widths)
    return torch.cat([narrow / parts] * parts, dim=1) if rows < columns else torch.cat([narrow] * parts)
