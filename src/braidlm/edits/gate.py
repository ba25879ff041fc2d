"""`braid edit gate`: zero-initialised gates around the layers of a trained model, to be trained (Self-MoE).

A Braid model becomes a Braid model with gates. A decoder of transformers stays what it is: the result is an adapter,
which holds the gates alone and names its base, or with `full` a folder of base and gates.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from braidlm.core import console
from braidlm.core.devices import check_weights_fit, weights_bytes
from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.logits import check_promise, probe_ids
from braidlm.core.models.runs import length_record
from braidlm.core.reading import given_path
from braidlm.edits.account import SOURCE, Account, Fresh, moved, targets
from braidlm.edits.edit import Edit, EditPlan, edits, show_plan
from braidlm.model.config.ranges import Layers, Size
from braidlm.model.config.strict import decode, encode
from braidlm.model.gates import GatesConfig, gate_kinds
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.gated_folders import weights_sha256, write_adapter_files, write_whole_files
from braidlm.opening.gating import attach, gates_of
from braidlm.opening.opened_model import OpenedModel


@edits.register("gate")
@dataclass(frozen=True)
class AddGates(Edit):
    """Which gates are added."""

    about: ClassVar[str] = "add gates around layers, which change nothing until they are trained (Self-MoE)"
    backend = "own"

    kind: str = "vector"
    """What a gate computes: a factor for each channel (vector), one for all (scalar), or a matrix (matrix)."""
    layers: list[Layers] | None = None
    """The layers that get a gate, counted from 1; by default all but the first."""
    rank: Size | None = None
    """Rank of a matrix, which is then the product of two narrow ones; by default it is a full one."""
    bias: bool = False
    """Whether a matrix also adds a vector."""
    full: bool = False
    """Whether the result for a decoder of transformers is a whole model, and not an adapter that names its base."""

    def __post_init__(self) -> None:
        known = {field.name for field in fields(gate_kinds[self.kind].Config)}
        for option in (name for name in ("rank", "bias") if getattr(self, name) and name not in known):
            raise BraidError(f"gates of kind '{self.kind}' have no {option}", todo=f"`--kind matrix --{option}`")

    @property
    def gates(self) -> GatesConfig:
        """The configuration that the options describe."""
        given = {name: getattr(self, name) for name in ("rank", "bias") if getattr(self, name)}
        return decode(GatesConfig, {"kind": {"kind": self.kind, **given}, "layers": self.layers})

    def plan(self, source: OpenedBraid) -> EditPlan:
        """Gates for a Braid model."""
        if source.config.decoded.gates is not None:
            raise _gated_already(source.title)
        model = skeleton(source.config_with(gates=encode(self.gates)))
        account, title = _account(model, targets(model)), self._title(source.title, model)
        return EditPlan(title, model, account, source.notes, unchanged_on=probe_ids(model.config))

    def apply(self, model: OpenedModel, out: str | Path | None, record: dict[str, Any], dry_run: bool) -> Path | None:
        if not isinstance(model, OpenedDecoder):
            return super().apply(model, out, record, dry_run)
        if model.has_gates:
            raise _gated_already(model.title)
        dtype = getattr(model.config, "dtype", None) or torch.float32
        planned = model.skeleton(dtype)
        attach(planned, self.gates)
        account, title = _account(planned, planned.state_dict()), self._title(model.title, planned)
        what = "a folder of base and gates" if self.full else "an adapter with the gates alone"
        if show_plan([title], account, [f"the result is {what}"], dry_run):
            return None
        gated = self._gated(model, planned, dtype)
        base = None if self.full else (model.address, weights_sha256(model.folder))
        return write_gated(gated, model, out, record, account.record(), base)

    def _gated(self, opened: OpenedDecoder, planned: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
        """The decoder in memory with gates, after its logits have been compared with those without. Where there is no
        memory for its weights, an adapter is made of the planned decoder, whose gates alone are real."""
        try:
            check_weights_fit(weights_bytes(planned))
        except BraidError as error:
            if self.full:
                raise
            console.say(f"  logits are not compared: {error.what}")
            for gate in gates_of(planned).values():
                gate.to_empty(device="cpu")
                for parameter in gate.parameters():
                    gate.fill(gate, parameter)
            return planned
        model = opened.load(dtype=dtype)
        ids = probe_ids(model.config.get_text_config())
        with torch.no_grad():
            before = model(ids).logits
            attach(model, self.gates)
            promise = "this edit promises to change no logit, and one changed by"
            check_promise(promise, before, model(ids).logits, largest=0)
        return model

    def _title(self, name: str, model: Any) -> str:
        gates = gates_of(model)
        added = sum(parameter.numel() for gate in gates.values() for parameter in gate.parameters())
        parameters = sum(parameter.numel() for parameter in model.parameters())
        options = [f"rank {self.rank}"] * (self.rank is not None) + ["a bias"] * self.bias
        kind = f"{self.kind} ({', '.join(options)})" if options else self.kind
        more = f"{added:,} parameters beside its {parameters - added:,}; no logit changes"
        return f"Gate {name}: a gate of kind {kind} around layers {layer_ranges(list(gates))}, {more}"


def _account(model: Any, tensors: Iterable[str]) -> Account:
    """Every tensor is the source's own, but for those of gates."""
    gates, account = set(gates_of(model).values()), moved(tensors)
    own = tuple(f"{name}." for name, module in model.named_modules() if module in gates)
    for name in account.origins:
        if name.startswith(own):
            account.origins[name] = Fresh("gates at zero", name.rpartition(".")[0])
    return account


def write_gated(
    model: PreTrainedModel,
    opened: OpenedDecoder,
    out: str | Path | None,
    record: dict[str, Any],
    account: dict[str, Any],
    base: tuple[str, str | None] | None,
    beside: Iterable[Path] = (),
) -> Path:
    """Write a decoder with gates in one atomic step. For a `base`, which is named with the SHA-256 of its weights, the
    gates are written alone, with files `beside` them."""
    assert out is not None
    folder = given_path(out)
    origin = {"name": SOURCE, **opened.record(), **length_record(opened.lineage)}
    lineage = {**record, "sources": [origin], **account}
    with atomic_folder(folder) as scratch:
        if base is None:
            write_whole_files(model, scratch, lineage, folder.name, beside=opened.tokenizer_files())
        else:
            for path in beside:
                shutil.copyfile(path, scratch / path.name)
            write_adapter_files(model, scratch, *base, lineage, folder.name)
    return folder


def _gated_already(name: str) -> BraidError:
    todo = (
        "Train those that it has, or add gates to its base. `braid convert GATES --to transformers --out DIR` makes one"
    )
    return BraidError("this model has gates already", name, f"{todo} whole folder of a decoder and its gates.")


def layer_ranges(numbers: list[int]) -> str:
    """`2 to 7, 9`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
