"""The modules of a model: which blocks have experts, the tensors that hold one row for each, and blocks one by one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from braidlm.bridges.model_info import ModelInfo
from braidlm.core.errors import BraidError
from braidlm.edits.account import Account, Derived, Part
from braidlm.model.config.strict import encode
from braidlm.model.stages import BlockStage
from braidlm.opening.braid import OpenedBraid

PARTS = ("attention", "feed")
ROUTER_ROWS = ("router.scores.weight", "router.scores.bias", "router.balance")
BANKS = ("bank.", "queries.", "out.")
"""The tensors of a routed part with one row for each module, by their beginnings."""
OPENING = "router.opening"
"""The tensor of a routed part with one number for each module that was inserted."""


@dataclass(frozen=True)
class Modules:
    """The modules that one router chooses among."""

    block: str
    """The address of their block, `model.stages.0.layers.3`."""
    part: str
    """`attention` or `feed`."""
    names: tuple[str, ...]
    top_k: int
    renormalise: bool
    balance_rate: float
    silent: int
    """Rows of the router's scores after those of the modules."""
    new: tuple[str, ...]
    """Those that were inserted, the last ones."""

    @property
    def address(self) -> str:
        return f"{self.block}.{self.part}"

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
        return (*kept, *range(count, count + self.silent), *silenced)

    @property
    def opening(self) -> str:
        """The name of the tensor that says how far the inserted modules are open."""
        return f"{self.address}.{OPENING}"

    def openings(self, source: OpenedBraid) -> dict[str, float]:
        """How far each inserted module is open: 0 if it is never chosen yet, 1 if it is chosen as any other."""
        return dict(zip(self.new, source.read(self.opening).tolist(), strict=True)) if self.new else {}

    @property
    def scores_stay(self) -> bool:
        """Whether the scores of a module that goes still count: weights are shares of a softmax over all, unless they
        are normalised after the choice, and a router that balances adds its balance to such shares."""
        return not self.renormalise or self.balance_rate > 0

    def size(self, info: ModelInfo) -> int:
        """The parameters that go with one module."""
        scores = f"{self.address}.router.scores."
        rows = [
            tensor
            for name, tensor in info.tensors.items()
            if self.has_rows(name) and not (self.scores_stay and name.startswith(scores))
        ]
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
        raise BraidError(
            "matrices of this model are compressed, and this edit changes layers one by one",
            todo="Edit the model before its matrices are compressed: factorize and quantize come last.",
        )


def layers_of(info: ModelInfo) -> list[Layer]:
    """The blocks one by one, and the other stages whole."""
    check_uncompressed(info)
    layers = []
    for number, (choice, stage) in enumerate(zip(info.architecture.stages, info.model.model.stages, strict=True)):
        options = encode(choice.options)
        if options.get("share") is not None:
            raise BraidError(
                "the layers of this stage share weights, and this edit changes layers one by one",
                f"stages.{number}",
                "Edit the model before its layers share: `braid edit share` comes last.",
            )
        if not isinstance(stage, BlockStage):
            layers.append(Layer(choice.kind, options, f"model.stages.{number}"))
            continue
        options = {name: value for name, value in options.items() if name != "layers"}
        for position in range(len(stage.layers)):
            layers.append(Layer("block", encode(options), f"model.stages.{number}.layers.{position}"))
    return layers


def modules_of(layer: Layer) -> list[Modules]:
    """The modules of a block, attention's first."""
    found = []
    for part in PARTS if layer.kind == "block" else ():
        experts = layer.options[part].get("experts")
        if experts is not None:
            router = experts["router"]
            options = {name: router[name] for name in ("top_k", "renormalise", "balance_rate", "silent")}
            names, new = tuple(experts["names"]), tuple(router["new"])
            found.append(Modules(layer.address, part, names, **options, new=new))
    return found


def stages_of(layers: Sequence[Layer]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Stages of equal neighbours, and the new address of each layer by its old one."""
    stages: list[dict[str, Any]] = []
    addresses: dict[str, str] = {}
    for _, group in groupby(layers, key=lambda layer: (layer.kind, str(layer.options))):
        alike = list(group)
        if alike[0].kind == "block":
            addresses |= {layer.address: f"model.stages.{len(stages)}.layers.{i}" for i, layer in enumerate(alike)}
            stages.append({"block": {"layers": len(alike), **alike[0].options}})
            continue
        for layer in alike:
            addresses[layer.address] = f"model.stages.{len(stages)}"
            stages.append({layer.kind: layer.options})
    return stages, addresses


def moved(tensors: Sequence[str], source: str, addresses: dict[str, str]) -> Account:
    """An account in which every tensor is copied, from the place it had."""
    account = Account()
    for tensor in tensors:
        before = next((old for old, new in addresses.items() if tensor.startswith(f"{new}.")), None)
        old_name = tensor if before is None else before + tensor.removeprefix(addresses[before])
        account.origins[tensor] = Derived((Part(source, old_name),))
    return account
