"""`braid edit withdraw`: models of an average, or modules that owners inserted, leave for good with their weights."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch

from braidlm.bridges.model_info import ModelInfo
from braidlm.core.differences import bullet_list
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.logits import check_promise, probe_ids
from braidlm.edits.account import Account, Derived, Transform, chosen_rows, from_source, parameters, targets
from braidlm.edits.composing.composition import in_stack
from braidlm.edits.composing.decoders import withdraw_members
from braidlm.edits.composing.side_by_side import plan_without_modules
from braidlm.edits.edit import Edit, EditPlan, edits
from braidlm.edits.modules import check_uncompressed, layers_of, modules_of
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.heads.ends import TokenEmbedding
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.average import AverageHead, PerPathNorm
from braidlm.model.paths.parallel import BLOCK_OPTIONS, ParallelLayer, blocks_in_layer
from braidlm.model.paths.switches import path_names, use_paths
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.gating import MEMBERS
from braidlm.opening.opened_model import OpenedModel

SIDE_BY_SIDE = ("model.embedding.weight", "model.positions.weight", "head.weight")
"""The tensors whose columns are those of all models side by side."""
ONE_ROW_EACH = ("head.bias", "head.mixture.bias")
IN_BLOCK = re.compile(r"(?P<layer>.+\.layers\.\d+)\.(?:stack|paths\.(?P<path>[^.]+))\.(?P<number>\d+)\.(?P<own>.+)")
"""The name of a tensor in a block of a stack, or of one path."""
IN_JOIN = re.compile(r"(?P<norms>.+\.layers\.\d+\.join\.norms)\.(?P<number>\d+)\.(?P<own>.+)")
"""The name of a tensor of a join's norms, which are numbered."""


@edits.register("withdraw")
@dataclass(frozen=True)
class Withdraw(Edit):
    """Which models of an average leave it, or which inserted modules."""

    about: ClassVar[str] = "take models out of an average, or inserted modules, for good and with their weights"
    backend = "any"

    paths: tuple[str, ...] = ()
    """Names of the models that leave; the probabilities of the others are averaged as if these had never been there."""
    modules: tuple[str, ...] = ()
    """Names or patterns of inserted modules that leave every layer, with their rows of the routers: german*"""

    def __post_init__(self) -> None:
        if bool(self.paths) == bool(self.modules):
            what = "name the models of an average that leave (--paths), or inserted modules (--modules)"
            raise BraidError(what, todo="`--paths maths`")

    def apply(self, model: OpenedModel, out: str | Path | None, record: dict[str, Any], dry_run: bool) -> Path | None:
        if isinstance(model, OpenedDecoder) and model.kind == MEMBERS:
            if self.modules:
                raise BraidError("members have no inserted modules", model.title, "Name those that leave: `--paths`.")
            return withdraw_members(model, self.paths, out, record, dry_run)
        return super().apply(model, out, record, dry_run)

    def plan(self, source: OpenedBraid) -> EditPlan:
        plan = plan_without_modules(source, self.modules) if self.modules else self._without_models(source)
        apart = ("blocks", "routers", "embedding", "head") if self.modules else ("paths",)
        if _was_trained(source.edit_record()) and not set(apart) <= set(source.config.frozen):
            what = "the base and these modules" if self.modules else "the models of this average"
            what += " were trained together"
            plan.notes = [*plan.notes, f"{what}: what stays may have learned from the text of what leaves"]
        return plan

    def _without_models(self, source: OpenedBraid) -> EditPlan:
        kept = self._kept(source)
        names, widths = source.info.model.head.names, source.info.model.head.widths
        left = [names[index] for index in kept]
        architecture = _architecture(source, left)
        alone = _unwrapped(source, architecture) if len(left) == 1 else None
        config, beginnings = alone or (source.config_with(**architecture), {})
        # The models that stay and were active are active, or all.
        config.paths = None if alone else [name for name in config.paths or () if name in left] or None
        model = skeleton(config)
        starts = [0, *accumulate(widths)]
        columns = [channel for i in kept for channel in range(starts[i], starts[i + 1])]
        account = Account()
        for name in targets(model):
            old = next((old + name.removeprefix(new) for new, old in beginnings.items() if name.startswith(new)), name)
            account.origins[name] = _origin(source, old, kept, columns, left)
        if alone and "head.bias" in account.origins:
            account.origins["head.bias"] = from_source("head.bias", _one_row(kept[0], "its own"))
        account.leave_out_unused(source.info.tensors, "of a model that leaves")
        leave = ", ".join(name for name in names if name not in left)
        stay = f"{', '.join(left)} {'stays' if len(left) == 1 else 'stay'}"
        size = f"{parameters(model):,} of {source.info.parameters:,} parameters"
        title = f"Withdraw {leave} from {source.title}: {stay}, {size}"
        return EditPlan(title, model, account, source.notes, paths=names, check=partial(_check, source, left))

    def _kept(self, source: OpenedBraid) -> list[int]:
        """The indices of the models that stay."""
        check_uncompressed(source.info)
        head = source.info.model.head
        if not path_names(source.info.model):
            inserted = [name for layer in layers_of(source.info) for one in modules_of(layer) for name in one.new]
            todo = (
                f"Inserted modules leave with `--modules`: {', '.join(dict.fromkeys(inserted))}." if inserted else None
            )
            raise BraidError("this is one model, and no average of several", source.title, todo)
        if not isinstance(head, AverageHead):
            what = "only a model of an average can be withdrawn for good: other joins have learned from all their paths"
            raise BraidError(what, source.title, "Switch it off (`--paths`), or compose again without it.")
        if shared := _shared(source.info):
            only = "a model can be withdrawn only where the models share no part"
            what = f"{only}, as after `braid compose --join average`, and here:{bullet_list(shared)}"
            todo = "Switch the model off (`--paths`), or compose the others and train what they share."
            raise BraidError(what, source.title, todo)
        for name in self.paths:
            if name not in head.names:
                raise BraidError(f"the model has no path '{name}'.{did_you_mean(name, head.names)}", source.title)
        kept = [index for index, name in enumerate(head.names) if name not in self.paths]
        if not self.paths or not kept:
            what = "name the models that leave; at least one must stay"
            raise BraidError(what, source.title, f"There are {', '.join(head.names)}.")
        return kept


def _was_trained(record: dict[str, Any]) -> bool:
    """Whether an average, or the one that it was edited from, was trained as a whole; its models alone all were."""
    is_edited = str(record.get("made_by")).startswith("braid edit")
    return bool(record.get("training")) or (is_edited and any(map(_was_trained, record.get("sources", []))))


def _shared(info: ModelInfo) -> list[str]:
    """What the models of an average have in common, of which none of them can be taken out."""
    architecture, body, head = info.architecture, info.model.model, info.model.head
    parts, shared = _parts(head.names, head.widths), []
    if not isinstance(body.embedding, TokenEmbedding):
        shared.append(f"the embedding ({architecture.embedding.kind}) is one for all models")
    for number, (choice, stage) in enumerate(zip(architecture.stages, body.stages, strict=True)):
        layers = getattr(stage, "layers", ())
        if not layers or not all(isinstance(layer, ParallelLayer) and layer.reads_own_slice for layer in layers):
            shared.append(f"stage {number} ({choice.kind}) reads the streams of all models together")
        elif (own := _parts(layers[0].names, layers[0].widths)) != parts:
            shared.append(f"the paths of stage {number} are {own}, and those of the head {parts}")
    if not isinstance(body.norm, PerPathNorm):
        shared.append(f"the norm before the head ({architecture.norm.kind}) is one for all models")
    elif (own := _parts(body.norm.paths, body.norm.widths)) != parts:
        shared.append(f"the paths of the norm before the head are {own}, and those of the head {parts}")
    if architecture.gates is not None:
        shared.append("gates were added, and each reads the streams of all models together")
    if any(name.startswith("head.mixture.router") for name in info.tensors):
        shared.append("the shares of this mixture depend on what all of its models read (per_token)")
    return shared


def _parts(names: Iterable[str], widths: Iterable[int]) -> str:
    """The paths of a stream in the order of their parts, with their widths."""
    return " + ".join(f"{name} ({width})" for name, width in zip(names, widths, strict=True))


def _architecture(source: OpenedBraid, left: Sequence[str]) -> dict[str, Any]:
    """The architecture with these paths alone."""
    architecture: dict[str, Any] = source.config.architecture
    for part in (architecture["head"], architecture["norm"]):
        part["paths"] = [path for path in part["paths"] if path["name"] in left]
    widths = {path["name"]: path["width"] for path in architecture["head"]["paths"]}
    architecture["width"] = sum(widths.values())
    for choice, built in zip(architecture["stages"], source.info.model.model.stages, strict=True):
        stage = choice["parallel"]
        # A width that was left open was a share of the whole stream, which is narrower now; so is what comes out.
        stage["paths"] = [path | {"width": widths[path["name"]]} for path in stage["paths"] if path["name"] in left]
        stage["to"] = None
        stage["stacked"] = built.layers[0].stack is not None and stage["stacked"]  # tensors keep their names
    return architecture


def _origin(
    source: OpenedBraid, name: str, kept: Sequence[int], columns: Sequence[int], left: Sequence[str]
) -> Derived:
    if name in SIDE_BY_SIDE:
        return from_source(name, Transform(lambda tensor: tensor[:, columns], "their columns"))
    if norm := IN_JOIN.fullmatch(name):
        return from_source(f"{norm['norms']}.{kept[int(norm['number'])]}.{norm['own']}")
    block = IN_BLOCK.fullmatch(name)
    if name in source.info.tensors and (block is None or block["path"]):
        return from_source(name, chosen_rows(kept) if name in ONE_ROW_EACH else None)
    assert block is not None
    address = f"{block['layer']}.stack.{block['number']}"
    stack = source.info.model.get_submodule(address)
    own = block["own"]
    if block["path"]:  # of a stack one model is left, which has modules of its own
        own = next(other for other in stack.state_dict() if in_stack(stack, other)[:2] in ((None, own), (left[0], own)))
    member, _, operation = in_stack(stack, own)
    if member is not None:
        return from_source(f"{address}.{own}")
    if operation == "one after another":
        experts = stack.feed.experts
        rows = [index * experts + row for index in kept for row in range(experts)]
        return from_source(f"{address}.{own}", Transform(lambda tensor: tensor[rows], "their experts"))
    if not block["path"]:
        return from_source(f"{address}.{own}", chosen_rows(kept))
    transposed = operation == "stacked, transposed"
    return from_source(f"{address}.{own}", _one_row(kept[0], "transposed" if transposed else "", transposed))


def _one_row(row: int, how: str, transposed: bool = False) -> Transform:
    """The row of a stack that is left."""
    text = ", ".join(filter(None, (chosen_rows([row]).description, how)))
    return Transform(lambda tensor: tensor[row].t() if transposed else tensor[row], text)


@torch.no_grad()
def _check(source: OpenedBraid, left: Sequence[str], edited: BraidForCausalLM) -> None:
    """The model must give what the old one gives with the others switched off."""
    old = source.load(dtype=torch.float32)
    use_paths(old, left)
    use_paths(edited, None)
    ids = probe_ids(edited.config)
    before, after = (model(ids).logits.log_softmax(-1) for model in (old, edited))
    use_paths(edited, edited.config.paths)
    promise = "the others should be averaged as if these had been switched off, and a log-probability differs by"
    check_promise(promise, before, after)


def _unwrapped(source: OpenedBraid, architecture: dict[str, Any]) -> tuple[BraidConfig, dict[str, str]] | None:
    """The configuration of an average of one path as that of the path alone, and the beginnings of its tensors' names
    with those that they have in the average; None where its layers do more than one block after another does.
    """
    (part,) = architecture["norm"]["paths"]
    stages, beginnings = [], {"model.norm.": f"model.norm.paths.{part['name']}."}
    for number, choice in enumerate(architecture["stages"]):
        stage = choice["parallel"]
        (path,) = stage["paths"]
        join = stage["join"]
        if stage["share"] is not None or join["norm"] is not None or join["residual"]:
            return None
        layers, depth = stage["layers"], path["depth"] or stage["layers"]
        for layer in range(layers):
            for inside, index in enumerate(blocks_in_layer(depth, layers, layer)):
                own = f"model.stages.{number}.layers."
                beginnings[f"{own}{index}."] = f"{own}{layer}.paths.{path['name']}.{inside}."
        stages.append({"block": {"layers": depth, **{name: path[name] for name in BLOCK_OPTIONS}}})
    head = {"kind": "linear", "bias": architecture["head"]["bias"]}
    frozen = [part for part in source.config.frozen if part not in ("paths", "joins")]
    changed = architecture | {"stages": stages, "norm": part["norm"], "head": head}
    return source.config_with(frozen, **changed), beginnings
