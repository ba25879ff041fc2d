"""Models that become paths: their names, whether they can be composed, and composing by averaging.

What is averaged is the models' probabilities, which is exact from the first step: nothing needs to be trained. In the
model it is a parallel stage whose paths stay apart (`concat`), a norm for each path, and a head of all paths.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn

from braidlm.bridges.model_info import ModelInfo
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.models.logits import UNCHANGED, check_promise, probe_ids
from braidlm.data.tokenizing.tokenizer import differences
from braidlm.model.config.ranges import Positive, Range
from braidlm.model.config.registry import ADVICE, Choice, NoOptions, Registry
from braidlm.model.config.strict import encode
from braidlm.model.heads.ends import embeddings, heads
from braidlm.model.paths.average import PosteriorHead
from braidlm.model.paths.joins import JoinConfig, joins
from braidlm.model.paths.parallel import PathConfig
from braidlm.model.stages import LowRank
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.opened_model import OpenedModel

if TYPE_CHECKING:
    from braidlm.model.modeling_braid import BraidForCausalLM


@dataclass(frozen=True)
class Section:
    """Neighbouring blocks of a model that are equal."""

    blocks: list[str]
    options: dict[str, Any]
    """With sizes that follow from the width made explicit."""


class PathModel:
    """The architecture of a model that becomes a path, its name, and the model with its weights where there is one."""

    def __init__(self, name: str, plain: ModelInfo, source: OpenedBraid | None = None):
        self.name, self.plain, self.source = name, plain, source
        self.architecture, self.width = plain.architecture, plain.architecture.width

    @property
    def depth(self) -> int:
        return len(self.plain.layers)

    @cached_property
    def sections(self) -> list[Section]:
        """The blocks; there are several sections only in a model that is averaged (`check_alone`)."""
        found: list[Section] = []
        for number, stage in enumerate(self.architecture.stages):
            options = self.plain.block_options(number)
            blocks = [f"model.stages.{number}.layers.{layer}" for layer in range(stage.options.layers)]
            if found and found[-1].options == options:
                found[-1].blocks.extend(blocks)
            else:
                found.append(Section(blocks, options))
        return found

    def cut(self, starts: list[int]) -> list[Section]:
        """The sections, cut at these blocks too."""
        blocks = [(address, section.options) for section in self.sections for address in section.blocks]
        parts = [blocks[start:end] for start, end in pairwise([*starts, len(blocks)])]
        return [Section([address for address, _ in part], part[0][1]) for part in parts]


def name_paths(models: Sequence[OpenedModel], names: Sequence[str] | None) -> list[str]:
    """The paths' names: those given, or the models' titles reduced to letters, digits, - and _."""
    folders = [one.folder.resolve() for one in models]
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise BraidError("this path is listed twice", str(twice[0]), "A model can be one path of another only once.")
    if names is not None and len(names) != len(models):
        what = f"{len(names)} names were given for {len(models)} paths"
        raise BraidError(what, todo="Give each path a name with `--names`, or none.")
    if names is None:
        names = [re.sub(r"[^\w-]+", "_", one.title).strip("_-") or "path" for one in models]
        names = [name if name.replace("-", "_").isidentifier() else f"path_{name}" for name in names]
    for name in sorted(names):
        if names.count(name) > 1:
            same = " and ".join(str(one.folder) for own, one in zip(names, models, strict=True) if own == name)
            raise BraidError(f"two paths are called '{name}': {same}", todo="Give each its own with `--names`.")
    for name in names:
        PathConfig(name=name)  # checks the name's characters
        if hasattr(nn.ModuleDict(), name):  # paths are kept in a ModuleDict, whose own attributes are reserved
            raise BraidError(f"a path cannot be called '{name}': torch reserves that name", todo="Use `--names`.")
    return list(names)


def check_tokenizers(models: Sequence[OpenedModel], names: Sequence[str]) -> None:
    """All models must have the same tokenizer; checked before a tensor is read."""
    for one, name in zip(models[1:], names[1:], strict=True):
        if differing := differences(models[0].tokenizer, one.tokenizer):
            what = f"'{names[0]}' and '{name}' have different tokenizers: {'; '.join(differing)}"
            todo = "Train paths on data prepared with one tokenizer: `braid prepare SOURCE --tokenizer DIR --out DIR`."
            raise BraidError(what, str(one.folder), todo)


def check_alone(path: PathModel, where: str, averaged: bool) -> None:
    """A model can be a path if it consists of blocks between an embedding and a head that can be concatenated; of equal
    ones, unless it is averaged."""
    architecture = path.architecture
    other = [f"stage {i} is '{stage.kind}'" for i, stage in enumerate(architecture.stages) if stage.kind != "block"]
    if other:
        what = f"a path is made of `block` stages only, and here {', '.join(other)}"
        raise BraidError(what, where, "Compose models that were trained alone.")
    problems = [] if averaged else path.plain.unequal_blocks()
    if architecture.gates is not None:
        problems.append("it has gates, each of which belongs to a layer: compose first, then add gates")
    if any(isinstance(module, LowRank) for module in path.plain.model.modules()):
        problems.append("its layers share weights with a LoRA of each (share.lora), which blocks of paths do not have")
    if architecture.compression:
        problems.append("its matrices are compressed: compose first, then factorize or quantize")
    for registry, choice in ((embeddings, architecture.embedding), (heads, architecture.head)):
        if not registry[choice.kind].composed:
            problems.append(f"the {registry.noun} is '{choice.kind}', and such parts cannot be concatenated")
    if problems:
        raise BraidError(f"this model cannot be a path: {'; '.join(problems)}", where)


def check_together(paths: Sequence[PathModel]) -> None:
    """All models must have the same vocabulary size and positions, and embeddings and heads that become one."""
    problems = []
    sizes = {path.name: path.plain.config.vocab_size for path in paths}
    if len(set(sizes.values())) > 1:
        problems.append(f"the vocabularies differ in size: {_each_has(sizes)} rows")
    kinds = {path.name: _described(path.architecture.positions) for path in paths}
    if len(set(kinds.values())) > 1:
        problems.append(f"positions differ: {_each_has(kinds)}")
    for registry in (embeddings, heads):
        choices = {path.name: getattr(path.architecture, registry.noun) for path in paths}
        if composed_end(registry, list(choices.values())) is None:
            described = {name: _described(choice) for name, choice in choices.items()}
            problems.append(f"{registry.noun}s differ: {_each_has(described)}")
    if problems:
        raise BraidError("these models do not fit together: " + "; ".join(problems))


def _each_has(facts: Mapping[str, object]) -> str:
    return ", ".join(f"'{name}' has {fact}" for name, fact in facts.items())


def aligned_sections(paths: Sequence[PathModel]) -> list[list[Section]]:
    """For each parallel stage, a section of every path: within a stage the blocks of a path are equal. Paths of one
    depth are cut wherever one of them changes its blocks; others must change them equally often."""
    sections = [path.sections for path in paths]
    if len({path.depth for path in paths}) == 1:
        starts = {sum(len(one.blocks) for one in own[:at]) for own in sections for at in range(len(own))}
        sections = [path.cut(sorted(starts)) for path in paths]
    counts = {path.name: len(own) for path, own in zip(paths, sections, strict=True)}
    if len(set(counts.values())) > 1:
        has = _each_has(counts)
        raise BraidError(f"these models do not fit together: of different depths, and kinds of blocks: {has}")
    return [list(together) for together in zip(*sections, strict=True)]


def composed_end(registry: Registry, choices: Sequence[Choice]) -> Choice | None:
    """The embedding or head that those of the paths become; None if they do not fit together."""
    kind = choices[0].kind
    if any(choice.kind != kind for choice in choices):
        return None
    options = registry[kind].composed_config([choice.options for choice in choices])
    return None if options is None else Choice(kind, options)


def _described(choice: Choice) -> str:
    options = ", ".join(f"{key} {value}" for key, value in encode(choice).items() if key != "kind")
    return f"{choice.kind} ({options})" if options else choice.kind


APART = Choice("concat", JoinConfig())
"""The join inside the layers of a model whose paths meet in the head alone."""

averages = Registry("average")


@averages.register("average")
class Average:
    """Every model has the same share."""

    how = "averaged"
    learned = False
    Config = NoOptions


@averages.register("mixture")
class Mixture:
    """The shares are learned; they begin equal."""

    how = "averaged, until their shares are trained"
    learned = True

    @dataclass
    class Config:
        per_token: bool = False
        """Whether a router that reads the stream changes the shares from token to token."""
        shares: list[Positive] | None = None
        """Of decoders of transformers, whose shares are not learned: one for each, in their order."""


@averages.register("posterior")
class Posterior:
    """A model's share is its probability given the text so far, by Bayes' rule: nothing is learned."""

    how = "averaged, each weighed by how well it has predicted the text so far"
    learned = False

    @dataclass
    class Config:
        window: Annotated[int, Range(at_least=2)] | None = None
        """How many tokens back the models are judged by; by default the whole text."""
        settle: Annotated[int, Range(at_least=2)] | None = None
        """After how many tokens of a text the model with the largest share goes on alone; by default all do. Long texts
        that are read at once then cost little more than one model; members that are decoders all run still."""


MODULES = "modules"
"""The join of models that have one base: the modules that were inserted into each, side by side."""


class InsertedModules:
    """Nothing to choose: the modules are the models' own."""

    Config = NoOptions


class ComposingJoins(Registry):
    """What `compose` takes for a join: the joins of parallel layers, averages, and modules side by side."""

    def __contains__(self, name: object) -> bool:
        return name in averages or name in joins or name == MODULES

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise BraidError(f"unknown join '{name}'.{did_you_mean(name, list(self))}", todo=ADVICE)
        return InsertedModules if name == MODULES else averages[name] if name in averages else joins[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted([*averages, *joins, MODULES]))


composing_joins = ComposingJoins("join")


def averaged_ends(paths: Sequence[PathModel], join: Choice) -> dict[str, Any]:
    """The norm before the head and the head, of a model whose paths are averaged."""
    options = encode(join.options)
    if options.pop("shares", None) is not None:
        what = "the shares of these models begin equal and are learned; only those of transformers' decoders are given"
        raise BraidError(what, "join.shares", "Leave it out, and train the mixture.")
    linear = {path.name: path.architecture.head for path in paths}
    if other := {name: f"'{head.kind}'" for name, head in linear.items() if head.kind != "linear"}:
        raise BraidError(f"only models with linear heads can be averaged, and {_each_has(other)}")
    having = [name for name, head in linear.items() if head.options.bias]
    if 0 < len(having) < len(paths):
        raise BraidError(f"the heads of some models have a bias ({', '.join(having)}), and others have none")
    parts = [{"name": path.name, "width": path.width} for path in paths]
    norms = [part | {"norm": encode(path.architecture.norm)} for part, path in zip(parts, paths, strict=True)]
    head = {"kind": join.kind, "paths": parts, "bias": bool(having), **options}
    return {"norm": {"kind": "per_path", "paths": norms}, "head": head}


def after_averaging(how: str, folder: Path, training: str = "") -> str:
    """What to do next with models whose probabilities are averaged in this way."""
    return (
        f"Its probabilities are the models', {how}{training}. `braid eval` measures it beside them, and "
        f"`training.distill={{teachers: [{folder}]}}` makes a model of one's size of it."
    )


def check_no_layout(**options: object) -> None:
    """Refuse options of a layout that averages and modules side by side do not have."""
    if given := [name for name, value in options.items() if value is not None]:
        what = f"with this join models stay as they are: {', '.join(given)} cannot be chosen"
        raise BraidError(what, todo="Leave it out, or choose another join, such as shared_linear.")


@torch.no_grad()
def check_averaged(paths: Sequence[PathModel], composed: "BraidForCausalLM") -> None:
    """Compare the composed model's probabilities with those of the models run apart, one after another."""
    ids = probe_ids(composed.config)
    sources = [path.source for path in paths if path.source is not None]
    each = torch.stack([source.load(dtype=torch.float32)(ids).logits.log_softmax(-1) for source in sources])
    is_judged = isinstance(composed.head, PosteriorHead)
    options = (composed.head.window, composed.head.settle) if is_judged else ()
    shares = posterior_shares(each, ids, *options) if is_judged else torch.zeros(len(paths), 1, 1)
    wanted = (each + shares.log_softmax(0)[..., None]).logsumexp(0)
    what = "average of the models', weighed by the text so far," if is_judged else "average of the models'"
    promise = f"the probabilities should be the {what} to {UNCHANGED:g}, and one differs by"
    check_promise(promise, wanted, composed(ids).logits)


def posterior_shares(each: Tensor, ids: Tensor, window: int | None = None, settle: int | None = None) -> Tensor:
    """[model, batch, time]: the logarithms of the models' shares after each token, token by token: a reference. `each`
    are the models' log-probabilities [model, batch, time, vocabulary]."""
    models, batch, time, _ = each.shape
    said = each[:, :, :-1].gather(-1, ids[None, :, 1:, None].expand(models, -1, -1, 1))[..., 0]
    shares = each.new_zeros(models, batch, time)
    for at in range(1, time):  # `said` begins with the second token
        first = 0 if window is None else max(0, at - window)
        shares[:, :, at] = said[:, :, first:at].sum(-1)
        if settle is not None and at >= settle - 1:
            best = shares[:, :, settle - 1].argmax(0, keepdim=True)
            shares[:, :, at] = torch.full_like(shares[:, :, at], -torch.inf).scatter(0, best, 0.0)
    return shares.log_softmax(0)
