"""Checkpoints of a run: model folders for everyone, and beside them the state from which the run resumes exactly.

    RUN/checkpoints/NAME/   what the trained model writes: a complete model folder, or adapters that name their base
    RUN/states/NAME/        optimizer, random states, memory (safetensors), position.json, manifest.json

A state is good when every file has the hash in its manifest and its model folder holds the weights it was saved with.
Both are written to a scratch folder and renamed, so that a crash leaves older checkpoints untouched. Where weights are
spread over processes, each copies its parts and the training goes on while they are written; the main process makes the
folders final when the parts of all are there.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from braidlm.core.console import warn
from braidlm.core.errors import BraidError
from braidlm.core.files import explained_disk_errors, make_final, sha256_of, write_json
from braidlm.core.models.runs import MODEL_CONFIGS, checkpoint_steps, is_interruption
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.opening.names import best_checkpoint
from braidlm.training.amounts import Amount, Pace, Progress, short
from braidlm.training.features.feature import evaluating
from braidlm.training.lora import ADAPTER, ADAPTER_WEIGHTS
from braidlm.training.saving.shards import Shards, finished, start_writing, weights_apart
from braidlm.training.saving.state import RANK, SHARDS, StepState, read_state, write_state
from braidlm.training.step.parallel import Rank, wait_for_all
from braidlm.training.step.spread import is_spread, whole_parameters

T = TypeVar("T")
STATES_KEPT = 2
POSITION, MANIFEST = "position.json", "manifest.json"
NEEDED = ("*.safetensors", *MODEL_CONFIGS, "tokenizer.json", f"{ADAPTER}/{ADAPTER_WEIGHTS}")
"""Patterns of the files that a model cannot do without."""


class Checkpoints:
    """Saves and restores one run."""

    def __init__(self, folder: Path, rank: Rank, keep: int | None):
        self.models, self.states = folder / "checkpoints", folder / "states"
        self.rank, self.keep = rank, keep
        self.group: Any = None
        self.writing: Future | None = None  # the checkpoint that is written while training goes on

    def save(
        self,
        name: str,
        state: StepState,
        position: dict[str, Any],
        tokenizer: BraidTokenizer | None,
        lineage: dict[str, Any],
    ) -> None:
        """Write a checkpoint. When this returns it is on disk and good; where weights are spread, when `wait` does."""
        self.wait()
        parts = model_part, state_part = self.models / f".{name}.part", self.states / f".{name}.part"
        trained, main = state.trained, self.rank.is_main
        spread = is_spread(trained.model)
        weights: dict[str, Tensor] = {}
        with explained_disk_errors(self.models / name), contextlib.ExitStack() as stack:
            if main:
                for part in parts:
                    shutil.rmtree(part, ignore_errors=True)
                    stack.callback(shutil.rmtree, part, ignore_errors=True)  # after a failure; else it is renamed
                    part.mkdir(parents=True)
            wait_for_all(self.rank)
            together = write_state(state_part, state, self.rank, spread)
            with evaluating(state.features):
                if spread and (weights := trained.spread_weights()):
                    if main:
                        trained.write_around_weights(model_part, tokenizer, name)
                else:
                    with whole_parameters(trained.model, keep=main):
                        if main:
                            trained.write(model_part, tokenizer, lineage, name)
                written = None
                if spread:  # messages about what is written must not meet those of the steps
                    self.group = self.group or dist.new_group(backend="gloo")
                    written = start_writing(state_part / SHARDS, together | weights, weights.keys(), self.group)
            if main:
                saved = {"saved": time.time_ns(), "processes": self.rank.world_size}
                write_json(state_part / POSITION, saved | position)
            wait_for_all(self.rank)
            cleanup = stack.pop_all()

        def finish() -> None:
            with explained_disk_errors(self.models / name), cleanup:
                if written is not None:
                    finished(written)
                if weights:
                    with weights_apart(state_part / SHARDS) as shards:
                        trained.write_weights(model_part, shards, tokenizer, lineage, name)
                write_json(state_part / MANIFEST, manifest_of(state_part, model_part))
                make_final(state_part, self.states / name)  # first: a crash leaves no model without its state
                make_final(model_part, self.models / name)
                self._remove_interruptions(but=name)
                self._prune()

        if written is None:
            finish()
        else:
            self.writing = ThreadPoolExecutor(1).submit(finish) if main else written

    def wait(self) -> None:
        """Return when what is being written is on disk and good."""
        if self.writing is not None:
            writing, self.writing = self.writing, None
            finished(writing)
            wait_for_all(self.rank)

    def newest_good(self) -> str | None:
        """The newest checkpoint whose hashes are correct; damaged ones are skipped with a warning."""
        for name in reversed(self._in_order()):
            if (problem := state_problem(self.states / name, self.models / name)) is None:
                return name
            if self.rank.is_main:
                warn(f"checkpoint {name} cannot be used ({problem}); trying the one before")
        return None

    def finished(self, budget: Amount) -> tuple[str, dict[str, Any]] | None:
        """The last checkpoint and its position, if it is good and reached the budget; no other file is read for it."""
        with contextlib.suppress(BraidError, IndexError, KeyError, TypeError):
            name = self._in_order()[-1]
            position = read_json(self.states / name / POSITION)
            is_done = Progress(**position["progress"]).done(budget.unit) >= budget.count
            if is_done and state_problem(self.states / name, self.models / name) is None:
                return name, position
        return None

    def check_empty(self) -> None:
        """Refuse to begin anew over checkpoints whose states were removed or damaged."""
        last = max(self.models.glob("[!.]*"), key=_steps, default=None)
        if last is not None:
            raise BraidError(
                f"this run has checkpoints ({last.name} is the last), and no saved state that it could go on from",
                str(self.states),
                f"Begin another run at its weights with start_from={last} name=NAME; --fresh removes the run that is "
                "there and begins anew.",
            )

    def restore(self, name: str, state: StepState) -> dict[str, Any]:
        """Restore weights and all that the next step depends on; returns the saved position."""
        position = read_json(self.states / name / POSITION)
        if position["processes"] != self.rank.world_size:
            for one in state.features:
                if one.state() and RANK in one.file:
                    what = f"{one.name}: each of {position['processes']} processes has its own rows, and now there are "
                    todo = f"Go on with {position['processes']} processes."
                    raise BraidError(f"{what}{self.rank.world_size}", str(self.states / name), todo)
        spread, folder = is_spread(state.trained.model), self.models / name
        if spread and (weights := state.trained.spread_weights()):
            Shards(folder).fill(weights)
        else:
            with whole_parameters(state.trained.model, keep=True):
                state.trained.read(folder)
        read_state(self.states / name, state, self.rank, spread)
        return position

    def rows_of_a_step(self) -> int | None:
        """How many rows all processes together train in a step of the run that is there, if it says so."""
        for name in reversed(self._in_order()):
            with contextlib.suppress(BraidError, KeyError, TypeError, ValueError, OverflowError):
                return int(read_json(self.states / name / POSITION)["loader"]["global_rows"])
        return None

    def remove_leftovers(self) -> None:
        """Remove half-written folders of a run that was killed; one that was being replaced is restored."""
        for folder in (self.models, self.states):
            for part in folder.glob(".*.part"):
                shutil.rmtree(part, ignore_errors=True)
            for old in folder.glob(".*.old"):
                if not (final := folder / old.stem.removeprefix(".")).exists():
                    os.rename(old, final)
                shutil.rmtree(old, ignore_errors=True)

    def forget_after(self, name: str | None) -> None:
        """Remove the damaged states after `name`, so that they do not displace good ones when states are pruned. Their
        model folders are complete and stay; the run will write them again."""
        names = self._in_order()
        for other in names[names.index(name) + 1 :] if name is not None else names:
            shutil.rmtree(self.states / other, ignore_errors=True)
        self._remove_interruptions(but=name)

    def _remove_interruptions(self, but: str | None) -> None:
        """Remove checkpoints where the run was only stopped, except the one that it now goes on from. The state goes
        first, because one without its model folder would look damaged."""
        for model in self.models.glob("[!.]*"):
            if model.name != but and _unless_unreadable(is_interruption, model, False):
                shutil.rmtree(self.states / model.name, ignore_errors=True)
                shutil.rmtree(model, ignore_errors=True)

    def _prune(self) -> None:
        """Remove all but the newest; of models also the best is kept."""
        names = self._in_order()
        for name in names[:-STATES_KEPT]:
            shutil.rmtree(self.states / name, ignore_errors=True)
        if self.keep is not None:
            needed = set(names[-STATES_KEPT:])
            others = sorted((p for p in self.models.iterdir() if p.name not in needed), key=_steps)
            best = _unless_unreadable(best_checkpoint, self.models.parent, None)
            for old in others[: max(len(others) + len(needed) - self.keep, 0)]:
                if old != best:
                    shutil.rmtree(old, ignore_errors=True)

    def _in_order(self) -> list[str]:
        """Names of saved states, oldest first, by the time recorded inside them (file times do not survive a copy)."""
        dated = []
        for path in self.states.glob("[!.]*"):
            saved = _unless_unreadable(lambda state: read_json(state / POSITION).get("saved"), path, None)
            # A link that leads to nothing has a time of its own.
            dated.append((saved if isinstance(saved, int) else path.lstat().st_mtime_ns, path.name))
        return [name for _, name in sorted(dated)]


def checkpoint_name(pace: Pace, progress: Progress) -> str:
    """A name by the unit of the pace: step-001000, chck_10M (words, as the BabyLM pipeline requires), tokens-5M."""
    if pace.unit == "steps":
        return f"step-{progress.steps:06d}"
    return f"{'chck_' if pace.unit == 'words' else 'tokens-'}{short(progress.done(pace.unit))}"


def _unless_unreadable(read: Callable[[Path], T], folder: Path, default: T) -> T:
    """What a folder says of itself, or the default where its records are missing or cannot be read."""
    try:
        return read(folder)
    except BraidError:
        return default


def _steps(model: Path) -> int:
    """The training steps of a model folder; one without a record is removed first."""
    return _unless_unreadable(checkpoint_steps, model, -1)


def manifest_of(state: Path, model: Path) -> dict[str, Any]:
    """Hashes of every file of a state, and of the files of its model folder that the model cannot do without."""
    files = {str(p.relative_to(state)): sha256_of(p) for p in sorted(state.rglob("*")) if p.is_file()}
    needed = [path for pattern in NEEDED for path in sorted(model.glob(pattern))]
    return {"files": files, "model": {str(path.relative_to(model)): sha256_of(path) for path in needed}}


def state_problem(state: Path, model: Path) -> str | None:
    """What is wrong with a saved state, or None."""
    try:
        manifest = read_json(state / MANIFEST)
        hashes = [(state / n, h) for n, h in manifest["files"].items()]
        hashes += [(model / n, h) for n, h in manifest["model"].items()]
    except BraidError as error:
        return f"{MANIFEST}: {error.what}"
    except (KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    for path, digest in hashes:
        if not path.is_file():
            return f"{path.name} is missing"
        if sha256_of(path) != digest:
            return f"{path.name} is damaged"
    return None
