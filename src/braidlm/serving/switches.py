"""Which parts of a model are active, by name, for one request and not for others."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.model.language_model import LanguageModel
from braidlm.model.members import MembersForCausalLM
from braidlm.model.paths.switches import switch_off_modules, use_paths
from braidlm.opening.gating import gates_of


@dataclass(frozen=True)
class Switches:
    """Which parts are active."""

    paths: tuple[str, ...] | None = None
    """The active paths; by default as the folder says."""
    without: tuple[str, ...] = ()
    """Modules (experts), names or patterns, that are switched off."""
    gates_off: tuple[str, ...] = ()
    """Gates that add nothing, by their layer: `layer 2`."""
    members: tuple[str, ...] | None = None
    """The members of an average or a posterior that stay active; by default all active paths."""


class PartSwitches:
    """Sets the parts of one model. A skeleton without weights will do for finding out what is unknown."""

    def __init__(self, model: Any):
        self.model = model
        self.gates = {f"layer {number}": gate for number, gate in gates_of(model).items()}
        self.average: Any = model if isinstance(model, MembersForCausalLM) else getattr(model, "head", None)
        """What averages the probabilities of members, if anything does."""
        self.members: tuple[str, ...] = tuple(getattr(self.average, "names", ()))
        self.set: Switches | None = None
        """The switches that were set last."""

    def apply(self, switches: Switches) -> None:
        """Let these parts be active and no others; what is not known is an error."""
        if switches == self.set:
            return
        self.set = None
        off = _known(switches.gates_off, self.gates, "gate")
        _known(switches.members or (), self.members, "member")
        is_braid = isinstance(self.model, LanguageModel)
        if switches.without and not is_braid:
            raise BraidError("only Braid's models have named modules")
        if is_braid or isinstance(self.model, MembersForCausalLM):
            config = self.model.config
            paths = config.paths if switches.paths is None else switches.paths
            use_paths(self.model, paths)
            if switches.members is not None:
                self._use_members(switches.members, self.members if paths is None else paths)
        elif switches.paths:
            raise BraidError("only Braid's models and members have paths to choose from")
        if is_braid:
            switch_off_modules(self.model, (*(config.without or ()), *switches.without))
        for name, gate in self.gates.items():
            gate.is_off = name in off
        self.set = switches

    def _use_members(self, members: Iterable[str], paths: Iterable[str]) -> None:
        """Let these members be active, of those whose paths are."""
        if not members:
            raise BraidError("at least one member must be active", todo=f"The model has {', '.join(self.members)}.")
        if not (active := set(members) & set(paths)):
            raise BraidError("none of these members is an active path", todo="Let one of them be active.")
        self.average.use_paths(active)


def _known(names: Iterable[str], known: Iterable[str], what: str) -> set[str]:
    known = list(known)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) if known else ""
            raise BraidError(f"the model has no {what} '{name}'.{hint}")
    return set(names)
