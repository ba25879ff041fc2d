"""Composing models: the plan, shown before anything is computed, and the origin of every tensor of the result."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.core.models.accounting import model_facts, skeleton
from braidlm.edits.account import Account, Derived, Fresh, Part, columns, parts_of, targets
from braidlm.edits.composing.layout import Layout, lay_out
from braidlm.edits.composing.path_models import PathModel, PathShape, Section, aligned_sections
from braidlm.inspection.layers import routing_modules
from braidlm.model.attention.experts import MemberAttentionExperts
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.registry import Choice
from braidlm.model.feed.feeds import RoutedFeedStack
from braidlm.model.heads.ends import ModelEnd
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.average import AverageHead, MixtureHead, PerPathNorm
from braidlm.model.paths.gumbel import GumbelJoin
from braidlm.model.paths.joins import Join, SameWidthJoin, SharedLinear
from braidlm.model.paths.parallel import ParallelLayer, ParallelStage, blocks_in_layer
from braidlm.model.paths.project import ProjectStage
from braidlm.model.routing.stacked import StackedLinear
from braidlm.model.stages import BlockStage

TRAINED_BYTES = 12
"""The bytes that training needs for a parameter beside its own four: gradient and AdamW's moments in float32."""


@dataclass
class Composition:
    """Paths, the model they become, and the account of every tensor."""

    paths: Sequence[PathModel]
    join: Choice
    layout: Layout
    model: BraidForCausalLM
    """On the meta device."""
    account: Account
    start: str

    @classmethod
    def of(
        cls,
        paths: Sequence[PathModel],
        join: Choice,
        layers: int | None,
        blocks: int,
        frozen: Sequence[str],
        start: str,
    ) -> "Composition":
        """Lay the model out, build it on the meta device and account for its tensors."""
        layout = lay_out(paths, join, layers, blocks)
        first = paths[0].plain.config
        special = {name: getattr(first, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = BraidConfig(layout.architecture, vocab_size=first.vocab_size, frozen=list(frozen), **special)
        model = skeleton(config)
        return cls(paths, join, layout, model, account_for(model, paths), start)

    @property
    def config(self) -> BraidConfig:
        return self.model.config

    @property
    def shows_routes(self) -> bool:
        """Whether `braid routes` can tell which path a token takes: there is a router, or paths as wide as the join."""
        widths = {path.width for path in self.paths}
        return any(
            not isinstance(one, Join) or hasattr(one, "router") or widths == {one.width_out}
            for one in routing_modules(self.model)
        )

    def lines(self) -> tuple[str, list[str], list[str]]:
        """The title of the plan, its details and its notes."""
        names = " + ".join(path.name for path in self.paths)
        stages = ", ".join(_stage(choice) for choice in self.config.decoded.stages)
        title = f"Compose {names}: width {self.config.hidden_size}, join {self.join.kind}"
        sizes = [f"  {what:<12} {text}" for what, text in self._sizes()]
        return title, [f"  stages: {stages}", *self._alignment(), *sizes], self._notes()

    def fresh_parts(self) -> list[str]:
        """The kinds of part that are newly initialised."""
        return list(dict.fromkeys(origin.kind for origin in self.account.fresh.values()))

    def _alignment(self) -> list[str]:
        """Which of each path's blocks, counted from 0, are in which layer."""
        heads = [f"{path.name} (width {path.width}, {path.depth} blocks)" for path in self.paths]
        rows: list[list[str]] = []
        before = [0] * len(self.paths)
        stages = [stage for stage in self.model.model.stages if isinstance(stage, ParallelStage)]
        for stage, sections in zip(stages, aligned_sections(self.paths), strict=True):
            depths = [len(section.blocks) for section in sections]
            for layer in range(len(stage.layers)):
                inside = [blocks_in_layer(depth, len(stage.layers), layer) for depth in depths]
                blocks = [range(first + own.start, first + own.stop) for first, own in zip(before, inside, strict=True)]
                rows.append([f"layer {len(rows)}", *map(_numbers, blocks)])
            before = [first + depth for first, depth in zip(before, depths, strict=True)]
        return columns([["blocks in", *heads], *rows])

    def _sizes(self) -> list[tuple[str, str]]:
        facts = model_facts(self.model)
        memory, trained = facts["memory"], self.trained
        return [
            ("parameters", f"{facts['parameters']:,}, {facts['active_parameters']:,} active for a token"),
            ("trained", f"{trained:,} ({trained / facts['parameters']:.0%})"),
            (
                "memory",
                f"weights {_megabytes(memory['weights_float32'])}, in training with AdamW "
                f"{_megabytes(memory['weights_float32'] + TRAINED_BYTES * trained)} (float32, activations on top)",
            ),
        ]

    @property
    def trained(self) -> int:
        """How many parameters training will change."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def _frozen(self) -> set[str]:
        """The tensors that training will not change."""
        return {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}

    def _stacking_note(self) -> str:
        layers = [module for module in self.model.modules() if isinstance(module, ParallelLayer)]
        if all(layer.stack is not None for layer in layers):
            return "the paths have one shape and are computed as one stacked product"
        first = _shape(self.paths[0])
        differing = [key for key in first if any(_shape(path)[key] != first[key] for path in self.paths)]
        because = f"they differ in {', '.join(differing)}" if differing else "a part of theirs cannot be stacked"
        return f"the paths are computed one by one, which is slower: {because}"

    def _notes(self) -> list[str]:
        notes = [*self.layout.notes, self._stacking_note()]
        if kinds := [kind for kind in self.fresh_parts() if kind in ("projections", "joins")]:
            notes.append(f"{' and '.join(kinds)} begin {STARTS[self.start]}")
        notes += [f"'{path.name}': {note}" for path in self.paths for note in path.source.notes]
        first, *others = ((path.name, path.source.tokenizer.identity()["roles"]) for path in self.paths)
        differing = [name for name, roles in others if roles != first[1]]
        if differing:
            notes.append(f"special tokens have other roles in {', '.join(differing)}; those of '{first[0]}' count")
        if self.config.frozen:
            fresh = dict.fromkeys(o.kind for name, o in self.account.fresh.items() if name in self._frozen())
            also = f" (so also the fresh {', '.join(fresh)})" if fresh else ""
            nothing = "" if self.trained else "; nothing is left to train"
            notes.append(f"training will leave as they are: {', '.join(self.config.frozen)}{also}{nothing}")
        return notes


def _shape(path: PathModel) -> dict[str, Any]:
    shape: dict[str, Any] = {"width": path.width, "depth": path.depth}
    for part in path.sections[0].options:
        shape[part] = [section.options[part] for section in path.sections]
    return shape


def _stage(choice: Choice) -> str:
    """`block x 2` or `project to 64`."""
    layers, to = getattr(choice.options, "layers", None), getattr(choice.options, "to", None)
    return " ".join(filter(None, (choice.kind, layers and f"x {layers}", to and f"to {to}")))


def _numbers(blocks: range) -> str:
    return ", ".join(map(str, blocks)) or "none: passes on what it reads"


def _megabytes(amount: int) -> str:
    return f"{amount / 1e6:,.1f} MB"


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
        for name, origin in _stage_origins(f"model.stages.{address}", stage, paths, here):
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


def _stage_origins(
    address: str, stage: nn.Module, paths: Sequence[PathShape], sections: Sequence[Section]
) -> Iterator[tuple[str, Derived | Fresh]]:
    """The origins of a stage's tensors; those of a parallel stage come from these sections of the paths."""
    if isinstance(stage, ParallelStage):
        for index, layer in enumerate(stage.layers):
            assert isinstance(layer, ParallelLayer)
            here = {}
            for path, section in zip(paths, sections, strict=True):
                inside = blocks_in_layer(len(section.blocks), len(stage.layers), index)
                here[path.name] = [section.blocks[i] for i in inside]
            yield from _layer_origins(f"{address}.layers.{index}", layer, paths, here)
    elif isinstance(stage, (BlockStage, ProjectStage)):
        kind = "full-width blocks" if isinstance(stage, BlockStage) else "projections"
        yield from ((f"{address}.{name}", Fresh(kind, address)) for name in stage.state_dict())


def _layer_origins(
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
    """The member that owns a tensor of a stack (None: all do), its name in a single block, and how it is made."""
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
    for module in model.modules():
        if isinstance(module, (ProjectStage, SharedLinear)) and module.linear is not None:
            _pass_on(module.linear, widths)
        elif isinstance(module, GumbelJoin):
            _pass_on(module.combine, widths)
        if isinstance(module, SameWidthJoin) and module.out is not None:
            _pass_on(module.out, widths)
    for layer in layers:
        own = dict(zip(layer.names, torch.eye(sum(widths)).split(widths), strict=True))
        for name, linear in layer.enter.items() if isinstance(layer.enter, nn.ModuleDict) else ():
            _set(linear, own[name])
        join = layer.join
        for name, linear in join.leave.items() if isinstance(join, SameWidthJoin) else ():
            _set(linear, own[name].t())


def _pass_on(linear: nn.Linear, widths: Sequence[int]) -> None:
    _set(linear, _passing(linear.out_features, linear.in_features, widths))


def _set(linear: nn.Module, matrix: Tensor) -> None:
    assert isinstance(linear, nn.Linear)
    linear.weight.copy_(matrix)


def _passing(rows: int, columns: int, widths: Sequence[int]) -> Tensor:
    """The identity; to a narrower stream the mean of all parts, from a narrower one the same copy for all parts."""
    if rows == columns:
        return torch.eye(rows)
    narrow, parts = torch.eye(widths[0]), len(widths)
    return torch.cat([narrow / parts] * parts, dim=1) if rows < columns else torch.cat([narrow] * parts)
