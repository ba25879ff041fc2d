"""How the matrices of a MoEP checkpoint lie, as their shapes tell: [out, in] (torch) or [in, out] (GPT-2's Conv1D)."""

from collections import defaultdict
from dataclasses import dataclass, field

from braidlm.bridges.checkpoint import Shapes

ROUTERS = "routers"
"""The family that says nothing about others: routers are torch's Linear beside Conv1D too."""


@dataclass
class Layouts:
    """What is known of matrices, family by family: attention, feed-forward, experts."""

    shapes: Shapes
    turned: dict[str, bool] = field(default_factory=dict)
    """By the tensor's name: whether it is [in, out]."""
    square: dict[str, str] = field(default_factory=dict)
    """The family of each matrix whose own shape does not tell."""
    problems: list[str] = field(default_factory=list)
    _seen: dict[str, dict[bool, str]] = field(default_factory=lambda: defaultdict(dict))
    """Of each family, a matrix that lies one way and one that lies the other."""

    def other_side(self, name: str, inputs: int | None, outputs: int | None) -> int:
        """The size of a matrix that is not known yet, beside the one that is; 0 where it has none of them."""
        known = inputs if inputs is not None else outputs
        sides = list(self.shapes[name])
        if len(sides) != 2 or known not in sides:
            self.problems.append(f"{name} is {sides}: no side of it is {known}")
            return 0
        sides.remove(known)
        return sides[0]

    def note(self, family: str, name: str, inputs: int, outputs: int) -> None:
        """A matrix of these sizes."""
        shape = self.shapes[name]
        if shape not in ((outputs, inputs), (inputs, outputs)):
            self.problems.append(f"{name} is {list(shape)}, expected {[outputs, inputs]} or {[inputs, outputs]}")
        elif inputs == outputs:
            self.square[name] = family
        else:
            self.turned[name] = shape == (inputs, outputs)
            self._seen[family].setdefault(self.turned[name], name)

    def settle(self) -> None:
        """Square matrices lie as the others of their family do, or, where it has none, as all others if [out, in]."""
        for family, ways in self._seen.items():
            if len(ways) > 1:
                self.problems.append(f"of {family}, {ways[False]} is [out, in] and {ways[True]} is [in, out]")
        everywhere = {way for family, ways in self._seen.items() for way in ways if family != ROUTERS}
        unclear: dict[str, list[str]] = defaultdict(list)
        for name, family in self.square.items():
            known = set(self._seen[family]) or (everywhere if everywhere == {False} else set())
            if len(known) == 1:
                self.turned[name] = next(iter(known))
            elif not known:
                unclear[family].append(name)
        for family, names in unclear.items():
            more = f" (and {len(names) - 1} more of {family})" if len(names) > 1 else ""
            shape = list(self.shapes[names[0]])
            self.problems.append(f"{names[0]} is {shape}: nothing tells whether it is [in, out] or [out, in]{more}")
