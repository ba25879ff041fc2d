"""Everything besides the weights that the next step depends on, as tensors in safetensors files.

optimizer.safetensors   the optimizer's averages and step counts, which are equal in every process
random-RANK.safetensors random states of one process
memory-RANK.safetensors what the rows of one process remember of their texts, where they have a memory
losses.safetensors      the tensors of extra losses, where they have any
average.safetensors     the average of the weights and the weights themselves, where the model folder has the average
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from braidlm.core.differences import compare_shapes, listed
from braidlm.core.errors import BraidError
from braidlm.training.averaging import WeightAverage
from braidlm.training.saving.distcp import EARLIER_FORMAT, read_distcp
from braidlm.training.step.memory import Memory
from braidlm.training.step.optimizers.contract import Optimizer, state_keys
from braidlm.training.step.parallel import Rank
from braidlm.training.trainables.trainable import Trainable

OPTIMIZER = "optimizer.safetensors"
LOSSES = "losses.safetensors"
AVERAGE = "average.safetensors"
STEP = "step"


def random_file(rank: Rank) -> str:
    return f"random-{rank.index}.safetensors"


def memory_file(rank: Rank) -> str:
    return f"memory-{rank.index}.safetensors"


@dataclass(frozen=True)
class StepState:
    """What a step changes, beside random states."""

    trained: Trainable
    optimizer: Optimizer
    memory: Memory | None = None
    extra: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    """The recipe's extra losses."""
    average: WeightAverage | None = None
    """Of the weights, where it is saved in their place."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer may train; an extra loss has names that no model's tensor has."""
        yield from self.trained.model.named_parameters()
        yield from ((f"losses.{name}", parameter) for name, parameter in self.extra.named_parameters())

    def optimized(self) -> Iterator[tuple[str, nn.Parameter, dict[Any, Any], tuple[str, ...]]]:
        """Each parameter that is trained by name, with its optimizer's states by parameter, and their keys."""
        owners = {p: part for part in self.optimizer.parts for group in part.param_groups for p in group["params"]}
        for name, parameter in self.named_parameters():
            if part := owners.get(parameter):
                yield name, parameter, part.state, state_keys(part)


def write_state(folder: Path, state: StepState, rank: Rank) -> None:
    """Write this process's share of the state, without the model's weights."""
    if rank.is_main:
        save_file(dict(_optimizer_tensors(state)), folder / OPTIMIZER)
        if tensors := state.extra.state_dict():
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / LOSSES)
        if state.average is not None:
            tensors = state.average.state()
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / AVERAGE)
    save_file(_random_states(rank), folder / random_file(rank))
    if state.memory is not None:
        save_file({name: tensor.cpu() for name, tensor in state.memory.tensors().items()}, folder / memory_file(rank))


def read_state(folder: Path, state: StepState, rank: Rank) -> None:
    """Restore what `write_state`, or an earlier version of Braid, wrote; nothing in the files is run."""
    tensors = _load(folder, rank)
    _put_optimizer_tensors(tensors, state)
    _put_random_states(tensors, rank)
    if state.extra.state_dict():
        state.extra.load_state_dict(load_file(folder / LOSSES))
    if state.average is not None:
        state.average.load_state(load_file(folder / AVERAGE))
    if state.memory is not None:
        state.memory.restore(load_file(folder / memory_file(rank)))


@contextmanager
def explained_state_errors(folder: Path) -> Iterator[None]:
    """Refuse a state with correct hashes and wrong content: somebody changed it, or it is of another run."""
    try:
        yield
    except BraidError as error:  # it may know better what to do
        raise _unusable(folder, error.what, error.todo) from error
    except (SafetensorError, LookupError, OSError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise _unusable(folder, f"there is no {error}" if isinstance(error, KeyError) else str(error)) from error


def _unusable(folder: Path, problem: str, todo: str | None = None) -> BraidError:
    remove = "Remove this folder to go on from the checkpoint before it, or start anew with --fresh."
    return BraidError(f"this saved state cannot be used: {problem}", str(folder), todo or remove)


def _load(folder: Path, rank: Rank) -> dict[str, Tensor]:
    if (folder / EARLIER_FORMAT).is_dir():
        prefix = f"random.{rank.index}."
        named = read_distcp(folder / EARLIER_FORMAT, ("optimizer.", prefix))
        return {name.removeprefix("optimizer.").removeprefix(prefix): tensor for name, tensor in named.items()}
    return {**load_file(folder / OPTIMIZER), **load_file(folder / random_file(rank))}


def _optimizer_tensors(state: StepState) -> Iterator[tuple[str, Tensor]]:
    for name, parameter, states, keys in state.optimized():
        if tensors := states.get(parameter):  # none before its first gradient
            for key in keys:
                yield f"{name}.{key}", tensors[key].detach().cpu().contiguous()


def _put_optimizer_tensors(tensors: dict[str, Tensor], state: StepState) -> None:
    for name, parameter, states, keys in state.optimized():
        if f"{name}.{keys[0]}" not in tensors:
            continue
        found = {key: tensors[f"{name}.{key}"] for key in keys}
        expected = {key: () if key == STEP else tuple(parameter.shape) for key in keys}
        if problems := compare_shapes(expected, {key: tuple(tensor.shape) for key, tensor in found.items()}):
            raise ValueError(f"it is of another model ({name}: {listed(problems)})")
        # Fused AdamW counts its steps on the device.
        states[parameter] = {key: tensor.to(parameter.device) for key, tensor in found.items()}


def _random_states(rank: Rank) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if rank.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(rank.device)
    return states


def _put_random_states(tensors: dict[str, Tensor], rank: Rank) -> None:
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and rank.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], rank.device)
