"""The origin of every tensor of a composed model: which tensors of which paths it is made of."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from braidlm.edits.account import Account, Derived, Fresh, Part, parts_of, targets
from braidlm.edits.composing.path_models import PathShape, Section, aligned_sections
from braidlm.model.attention.routed import MemberAttentionExperts
from braidlm.model.feed.routed import RoutedFeedStack
from braidlm.model.heads.ends import ModelEnd
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.average import AverageHead, MixtureHead, PerPathNorm
from braidlm.model.paths.parallel import ParallelLayer, ParallelStage, blocks_in_layer
from braidlm.model.paths.project import ProjectStage
from braidlm.model.routing.stacked import StackedLinear
from braidlm.model.stages import BlockStage

POSITIONS = "model.positions.weight"
FINAL_NORM = "model.norm"
NORM_UNUSED = "the path's norm before its own head; the composed stream has a fresh one"
AVERAGED_HEAD = {"weight": "side by side", "bias": "stacked"}
"""How the head of an average is made of linear heads."""
MIXTURE = "head.mixture"


def account_for(model: BraidForCausalLM, paths: Sequence[PathShape]) -> Account:
    """The account of composing `paths` into `model`, which may be on the meta device."""
    tensors, names = targets(model), [path.name for path in paths]
    account = Account()
    for address in ("model.embedding", "head"):
        end = model.get_submodule(address)
        assert isinstance(end, ModelEnd)
        composed = AVERAGED_HEAD if isinstance(end, AverageHead) else end.composed
        own = {f"{address}.{name}": operation for name, operation in composed.items()}
        account.origins |= {name: _end(name, operation, paths) for name, operation in own.items() if name in tensors}
    if POSITIONS in tensors:
        max_context = max(path.architecture.context for path in paths)
        rows = len(tensors[POSITIONS]) if max_context > len(tensors[POSITIONS]) else None
        account.origins[POSITIONS] = Derived(parts_of(names, [POSITIONS] * len(paths)), "side by side", rows)
    sections = iter(aligned_sections(paths))
    for address, stage in model.model.stages.named_children():
        here = next(sections) if isinstance(stage, ParallelStage) else []
        for name, origin in _stage(f"model.stages.{address}", stage, paths, here):
            account.origins[name] = origin
    for path in paths:
        own_norm = [name for name in path.plain.tensors if name.startswith(f"{FINAL_NORM}.")]
        if isinstance(model.model.norm, PerPathNorm):
            inside = f"{FINAL_NORM}.paths.{path.name}"
            derived = {inside + name.removeprefix(FINAL_NORM): Derived((Part(path.name, name),)) for name in own_norm}
            account.origins |= derived
        else:
            account.left_out |= {Part(path.name, name): NORM_UNUSED for name in own_norm}
    if not isinstance(model.model.norm, PerPathNorm):
        norm = [f"{FINAL_NORM}.{name}" for name in model.model.norm.state_dict()]
        account.origins |= dict.fromkeys(norm, Fresh("final norm", FINAL_NORM))
    if isinstance(model.head, MixtureHead):
        shares = [f"{MIXTURE}.{name}" for name in model.head.mixture.state_dict()]
        account.origins |= dict.fromkeys(shares, Fresh("mixture", MIXTURE))
    account.check(tensors, {path.name: path.plain.tensors for path in paths})
    account.origins = {name: account.origins[name] for name in tensors}  # in the model's own order
    return account


def _end(name: str, operation: str, paths: Sequence[PathShape]) -> Derived:
    """A tensor of the embedding or the head, from those of the paths that have it; a tied head's is the embedding's."""
    own = {path.name: path.saved(name) for path in paths}
    own = {path.name: own[path.name] for path in paths if own[path.name] in path.plain.tensors}
    return Derived(parts_of(list(own), list(own.values())), operation)


def _stage(
    address: str, stage: nn.Module, paths: Sequence[PathShape], sections: Sequence[Section]
) -> Iterator[tuple[str, Derived | Fresh]]:
    """Of a parallel stage, that of these sections of the paths."""
    if isinstance(stage, ParallelStage):
        for index, layer in enumerate(stage.layers):
            assert isinstance(layer, ParallelLayer)
            here = {}
            for path, section in zip(paths, sections, strict=True):
                inside = blocks_in_layer(len(section.blocks), len(stage.layers), index)
                here[path.name] = [section.blocks[i] for i in inside]
            yield from _layer(f"{address}.layers.{index}", layer, paths, here)
    elif isinstance(stage, (BlockStage, ProjectStage)):
        kind = "full-width blocks" if isinstance(stage, BlockStage) else "projections"
        yield from ((f"{address}.{name}", Fresh(kind, address)) for name in stage.state_dict())


def _layer(
    address: str, layer: ParallelLayer, paths: Sequence[PathShape], here: dict[str, list[str]]
) -> Iterator[tuple[str, Derived | Fresh]]:
    """The tensors of the paths' blocks `here`, in this layer, of its projections and of its join."""
    if layer.stack is not None:
        for number, block in enumerate(layer.stack):
            for name in block.state_dict():
                member, own, operation = in_stack(block, name)
                owners = [path for path in paths if member in (None, path.name)]
                saved = [path.saved(f"{here[path.name][number]}.{own}") for path in owners]
                parts = parts_of([path.name for path in owners], saved)
                yield f"{address}.stack.{number}.{name}", Derived(parts, operation)
    if layer.paths is not None:
        for path in paths:
            for number, block in enumerate(layer.blocks(path.name)):
                for name in block.state_dict():
                    part = Part(path.name, path.saved(f"{here[path.name][number]}.{name}"))
                    yield f"{address}.paths.{path.name}.{number}.{name}", Derived((part,))
    for own, kind in (("enter", "projections"), ("join", "joins")):
        module = getattr(layer, own)
        if module is not None:
            fresh = Fresh(kind, f"{address}.{own}")
            yield from ((f"{fresh.module}.{name}", fresh) for name in module.state_dict())


def in_stack(block: Any, name: str) -> tuple[str | None, str, str]:
    """Of a tensor of a stack of blocks: whose it is if not all members', its name in a single block, and what it is
    made by.
    """
    routed = isinstance(block.feed, RoutedFeedStack)
    if routed and name.startswith("feed.bank."):
        return None, name, "one after another"
    for part, is_by_member in (
        ("feed.router", routed),
        ("attention", isinstance(block.attention, MemberAttentionExperts)),
    ):
        if is_by_member and name.startswith(f"{part}."):
            member, _, own = name.removeprefix(f"{part}.").partition(".")
            return member, f"{part}.{own}", "as it is"
    owner, _, own = name.rpartition(".")
    is_matrix = own == "weight" and isinstance(block.get_submodule(owner), StackedLinear)
    return None, name, "stacked, transposed" if is_matrix else "stacked"
