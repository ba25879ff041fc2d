"""Checkpoints of a run: model folders for everyone, and beside them the state that lets the run go on exactly.

    RUN/checkpoints/NAME/   a complete model folder
    RUN/states/NAME/        optimizer and random states (torch.distributed.checkpoint), position.json, manifest.json

A state is good when every file has the hash its manifest promises and its model folder holds the weights it was
saved with. Both are written beside their place and renamed, so a crash leaves the ones before untouched.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, optim

from braidlm.core.console import warn
from braidlm.core.errors import BraidError
from braidlm.core.files import explained_disk_errors, read_json, sha256_of, write_json
from braidlm.core.folders import WEIGHTS, FolderTokenizer, write_model_files
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.parallel import Place, wait_for_all

STATES_KEPT = 2


class Checkpoints:
    """Saves and restores one run."""

    def __init__(self, folder: Path, place: Place, keep: int | None):
        self.models, self.states = folder / "checkpoints", folder / "states"
        self.place, self.keep = place, keep

    def save(
        self,
        name: str,
        model: BraidForCausalLM,
        optimizer: optim.Optimizer,
        position: dict[str, Any],
        tokenizer: FolderTokenizer | None,
        lineage: dict[str, Any],
    ) -> Path:
        """Write a checkpoint; when this returns it is on disk and good."""
        model_part, state_part = self.models / f".{name}.part", self.states / f".{name}.part"
        with explained_disk_errors(self.models / name), self._removed_on_failure(model_part, state_part):
            if self.place.is_main:
                for part in (model_part, state_part):
                    shutil.rmtree(part, ignore_errors=True)
                    part.mkdir(parents=True)
            wait_for_all(self.place)
            dcp.save(
                training_tensors(model, optimizer, self.place),
                checkpoint_id=str(state_part / "tensors"),
                no_dist=self.place.world == 1,
            )
            if self.place.is_main:
                write_model_files(model, model_part, tokenizer, lineage, name)
                write_json(state_part / "position.json", {"saved": time.time_ns(), **position})
                write_json(state_part / "manifest.json", manifest_of(state_part, model_part))
                self._make_final(model_part, self.models / name)
                self._make_final(state_part, self.states / name)
                self._prune(name)
            wait_for_all(self.place)
        return self.models / name

    def newest_good(self) -> str | None:
        """The newest checkpoint whose every byte is as it was saved; damaged ones are named and passed over."""
        for name in reversed(self._in_order(self.states)):
            problem = state_problem(self.states / name, self.models / name)
            if problem is None:
                return name
            if self.place.is_main:
                warn(f"checkpoint {name} cannot be used ({problem}); trying the one before")
        return None

    def restore(self, name: str, model: BraidForCausalLM, optimizer: optim.Optimizer) -> dict[str, Any]:
        """Put weights, optimizer and random states back; gives the saved position."""
        weights = load_file(self.models / name / WEIGHTS, device=str(self.place.device))
        left = model.load_state_dict(weights, strict=False)
        missing = [k for k in left.missing_keys if not (k == "head.weight" and model.config.tie_word_embeddings)]
        if missing or left.unexpected_keys:
            raise BraidError(f"checkpoint {name} is of another model", str(self.models), "Begin a new run.")
        tensors = training_tensors(model, optimizer, self.place, blank=True)
        dcp.load(tensors, checkpoint_id=str(self.states / name / "tensors"), no_dist=self.place.world == 1)
        put_training_tensors(tensors, model, optimizer, self.place)
        return read_json(self.states / name / "position.json")

    def remove_leftovers(self) -> None:
        """Half-written folders of a run that was killed."""
        for folder in (self.models, self.states):
            for part in folder.glob(".*.part"):
                shutil.rmtree(part, ignore_errors=True)

    @contextlib.contextmanager
    def _removed_on_failure(self, *parts: Path) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.place.is_main:
                for part in parts:
                    shutil.rmtree(part, ignore_errors=True)
            raise

    @staticmethod
    def _make_final(part: Path, final: Path) -> None:
        if final.exists():
            shutil.rmtree(final)
        os.rename(part, final)

    def _prune(self, newest: str) -> None:
        names = self._in_order(self.states)
        for name in names[:-STATES_KEPT]:
            shutil.rmtree(self.states / name, ignore_errors=True)
        if self.keep is not None:
            kept = set(names[-max(self.keep, STATES_KEPT) :]) | {newest}
            by_age = sorted((p for p in self.models.iterdir() if p.name not in kept), key=lambda p: p.stat().st_mtime)
            surplus = len(by_age) + len(kept) - max(self.keep, STATES_KEPT)
            for old in by_age[: max(surplus, 0)]:
                shutil.rmtree(old, ignore_errors=True)

    @staticmethod
    def _in_order(folder: Path) -> list[str]:
        """Names of saved states, oldest first, by the time written inside them (file times do not survive a copy)."""
        if not folder.is_dir():
            return []
        found = []
        for path in folder.iterdir():
            if path.name.startswith("."):
                continue
            try:
                saved = read_json(path / "position.json")["saved"]
            except (BraidError, KeyError):
                saved = path.stat().st_mtime_ns
            found.append((saved, path.name))
        return [name for _, name in sorted(found)]


def training_tensors(
    model: BraidForCausalLM, optimizer: optim.Optimizer, place: Place, blank: bool = False
) -> dict[str, Tensor]:
    """Everything besides the weights that the next step depends on, as named tensors.

    `blank` gives empty tensors of the right shapes to load into, also before the first step.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer.{name}.{key}"] = torch.zeros_like(parameter) if blank else state[key]
        found[f"optimizer.{name}.step"] = torch.zeros(()) if blank else state["step"].cpu()
    found[f"random.{place.rank}.cpu"] = torch.get_rng_state()
    if place.device.type == "cuda":
        found[f"random.{place.rank}.cuda"] = torch.cuda.get_rng_state(place.device)
    return found


def put_training_tensors(
    tensors: dict[str, Tensor], model: BraidForCausalLM, optimizer: optim.Optimizer, place: Place
) -> None:
    """The reverse of `training_tensors`."""
    on_device = optimizer.defaults["capturable"] or place.device.type == "cuda"
    for name, parameter in model.named_parameters():
        step = tensors[f"optimizer.{name}.step"]
        optimizer.state[parameter] = {
            "step": step.to(parameter.device) if on_device else step,
            "exp_avg": tensors[f"optimizer.{name}.exp_avg"].detach(),
            "exp_avg_sq": tensors[f"optimizer.{name}.exp_avg_sq"].detach(),
        }
    torch.set_rng_state(tensors[f"random.{place.rank}.cpu"])
    if place.device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"random.{place.rank}.cuda"], place.device)


def manifest_of(state: Path, model: Path) -> dict[str, Any]:
    """Hashes of every file of a state, and of the weights it belongs to."""
    files = {str(p.relative_to(state)): sha256_of(p) for p in sorted(state.rglob("*")) if p.is_file()}
    return {"files": files, "model": {name: sha256_of(model / name) for name in (WEIGHTS, "config.json")}}


def state_problem(state: Path, model: Path) -> str | None:
    """What is wrong with a saved state, or None."""
    try:
        manifest = read_json(state / "manifest.json")
    except BraidError as error:
        return error.what
    wanted = [(state / n, h) for n, h in manifest["files"].items()]
    wanted += [(model / n, h) for n, h in manifest["model"].items()]
    for path, digest in wanted:
        if not path.is_file():
            return f"{path.name} is missing"
        if sha256_of(path) != digest:
            return f"{path.name} is damaged"
    return None
