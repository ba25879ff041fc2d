"""`braid edit gate`: zero-initialised gates around the layers of a trained model, to be trained (Self-MoE).

A Braid model becomes a Braid model with gates. A decoder of transformers stays what it is: the result is an adapter,
which holds the gates alone and names its base, or with `full` a folder of base and gates.
"""

import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, sha256_of, write_text
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.card import USE, exported_card
from braidlm.core.models.folders import write_lineage
from braidlm.core.models.memory import check_weights_fit, weights_bytes
from braidlm.core.reading import given_path
from braidlm.edits.account import Account, Fresh, account_table, targets
from braidlm.edits.edit import PROBE, SOURCE, Edit, EditPlan, check_promise, edits, probe_ids
from braidlm.edits.modules import moved
from braidlm.model.config.ranges import Layers, Size
from braidlm.model.config.strict import decode, encode
from braidlm.model.gates import GatesConfig, gate_kinds
from braidlm.opening.adapter import gate_tensors, weights_sha256, write_adapter_files
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.full_folder import write_decoder
from braidlm.opening.gating import attach, gates_of
from braidlm.opening.opened_model import OpenedModel

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template*")
"""What a folder of base and gates has from the base beside its weights."""


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
        kind = {"kind": self.kind, **given}
        config: GatesConfig = decode(GatesConfig, {"kind": kind, "layers": self.layers})
        return config

    def apply(self, model: OpenedModel, out: str | Path | None, record: dict[str, Any], dry_run: bool) -> Path | None:
        if isinstance(model, OpenedDecoder):
            return self._apply_to_decoder(model, out, record, dry_run)
        return super().apply(model, out, record, dry_run)

    def plan(self, source: OpenedBraid) -> EditPlan:
        """Gates for a Braid model."""
        if source.config.decoded.gates is not None:
            raise _gated_already(source.title)
        config = source.config_with(gates=encode(self.gates))
        model = skeleton(config)
        account = _account(model, list(targets(model)))
        title = self._title(source.title, model)
        return EditPlan(title, model, account, source.notes, unchanged_on=probe_ids(config))

    def _apply_to_decoder(
        self, opened: OpenedDecoder, out: str | Path | None, record: dict[str, Any], dry_run: bool
    ) -> Path | None:
        if opened.has_gates:
            raise _gated_already(opened.title)
        dtype = getattr(opened.config, "dtype", None) or torch.float32
        planned = opened.skeleton(dtype)
        attach(planned, self.gates)
        account = _account(planned, list(planned.state_dict()))
        what = "a folder of base and gates" if self.full else "an adapter with the gates alone"
        lines = [self._title(opened.title, planned), *account_table(account, ()), f"  note: the result is {what}"]
        for line in lines:
            (console.show if dry_run else console.say)(line)
        if dry_run:
            return None
        assert out is not None
        model = self._gated(opened, planned, dtype)
        lineage = {**record, "sources": [{"name": SOURCE, **opened.record()}], **account.record()}
        folder = given_path(out)
        with atomic_folder(folder) as scratch:
            if self.full:
                write_full(model, opened, scratch, lineage, folder.name)
            else:
                sha256 = weights_sha256(opened.folder)
                write_adapter_files(model, scratch, opened.address, sha256, lineage, folder.name)
        return folder

    def _gated(self, opened: OpenedDecoder, planned: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
        """The decoder in memory with gates, after its logits have been compared with those without."""
        try:
            check_weights_fit(weights_bytes(planned))
        except BraidError as error:
            if self.full:
                raise
            console.say(f"  logits are not compared: {error.what}")
            return _with_zeros(planned)
        model = opened.load(dtype=dtype)
        config = model.config.get_text_config()
        ids = torch.randint(config.vocab_size, PROBE, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            before = model(ids).logits
            attach(model, self.gates)
            change = (model(ids).logits - before).abs().max().item()
        check_promise(change, "this edit promises to change no logit, and one changed by", largest=0)
        return model

    def _title(self, name: str, model: Any) -> str:
        gates = gates_of(model)
        added = sum(parameter.numel() for gate in gates.values() for parameter in gate.parameters())
        parameters = sum(parameter.numel() for parameter in model.parameters())
        options = [f"rank {self.rank}"] * (self.rank is not None) + ["a bias"] * self.bias
        kind = f"{self.kind} ({', '.join(options)})" if options else self.kind
        return (
            f"Gate {name}: a gate of kind {kind} around layers {layer_ranges(list(gates))}, {added:,} parameters "
            f"beside its {parameters - added:,}; no logit changes"
        )


def _account(model: Any, tensors: list[str]) -> Account:
    """Every tensor is the source's own, but for those of gates."""
    gates = set(gates_of(model).values())
    own = tuple(f"{name}." for name, module in model.named_modules() if module in gates)
    account = moved([name for name in tensors if not name.startswith(own)], SOURCE, {})
    for name in tensors:
        if name.startswith(own):
            account.origins[name] = Fresh("gates at zero", name.rpartition(".")[0])
    return account


def _with_zeros(planned: PreTrainedModel) -> PreTrainedModel:
    """A decoder without memory for its weights, but with gates."""
    for gate in gates_of(planned).values():
        gate.to_empty(device="cpu")
        for parameter in gate.parameters():
            gate.fill(gate, parameter)
    assert not any(tensor.is_meta for tensor in gate_tensors(planned).values())
    return planned


def write_full(model: PreTrainedModel, opened: OpenedDecoder, folder: Path, lineage: dict[str, Any], name: str) -> None:
    """A folder of base and gates, with the tokenizer of the folder that it was made of."""
    write_decoder(model, folder)
    for path in (path for pattern in TOKENIZER_FILES for path in opened.folder.glob(pattern)):
        shutil.copyfile(path, folder / path.name)
    hashes = {path.name: sha256_of(path) for path in sorted(folder.glob("*.safetensors"))}
    written = write_lineage(folder, None, lineage, {"files": hashes})
    write_text(folder / "README.md", f"{exported_card(name, written)}\n## Use\n{USE}\n")


def _gated_already(name: str) -> BraidError:
    return BraidError("this model has gates already", name, "Train those that it has, or add gates to its base.")


def layer_ranges(numbers: list[int]) -> str:
    """`2 to 7, 9`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
