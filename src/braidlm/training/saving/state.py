"""Everything besides the weights that the next step depends on, as tensors in safetensors files.

optimizer.safetensors   the optimizer's averages and step counts
random-RANK.safetensors random states of one process
FILE                    the tensors of features that name such a file: losses, average, memory-RANK
shards/                 where weights lie on several processes, all of these but what has RANK in its name (shards.py)

Earlier versions wrote states with torch.distributed.checkpoint. They are read without running what is in them: the list
of tensors, `.metadata`, is a pickle, whose code torch's own reader would run, whoever put it there. Here every class
in it is replaced by a record that only keeps its fields, and only the classes of the list itself are admitted. The
tensors are read by `torch.load(weights_only=True)`, which admits tensors alone.
"""

import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from braidlm.core.differences import compare_shapes, listed
from braidlm.core.errors import BraidError
from braidlm.training.features.extra_losses import ExtraLoss
from braidlm.training.features.feature import Feature
from braidlm.training.saving.shards import Shards
from braidlm.training.step.optimizers.contract import Optimizer, state_keys
from braidlm.training.step.parallel import Rank
from braidlm.training.step.spread import lying_as, whole_view
from braidlm.training.trainable import Trainable

OPTIMIZER = "optimizer.safetensors"
RANDOM = "random-{rank}.safetensors"
STEP = "step"
RANK = "{rank}"
SHARDS = "shards"
EARLIER_FORMAT = "tensors"  # the folder of a state that an earlier version wrote
METADATA = ".metadata"
MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
VALUES = {("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}


@dataclass(frozen=True)
class StepState:
    """What a step changes, beside random states."""

    trained: Trainable
    optimizer: Optimizer
    features: Sequence[Feature] = ()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer may train; an extra loss has names that no model's tensor has."""
        yield from self.trained.model.named_parameters()
        for loss in self.features:
            if isinstance(loss, ExtraLoss):
                yield from loss.named_parameters(f"losses.{loss.kind}")

    def optimized(self) -> Iterator[tuple[str, nn.Parameter, dict[Any, Any], tuple[str, ...]]]:
        """Each parameter that is trained by name, with its optimizer's states by parameter, and their keys."""
        owners = {p: part for part in self.optimizer.parts for group in part.param_groups for p in group["params"]}
        for name, parameter in self.named_parameters():
            if part := owners.get(parameter):
                yield name, parameter, part.state, state_keys(part)


def write_state(folder: Path, state: StepState, rank: Rank, spread: bool) -> dict[str, Tensor]:
    """Write this process's share of the state, without the model's weights. Where weights are `spread` over processes,
    gives the tensors that all of them write together."""
    on_gpu = rank.device.type == "cuda"
    random = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state(rank.device)} if on_gpu else {})
    files, together = {_own_file(RANDOM, rank): random}, dict[str, Tensor]()
    if spread or rank.is_main:
        files[OPTIMIZER] = {
            f"{name}.{key}": whole_view(states[parameter][key].detach(), parameter)
            for name, parameter, states, keys in state.optimized()
            if states.get(parameter)  # none before its first gradient
            for key in keys
        }
    for one in state.features:
        if spread or rank.is_main or RANK in one.file:
            files.setdefault(_own_file(one.file, rank), {}).update(one.state())
    own = {_own_file(name, rank) for name in (RANDOM, *(one.file for one in state.features)) if RANK in name}
    for name, tensors in files.items():
        if spread and name not in own:
            together |= tensors
        elif tensors or name == OPTIMIZER:
            save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, folder / name)
    return together


def read_state(folder: Path, state: StepState, rank: Rank, spread: bool) -> None:
    """Restore what `write_state`, or an earlier version of Braid, wrote; nothing in the files is run."""
    is_earlier = (folder / EARLIER_FORMAT).is_dir()
    shards = Shards(folder / SHARDS) if (folder / SHARDS).is_dir() else None
    if shards is None and spread and not is_earlier:
        shards = Shards(folder)  # the files of one process, in parts
    if shards is None:
        _put_optimizer_tensors(_load(folder, OPTIMIZER, "optimizer."), state)
    else:
        _fill_optimizer_tensors(shards, state)
    if is_earlier or (folder / _own_file(RANDOM, rank)).is_file():  # where fewer processes saved, its own states go on
        random = _load(folder, _own_file(RANDOM, rank), f"random.{rank.index}.")
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and rank.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], rank.device)
    for one in state.features:
        if one.state():
            own = shards is None or RANK in one.file
            one.load_state(load_file(folder / _own_file(one.file, rank)) if own else shards)  # type: ignore[arg-type]


def _own_file(name: str, rank: Rank) -> str:
    return name.replace(RANK, str(rank.index))


@contextmanager
def explained_state_errors(folder: Path) -> Iterator[None]:
    """Refuse a state with correct hashes and wrong content: somebody changed it, or it is of another run."""
    try:
        yield
    except (SafetensorError, LookupError, OSError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        problem = f"there is no {error}" if isinstance(error, KeyError) else getattr(error, "what", str(error))
        todo = "Remove this folder to go on from the checkpoint before it, or start anew with --fresh."
        todo = getattr(error, "todo", None) or todo  # a BraidError may know better what to do
        raise BraidError(f"this saved state cannot be used: {problem}", str(folder), todo) from error


def _load(folder: Path, name: str, prefix: str) -> dict[str, Tensor]:
    """The tensors of a file, which an earlier version kept together with all others, under names with a prefix."""
    if not (folder / EARLIER_FORMAT).is_dir():
        return load_file(folder / name)
    named = read_distcp(folder / EARLIER_FORMAT, (prefix,))
    return {key.removeprefix(prefix): tensor for key, tensor in named.items()}


def _fill_optimizer_tensors(shards: Shards, state: StepState) -> None:
    """Make the optimizer's tensors, and read into them what this process holds of each."""
    parts: dict[str, Tensor] = {}
    for name, parameter, states, keys in state.optimized():
        if f"{name}.{keys[0]}" in shards:
            made = {key: torch.zeros(()) if key == STEP else torch.zeros_like(parameter) for key in keys}
            states[parameter] = made
            parts |= {f"{name}.{key}": whole_view(tensor, parameter) for key, tensor in made.items()}
    shards.fill(parts)
    for _, parameter, states, _ in state.optimized():
        if STEP in (found := states.get(parameter, {})):
            found[STEP] = found[STEP].to(parameter.device)


def _put_optimizer_tensors(tensors: dict[str, Tensor], state: StepState) -> None:
    for name, parameter, states, keys in state.optimized():
        if f"{name}.{keys[0]}" not in tensors:
            continue
        found = {key: tensors[f"{name}.{key}"] for key in keys}
        expected = {key: () if key == STEP else tuple(parameter.shape) for key in keys}
        if problems := compare_shapes(expected, {key: tuple(tensor.shape) for key, tensor in found.items()}):
            raise ValueError(f"it is of another model ({name}: {listed(problems)})")
        for key, tensor in found.items():  # fused AdamW counts its steps on the device
            found[key] = tensor.to(parameter.device) if key == STEP else lying_as(parameter, tensor)
        states[parameter] = found


class Record:
    """Stands for an object of any admitted class; calling, setting and comparing it does nothing."""

    def __init__(self, *values: Any):
        self.values = values
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {}


class MetadataReader(pickle.Unpickler):
    """Makes records in place of objects, and refuses every name that does not belong to the list of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module in MODULES or (module, name) in VALUES or is_type:
            return type(name, (Record,), {})
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no part of a state and was not run")


def read_distcp(folder: Path, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors whose names begin with one of `prefixes`."""
    try:
        with open(folder / METADATA, "rb") as file:
            entries = MetadataReader(file).load().fields["storage_data"]
        where = {index.fields["fqn"]: entry.fields for index, entry in entries.items()}
        names = [name for name in where if name.startswith(prefixes)]
        return {name: _read_tensor(folder, where[name]) for name in names}
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(next(iter(str(error).splitlines()), type(error).__name__)) from error


def _read_tensor(folder: Path, entry: dict[str, Any]) -> Tensor:
    name = str(entry["relative_path"])
    if Path(name).name != name:
        raise ValueError(f"it names a file of another folder ({name})")
    with open(folder / name, "rb") as file:
        file.seek(int(entry["offset"]))
        tensor = torch.load(io.BytesIO(file.read(int(entry["length"]))), map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} holds something else than a tensor")
    return tensor
