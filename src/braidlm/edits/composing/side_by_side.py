"""Modules of several owners on one base, side by side: each owner inserted modules into the same base and trained them
alone, with the base frozen. Their rows in banks and routers follow those of the base, and nothing else changes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from braidlm.bridges.model_info import ModelInfo
from braidlm.core.differences import bullet_list, differences, shown
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.models.logits import check_promise, probe_ids
from braidlm.edits.account import SOURCE, Derived, Part, chosen_rows, from_source, parameters, planned
from braidlm.edits.edit import EditPlan
from braidlm.edits.modules import (
    Layer,
    Modules,
    all_modules,
    check_open,
    layers_of,
    modules_of,
    stages_of,
    still_frozen,
    with_inserted,
)
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.strict import encode
from braidlm.model.paths.switches import FREEZABLE, switch_off_modules
from braidlm.opening.braid import OpenedBraid

if TYPE_CHECKING:
    from braidlm.model.modeling_braid import BraidForCausalLM

LEFT = ("blocks", "modules", "embedding", "head")
"""What training from the composed folder leaves as it is: it changes the routers alone."""
APART = "Each owner: `braid edit insert BASE --router rows --embedding frozen --name OWNER`, then `braid train`."


@dataclass
class Owner:
    """A model with inserted modules, as its configuration has it."""

    name: str
    info: ModelInfo
    called: Mapping[str, str] = field(default_factory=dict)
    """New names of inserted modules by those that they have."""

    def __post_init__(self) -> None:
        self.layers = layers_of(self.info)
        self.modules = [modules_of(layer) for layer in self.layers]
        self.inserted = list(dict.fromkeys(name for one in self._all() for name in one.new))
        if not self.inserted:
            what = "this model has no inserted modules, and `--join modules` puts these side by side"
            raise BraidError(what, self.name, APART)

    def rename(self) -> None:
        """Call the inserted modules after the owner."""
        self.called = {name: f"{self.name}_{number}" for number, name in enumerate(self.inserted, start=1)}

    def new(self, layer: int, number: int) -> list[str]:
        """The names of the inserted modules that one router of a layer chooses among."""
        return [self.called.get(name, name) for name in self.modules[layer][number].new]

    def base(self) -> dict[str, Any]:
        """What is equal for all owners: the configuration with its layers one by one, without inserted modules."""
        architecture = {**self.info.config.architecture, "vocab_size": self.info.config.vocab_size}
        layers = [layer.options for layer in _grown(self, lambda at, n: with_inserted(self.modules[at][n].router, ()))]
        return {**architecture, "stages": [layer.kind for layer in self.layers], "layers": layers}

    def place(self, tensor: str) -> tuple[int | None, str]:
        """The number of the layer that a tensor belongs to, if any, and its name there."""
        for number, layer in enumerate(self.layers):
            if tensor.startswith(f"{layer.address}."):
                return number, tensor.removeprefix(layer.address)
        return None, tensor

    def at(self, layer: int | None, own: str) -> tuple[str, Modules | None]:
        """The tensor at such a place, and the modules for each of which it has a row."""
        if layer is None:
            return own, None
        tensor = self.layers[layer].address + own
        return tensor, next((one for one in self.modules[layer] if one.has_rows(tensor)), None)

    def _all(self) -> Iterator[Modules]:
        return (one for own in self.modules for one in own)


def _grown(owner: Owner, router: Callable[[int, int], dict[str, Any]]) -> list[Layer]:
    """The layers with the inserted modules of these routers after the base's, by the numbers of layer and part."""
    layers = []
    for at, layer in enumerate(owner.layers):
        options = encode(layer.options)
        for number, one in enumerate(owner.modules[at]):
            experts = options[one.part]["experts"]
            experts["router"] = router(at, number)
            experts["names"] = [*one.names[: len(one.names) - len(one.new)], *experts["router"]["new"]]
        layers.append(Layer(layer.kind, options, layer.address))
    return layers


def laid_out(owners: Sequence[Owner]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The stages of the model with the modules of all owners, and the address of each layer by that of the first
    owner's. Models on other bases are refused, and modules of one name."""
    if found := differences({owner.name: owner.base() for owner in owners}):
        each = [f"{key}: {', '.join(f'{n} {shown(v)}' for n, v in own.items())}" for key, own in found.items()]
        if all(".router.losses." in key for key in found):
            what = "these models were trained under different routing losses, which the routers of one base share"
            raise BraidError(f"{what}:{bullet_list(each)}", todo="Train each with the same `training.routing_losses`.")
        raise BraidError(f"these models do not stand on one base:{bullet_list(each)}", todo=APART)
    of: dict[str, str] = {}
    for owner in owners:
        for name in (owner.called.get(name, name) for name in owner.inserted):
            if name in of:
                what = f"'{of[name]}' and '{owner.name}' both have a module called '{name}'"
                raise BraidError(what, todo="`--names A B` calls their modules A_1, A_2, B_1 and so on.")
            of[name] = owner.name
    return stages_of(_grown(owners[0], partial(_router, owners)))


def counted_modules(configs: Mapping[str, BraidConfig]) -> BraidConfig:
    """The configuration of the base with the inserted modules of these models, called after them."""
    owners = [Owner(name, ModelInfo(config)) for name, config in configs.items()]
    for owner in owners:
        owner.rename()
    first = owners[0].info.config
    return BraidConfig(first.architecture | {"stages": laid_out(owners)[0]}, vocab_size=first.vocab_size)


def _router(owners: Sequence[Owner], at: int, number: int) -> dict[str, Any]:
    """The options of one router that chooses among the inserted modules of all owners."""
    having = {owner.name: own for owner in owners if (own := owner.modules[at][number]).new}
    counts = {name: one.router["top_k"] for name, one in having.items()}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"'{name}' {count}" for name, count in counts.items())
        what = f"these models choose unequal numbers of modules for a token (top_k): {each}"
        raise BraidError(what, owners[0].modules[at][number].address, "Insert with one --top-k.")
    one = next(iter(having.values()), owners[0].modules[at][number])
    return with_inserted(one.router, [name for owner in owners for name in owner.new(at, number)])


def plan_modules(models: Mapping[str, OpenedBraid], rename: bool, freeze: Sequence[str]) -> EditPlan:
    """One model of the base and the inserted modules of all owners, which are renamed after these if that is asked."""
    owners = [Owner(name, model.info) for name, model in models.items()]
    for owner, model in zip(owners, models.values(), strict=True):
        check_open([one for own in owner.modules for one in own], model)
        if rename:
            owner.rename()
    stages, addresses = laid_out(owners)
    base, *others = owners
    source = models[base.name]
    config = source.config_with([part for part in FREEZABLE if part in {*LEFT, *freeze}], stages=stages)
    model, account = planned(config, addresses)
    differing: dict[str, list[str]] = {}
    for target, origin in account.derived.items():
        place = base.place(origin.parts[0].tensor)  # type: ignore[union-attr]
        tensors = {owner.name: owner.at(*place) for owner in owners}
        account.origins[target] = _side_by_side(tensors)
        for other in others:
            if not torch.equal(*(_base_of(models[name], *tensors[name]) for name in (base.name, other.name))):
                differing.setdefault(other.name, []).append(target)
            if tensors[other.name][1] is None:
                account.left_out[Part(other.name, tensors[other.name][0])] = f"the base, as in {base.name}"
    for name, changed in differing.items():
        what = (
            f"'{name}' does not stand on the base of '{base.name}': tensors of the base differ:{bullet_list(changed)}"
        )
        raise BraidError(what, str(models[name].folder), APART)
    each = [f"{owner.name} ({', '.join(owner.called.get(name, name) for name in owner.inserted)})" for owner in owners]
    title = f"Compose the modules of {' + '.join(each)} on one base: {parameters(model):,} parameters"
    notes = [f"'{name}': {note}" for name, one in models.items() for note in one.notes]
    notes.append(f"training will leave as they are: {', '.join(config.frozen)}")
    return EditPlan(title, model, account, notes, check=partial(_check_each, models, owners))


def _side_by_side(tensors: Mapping[str, tuple[str, Modules | None]]) -> Derived:
    """The base's rows, those of all inserted modules, and rows of silent ones; or the base's tensor as it is."""
    (first, (tensor, modules)), *_ = tensors.items()
    if modules is None:
        return Derived((Part(first, tensor),))
    base, new, silent, before = list[int](), list[int](), list[int](), 0
    parts = []
    for name, (own, one) in tensors.items():
        assert one is not None
        count, old = len(one.names), len(one.names) - len(one.new)
        if own == one.opening:
            if one.new:
                parts.append(Part(name, own))
            continue
        parts.append(Part(name, own))
        if name == first:
            base = list(range(old))
            silent = list(range(count, count + one.router["silent"])) if ".router.scores." in own else []
        new += range(before + old, before + count)
        before += count + (one.router["silent"] if ".router.scores." in own else 0)
    return Derived(tuple(parts), "one after another", transform=chosen_rows([*base, *new, *silent]) if base else None)


def _base_of(source: OpenedBraid, tensor: str, modules: Modules | None) -> Tensor:
    """What a tensor has of the base: all but the rows of inserted modules."""
    if modules is None:
        return source.read(tensor)
    if tensor == modules.opening:
        return torch.empty(0)
    whole, count = source.read(tensor), len(modules.names)
    return torch.cat((whole[: count - len(modules.new)], whole[count:]))


@torch.no_grad()
def _check_each(models: Mapping[str, OpenedBraid], owners: Sequence[Owner], composed: "BraidForCausalLM") -> None:
    """With the modules of the others switched off, the model must be each owner's."""
    ids = probe_ids(composed.config)
    for owner in owners:
        others = [other.called.get(name, name) for other in owners if other is not owner for name in other.inserted]
        switch_off_modules(composed, others)
        promise = f"with the others' modules switched off it should be {owner.name}'s model, and a logit differs by"
        check_promise(promise, models[owner.name].load(dtype=torch.float32)(ids).logits, composed(ids).logits)
    switch_off_modules(composed, ())


def plan_without_modules(source: OpenedBraid, patterns: Sequence[str]) -> EditPlan:
    """The model without these inserted modules: as if they had never been there."""
    layers, modules = layers_of(source.info), all_modules(source)
    inserted = list(dict.fromkeys(name for one in modules for name in one.new))
    gone = [name for name in inserted if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in inserted):
            what = f"there is no inserted module '{pattern}'.{did_you_mean(pattern, inserted)}"
            todo = (
                f"Inserted are {', '.join(inserted)}." if inserted else "Modules of the base are pruned, not withdrawn."
            )
            raise BraidError(what, source.title, todo)
    for layer in layers:
        for one in modules_of(layer):
            experts = layer.options[one.part]["experts"]
            experts["names"] = [name for name in one.names if name not in one.new or name not in gone]
            experts["router"] = with_inserted(one.router, [name for name in one.new if name not in gone])
    stages, addresses = stages_of(layers)
    left = [name for name in inserted if name not in gone]
    model, account = planned(source.config_with(still_frozen(source, bool(left)), stages=stages), addresses)
    for target, origin in account.derived.items():
        tensor = origin.parts[0].tensor
        for one in modules:
            stay = [i for i, name in enumerate(one.names) if name not in one.new or name not in gone]
            if one.has_rows(tensor) and len(stay) < len(one.names):
                account.origins[target] = from_source(tensor, chosen_rows(one.rows_of(tensor, stay, ())))
    for one in modules:
        if one.new and not any(name in left for name in one.new):
            account.left_out[Part(SOURCE, one.opening)] = "no inserted module is left"
    size = f"{parameters(model):,} of {source.info.parameters:,} parameters"
    title = f"Withdraw {', '.join(gone)} from {source.title}: what stays is {', '.join(['the base', *left])}, {size}"
    return EditPlan(title, model, account, list(source.notes), check=partial(_check_without, source, gone))


@torch.no_grad()
def _check_without(source: OpenedBraid, gone: Sequence[str], edited: "BraidForCausalLM") -> None:
    """The model must give what the old one gives with these modules switched off."""
    old, ids = source.load(dtype=torch.float32), probe_ids(edited.config)
    switch_off_modules(old, gone)
    promise = "the model should be what it was with these modules switched off, and a logit differs by"
    check_promise(promise, old(ids).logits, edited(ids).logits)
