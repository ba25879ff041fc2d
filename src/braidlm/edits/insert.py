"""`braid edit insert`: new modules in each layer of a trained model, to learn more (ModuleFormer, section 4.3).

Right after the insertion the new modules are closed: no token chooses them, and the model computes what it did. The
training that follows opens them (`training.opening`) and changes them alone, with as much of the routers and of the
embedding as the options say.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from braidlm.bridges.model_info import ModelInfo
from braidlm.core.errors import BraidError
from braidlm.core.models.logits import probe_ids
from braidlm.edits.account import SOURCE, Fresh, Part, Transform, chosen_rows, from_source, parameters, planned
from braidlm.edits.domain_embedding import DomainRow, domain_rows
from braidlm.edits.edit import Edit, EditPlan, edits
from braidlm.edits.modules import Layer, Modules, check_open, layers_of, modules_of, stages_of
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.ranges import Choices, Count, NonNegative
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import FREEZABLE
from braidlm.opening.braid import OpenedBraid

DECIDED = ("blocks", "modules", "routers", "embedding", "head")
"""The parts of which this edit says whether training changes them."""


@edits.register("insert")
@dataclass(frozen=True)
class Insert(Edit):
    """Which modules are new, and what trains with them."""

    about: ClassVar[str] = "add new modules to every layer, for training on new text without changing the others"

    modules: Choices
    """How many modules each layer gets."""
    name: str = "new"
    """What they are called: german gives german_1, german_2 and so on, the same names in every layer."""
    parts: Literal["feed", "attention", "both"] = "both"
    """Which experts become more."""
    router: Literal["all", "rows"] = "all"
    """What training changes of the routers: all of them, for training on old and new text together (the paper's first
    variant), or only the rows of the new modules, for new text alone (its second)."""
    embedding: Literal["trained", "frozen"] = "trained"
    """Whether training changes the embedding; the head follows it, also where it has weights of its own."""
    text: str | None = None
    """The text that they are for (a file, a folder or packed data): their rows of the routers then begin as its domain
    embedding, the mean of what a router reads in it (FlexOlmo), beside what the initialisation gives to each."""
    beside: str | None = None
    """Text that they are not for, such as what all owners share: its mean is taken from that of `text`."""
    tokens: Count = 20_000
    """How many tokens of each text are read."""
    start: Literal["fresh", "copies"] = "fresh"
    """Whether new modules begin as the model's initialisation makes them, or as copies of the model's own, in turn."""
    top_k: Choices | None = None
    """How many modules each token chooses; by default as many as before. With one more than before, a token has
    modules of the base and new ones, where new ones alone would have to be better than those that were trained."""
    scale: NonNegative = 1.0
    """A factor on the output matrices of the new modules; with 0 they add nothing to the stream at first."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise BraidError(f"'{self.name}' is no name for modules", todo="Use letters, digits, '_', '-' and '.'.")
        if self.start == "copies" and self.scale != 1.0:
            raise BraidError("scale: copies of modules are as these are", todo="Leave out --scale, or --start copies.")
        if self.beside is not None and self.text is None:
            raise BraidError("beside: there is no text for which the modules are", todo="Give it by `--text`.")
        if self.beside is not None and self.beside == self.text:
            raise BraidError("beside: this is the text that the modules are for", todo="Give text of others.")

    @property
    def names(self) -> list[str]:
        return [f"{self.name}_{number + 1}" for number in range(self.modules)]

    def counted(self, config: BraidConfig) -> BraidConfig:
        stages, _ = self._stages(layers_of(ModelInfo(config)))
        return BraidConfig(config.architecture | {"stages": stages}, vocab_size=config.vocab_size)

    def _stages(self, layers: list[Layer]) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The stages of layers with the new modules, and their addresses by the old ones."""
        for layer in layers:
            for one in modules_of(layer):  # modules that were inserted before are old ones now
                experts = layer.options[one.part]["experts"]
                new = self.names if self.parts in (one.part, "both") else []
                experts["names"], experts["router"] = [*one.names, *new], self._router(one, new)
        return stages_of(layers)

    def plan(self, source: OpenedBraid) -> EditPlan:
        layers = layers_of(source.info)
        modules = [one for layer in layers for one in modules_of(layer)]
        grown = [one for one in modules if self.parts in (one.part, "both")]
        self._check(source, modules, grown)
        without = sum(not modules_of(layer) for layer in layers)
        stages, addresses = self._stages(layers)
        decided = {"blocks"} | ({"routers"} if self.router == "rows" else set())
        decided |= {"embedding", "head"} if self.embedding == "frozen" else set()
        frozen = [part for part in FREEZABLE if part in decided | (set(source.config.frozen) - set(DECIDED))]
        config = source.config_with(frozen, stages=stages)
        model, account = planned(config, addresses)
        for one in modules:
            if one.new:
                account.left_out[Part(SOURCE, one.opening)] = "modules that were inserted before are open"
        new_rows: dict[str, int] = {}
        for one in grown:
            for name, origin in account.derived.items():
                if not one.has_rows(tensor := origin.parts[0].tensor):
                    continue
                if self.start == "copies" and ".router." not in tensor:
                    old = range(len(one.names))
                    account.origins[name] = from_source(tensor, chosen_rows([*old, *islice(cycle(old), self.modules)]))
                    continue
                new_rows[name] = len(one.names)
                account.origins[name] = from_source(tensor, _with_new_rows(self.modules, len(one.names)))
            router = f"{addresses[one.block]}.{one.part}.router"
            account.origins[f"{router}.opening"] = Fresh("closed modules", router)
        before = source.info.parameters
        names = self.names[0] if self.modules == 1 else f"{self.names[0]} to {self.names[-1]}"
        more = f"{parameters(model) - before:,} parameters beside its {before:,}"
        routers = f"{self.modules} new modules for each of {len(grown)} routers"
        title = f"Insert {names} into {source.title}: {routers}, {more}"
        notes = [f"training will leave as they are: {', '.join(frozen)}"]
        if "embedding" in frozen and not source.config.tie_word_embeddings:
            notes.append("the head has weights of its own; they stay as they are, as the embedding does")
        if without:
            several = "layers have no experts and stay as they are"
            notes.append(f"{without} {several if without > 1 else 'layer has no experts and stays as it is'}")
        domains = {}
        if self.text is not None:
            rows = domain_rows(source, grown, self.text, self.beside, self.tokens)
            domains = {f"{addresses[one.block]}.{one.part}.router.scores": rows[one.address] for one in grown}
        if others := sorted({one.router["top_k"] for one in grown if self._chooses_others(one)}):
            what = f"a token chooses {self.top_k} modules in place of {' or '.join(map(str, others))}"
            notes.append(f"{what}, also while the new ones are closed: the logits change at once")
        fill = partial(_fill, new_rows=new_rows, count=self.modules, scale=self.scale, domains=domains)
        return EditPlan(title, model, account, notes, finish=fill, unchanged_on=None if others else probe_ids(config))

    def _chooses_others(self, one: Modules) -> bool:
        """Whether tokens get another number of the old modules, before any new one is open."""
        before, after = (min(k, len(one.names)) for k in (one.router["top_k"], self.top_k or one.router["top_k"]))
        return before != after

    def _router(self, one: Modules, new: list[str]) -> dict[str, Any]:
        """The options of a router that gets these modules."""
        top_k = one.router["top_k"] if self.top_k is None or not new else self.top_k
        base_top_k = None if top_k == one.router["top_k"] else one.router["top_k"]
        return one.router | {"new": list(new), "top_k": top_k, "base_top_k": base_top_k}

    def _check(self, source: OpenedBraid, modules: list[Modules], grown: list[Modules]) -> None:
        if not modules:
            what = "this model has no experts in its blocks: there is no router that could choose new modules"
            todo = "Train a model with experts: `feed: {experts: 16}` or `attention: {experts: 8}` in its blocks."
            raise BraidError(what, source.title, todo)
        if not grown:
            there = modules[0].part
            raise BraidError(f"this model has no {self.parts} experts", source.title, f"It has --parts {there}.")
        check_open(modules, source)
        for one in grown:
            if self.top_k is not None and self.top_k > (most := len(one.names) + self.modules):
                what = f"top_k: there are not {self.top_k}, but {len(one.names)} modules and {self.modules} new ones"
                raise BraidError(what, one.address, f"Give at most --top-k {most}, or insert more.")
            if taken := [name for name in self.names if name in one.names]:
                advice = "Choose another --name."
                raise BraidError(f"there is a module of that name already: {', '.join(taken)}", one.address, advice)


def _with_new_rows(count: int, after: int) -> Transform:
    """Rows of zeros after so many of a tensor's own."""

    def insert(tensor: Tensor) -> Tensor:
        return torch.cat((tensor[:after], tensor.new_zeros(count, *tensor.shape[1:]), tensor[after:]))

    return Transform(insert, f"{count} new rows after row {after - 1}")


def _fill(
    model: BraidForCausalLM, new_rows: dict[str, int], count: int, scale: float, domains: Mapping[str, DomainRow]
) -> None:
    """Give new rows, which begin at these numbers, what the model's initialisation gives to all rows; those of routers
    the domain's row too."""
    for address, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False) if f"{address}.{name}" in new_rows]
        if own:
            fresh = deepcopy(module)
            model._init_weights(fresh)
        for name in own:
            first = new_rows[f"{address}.{name}"]
            rows = fresh.get_parameter(name)[first : first + count]
            if address in domains:
                rows = rows + getattr(domains[address], name)
            module.get_parameter(name)[first : first + count] = rows * scale if module.writes_stream else rows
