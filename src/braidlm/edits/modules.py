"""The modules of a model: which blocks have experts, the tensors with a row for each, and how much a text uses each."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from braidlm.bridges.model_info import ModelInfo
from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.edits.criteria import Criterion
from braidlm.inspection.texts import DataSource, windows_of
from braidlm.model.attention.experts import span_for_scope
from braidlm.model.config.strict import encode
from braidlm.model.routing.router import TopKRouter
from braidlm.model.stages import BlockStage
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.opened_model import OpenedModel

if TYPE_CHECKING:
    from braidlm.model.modeling_braid import BraidForCausalLM

PARTS = ("attention", "feed")
ROUTER_ROWS = ("router.scores.weight", "router.scores.bias", "router.balance")
BANKS = ("bank.", "queries.", "out.")
"""The tensors of a routed part with one row for each module, by their beginnings."""
OPENING = "router.opening"
"""The tensor of a routed part with one number for each module that was inserted."""


class Modules:
    """The modules that one router chooses among."""

    def __init__(self, block: str, part: str, experts: dict[str, Any]):
        """`block` is the address of their block, `model.stages.0.layers.3`, and `part` is `attention` or `feed`."""
        self.block, self.part, self.address = block, part, f"{block}.{part}"
        self.names, self.router = tuple(experts["names"]), dict(experts["router"])
        self.new: tuple[str, ...] = tuple(self.router["new"])
        """The names of modules that were inserted, the last ones."""
        self.opening = f"{self.address}.{OPENING}"
        """The name of the tensor that says how far the inserted modules are open."""

    def has_rows(self, tensor: str) -> bool:
        """Whether a tensor has a row for each of these modules."""
        own = tensor.removeprefix(f"{self.address}.")
        return own != tensor and (own in (*ROUTER_ROWS, OPENING) or own.startswith(BANKS))

    def rows_of(self, tensor: str, kept: Sequence[int], silenced: Sequence[int]) -> tuple[int, ...]:
        """The rows of a tensor that stay: those of the modules that are kept, and scores of others that still count."""
        count, old = len(self.names), len(self.names) - len(self.new)
        if tensor == self.opening:
            return tuple(i - old for i in kept if i >= old)
        if ".router.scores." not in tensor:
            return tuple(kept)
        return (*kept, *range(count, count + self.router["silent"]), *silenced)

    def openings(self, source: OpenedBraid) -> dict[str, float]:
        """How far each inserted module is open: 0 if it is never chosen yet, 1 if it is chosen as any other."""
        return dict(zip(self.new, source.read(self.opening).tolist(), strict=True)) if self.new else {}

    @property
    def scores_stay(self) -> bool:
        """Whether the scores of a module that goes still count: weights are shares of a softmax over all, unless they
        are normalised after the choice, and a router that balances adds its balance to such shares."""
        return not self.router["renormalise"] or self.router["balance_rate"] > 0

    def size(self, info: ModelInfo) -> int:
        """The parameters that go with one module."""
        staying = f"{self.address}.router.scores." if self.scores_stay else " "
        rows = (t for name, t in info.tensors.items() if self.has_rows(name) and not name.startswith(staying))
        return sum(tensor.numel() for tensor in rows) // len(self.names)


@dataclass
class Layer:
    """One block, or a stage of another kind, with its options as a recipe writes them."""

    kind: str
    options: dict[str, Any]
    address: str
    """In the model that is edited."""


def check_uncompressed(info: ModelInfo) -> None:
    """Refuse a model that names matrices by their addresses, which an edit of its layers may change."""
    if info.architecture.compression:
        todo = "Edit the model before its matrices are compressed: factorize and quantize come last."
        raise BraidError("matrices of this model are compressed, and this edit changes layers one by one", todo=todo)


def layers_of(info: ModelInfo) -> list[Layer]:
    """The blocks one by one, and the other stages whole."""
    check_uncompressed(info)
    layers = []
    for number, (choice, stage) in enumerate(zip(info.architecture.stages, info.model.model.stages, strict=True)):
        options = encode(choice.options)
        if options.get("share") is not None:
            what = "the layers of this stage share weights, and this edit changes layers one by one"
            todo = "Edit the model before its layers share: `braid edit share` comes last."
            raise BraidError(what, f"stages.{number}", todo)
        if not isinstance(stage, BlockStage):
            layers.append(Layer(choice.kind, options, f"model.stages.{number}"))
            continue
        del options["layers"]
        addresses = [f"model.stages.{number}.layers.{position}" for position in range(len(stage.layers))]
        layers += [Layer("block", encode(options), address) for address in addresses]
    return layers


def modules_of(layer: Layer) -> list[Modules]:
    """The modules of a block, attention's first."""
    banks = {part: layer.options[part].get("experts") for part in PARTS} if layer.kind == "block" else {}
    return [Modules(layer.address, part, experts) for part, experts in banks.items() if experts is not None]


def with_inserted(router: dict[str, Any], new: Sequence[str]) -> dict[str, Any]:
    """The options of a router that has these inserted modules: without any it chooses as many as before the first."""
    if not new and router["base_top_k"] is not None:
        router = router | {"top_k": router["base_top_k"], "base_top_k": None}
    return router | {"new": list(new)}


def check_open(modules: Sequence[Modules], source: OpenedBraid) -> None:
    """Refuse modules that were inserted before and are not wholly in use yet."""
    for one in modules:
        if closed := [name for name, opening in one.openings(source).items() if opening < 1]:
            what = f"modules that were inserted before are not open yet: {', '.join(closed)}"
            todo = "Train the model first: `training.opening` is the share of a training that opens them."
            raise BraidError(what, one.address, todo)


def still_frozen(source: OpenedBraid, inserted_left: bool) -> list[str]:
    """What training leaves of an edited model; with no inserted module left, no longer what was frozen for them."""
    opened = () if inserted_left else ("blocks", "modules", "routers")
    was_grown = any(one.new for layer in layers_of(source.info) for one in modules_of(layer))
    return [part for part in source.config.frozen if not was_grown or part not in opened]


def stages_of(layers: Sequence[Layer]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Stages of equal neighbours, and the new address of each layer by its old one."""
    stages: list[dict[str, Any]] = []
    addresses: dict[str, str] = {}
    for (kind, _), group in groupby(layers, key=lambda layer: (layer.kind, str(layer.options))):
        alike = list(group)
        if kind == "block":
            addresses |= {layer.address: f"model.stages.{len(stages)}.layers.{i}" for i, layer in enumerate(alike)}
            stages.append({"block": {"layers": len(alike), **alike[0].options}})
            continue
        for layer in alike:
            addresses[layer.address] = f"model.stages.{len(stages)}"
            stages.append({kind: layer.options})
    return stages, addresses


Usage = dict[str, Tensor]
"""By a routed part's address, a number for each of its modules."""


def calibrate(source: OpenedBraid, text: str, tokens: int, criterion: Criterion) -> tuple[list[Sequence[int]], Usage]:
    """The first `tokens` of a text, by documents, and how much a model's modules are used on them."""
    modules, texts = all_modules(source), calibration_texts(source, text, tokens)
    return texts, measure_usage(source.load(dtype=torch.float32), modules, texts, criterion)


def all_modules(source: OpenedBraid) -> list[Modules]:
    """The modules of all blocks, or an error if there are none."""
    modules = [one for layer in layers_of(source.info) for one in modules_of(layer)]
    if not modules:
        in_paths = any(isinstance(module, TopKRouter) for module in source.info.model.modules())
        todo = "Experts of paths and projections cannot be pruned; `--without` switches them off."
        if not in_paths:
            todo = "`--heads N`, `--channels N` and `--layers N` say how many of a dense model stay."
        raise BraidError("this model has no experts in its blocks that could be pruned", source.title, todo)
    return modules


def calibration_texts(source: OpenedModel, text: str, tokens: int) -> list[Sequence[int]]:
    """The documents of a calibration text, as the model's tokens."""
    data = DataSource("text", text, tokens, called=text)
    return [document.ids for document in data.texts(source.tokenizer)]


def measure_usage(
    model: "BraidForCausalLM",
    modules: Sequence[Modules],
    texts: Sequence[Sequence[int]],
    criterion: Criterion,
    batch: int = 8,
) -> Usage:
    """The sum over all tokens of how often a module was chosen, or of its weight times the norm of its output."""

    def used(part: Any, inputs: tuple[Any, ...], output: Any) -> Tensor:
        routing = output[1][0]
        if criterion == "frequency":
            return torch.zeros_like(routing.probabilities_BTN).scatter(-1, routing.chosen_BTK, 1.0)
        if hasattr(part, "scope"):
            inputs = (inputs[0], span_for_scope(routing, inputs[1], part.scope))
        norms_BTN: Tensor = part.expert_outputs(*inputs).float().norm(dim=-1).permute(1, 2, 0)
        return routing.weights_BTN * norms_BTN

    return sums_over_tokens(model, {one.address: used for one in modules}, texts, "use of modules", batch)


Measure = Callable[[Any, tuple[Any, ...], Any], Tensor]
"""Of a part, its inputs and its output: a number for each token and each of its units, [batch, time, unit]."""


@torch.no_grad()
def sums_over_tokens(
    model: "BraidForCausalLM",
    measures: Mapping[str, Measure],
    texts: Sequence[Sequence[int]],
    what: str,
    batch: int = 8,
) -> Usage:
    """By the address of a part, what is measured of it, summed over all tokens of these texts."""
    sums: Usage = {}
    real: Tensor  # the mask of real tokens

    def add(address: str, part: Any, inputs: tuple[Any, ...], output: Any) -> None:
        own = (measures[address](part, inputs, output) * real[..., None]).sum((0, 1)).double().cpu()
        sums[address] = sums[address] + own if address in sums else own

    total, done = sum(map(len, texts)), 0
    with ExitStack() as hooks, console.progress(what, total, "tokens") as advance:
        for address in measures:
            hooks.callback(model.get_submodule(address).register_forward_hook(partial(add, address)).remove)
        for windows in windows_of(texts, model.config.max_position_embeddings, batch):
            ids, real = windows.padded(model.device)
            model.model(ids, attention_mask=real, use_cache=False)
            done += windows.tokens
            advance(done, "")
    return sums
