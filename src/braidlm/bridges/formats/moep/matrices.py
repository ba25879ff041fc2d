"""The matrices of a MoEP checkpoint: their sizes, the parts of numbered ones, and whether they are transposed."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from braidlm.bridges.checkpoint import Shapes
from braidlm.bridges.formats.moep.structure import FEED, QKV, Bank, Module, MoepStructure, raise_problems

ROUTERS = "routers"
"""The family that says nothing about others: routers are torch's Linear even where the rest is Conv1D."""


def read_matrices(structure: MoepStructure, shapes: Shapes) -> dict[str, bool]:
    """Whether each matrix is [in, out]; fills in the structure's inner sizes and the parts of numbered matrices."""
    width, narrow = structure.width, structure.narrow
    matrices = _Matrices(shapes)
    structure.hidden = matrices.add_blocks(structure.wide, width)
    for layer in structure.layers:
        layer.hidden = matrices.add_blocks(layer.members, narrow, structure.layers[0].hidden)
    for bank, inputs, outputs in ((structure.shrink, width, narrow), (structure.grow, narrow, width)):
        bank.hidden = matrices.add_experts(bank, inputs, outputs)
    matrices.add_router(structure.shrink, width)
    for bank in (structure.grow, *structure.layers):
        matrices.add_router(bank, narrow)
    matrices.resolve_square()
    raise_problems(matrices.problems)
    return matrices.transposed


@dataclass
class _Matrices:
    """What is known about matrices, family by family: attention, feed-forward, experts, routers."""

    shapes: Shapes
    transposed: dict[str, bool] = field(default_factory=dict)
    """By name: whether a matrix is [in, out] (GPT-2's Conv1D) and not [out, in] (torch's Linear)."""
    square: dict[str, str] = field(default_factory=dict)
    """The family of each square matrix, whose shape does not show it."""
    problems: list[str] = field(default_factory=list)
    examples: dict[str, dict[bool, str]] = field(default_factory=lambda: defaultdict(dict))
    """For each family a matrix that is [out, in] and one that is [in, out]."""

    def add_blocks(self, blocks: Iterable[Module], width: int, expected: int = 0) -> int:
        """The inner size of the blocks' feed-forward, which is the first block's if none is expected."""
        hidden = {block.name: self._add_block(block, width) for block in blocks}
        return self._same_size(hidden, expected)

    def add_experts(self, bank: Bank, inputs: int, outputs: int) -> int:
        """The inner size of a bank's experts; 0 for single matrices."""
        return self._same_size({one.name: self._add_expert(one, inputs, outputs) for one in bank.members})

    def add_router(self, bank: Bank, inputs: int) -> None:
        if (name := bank.router.tensors.get(("router", "weight"))) is not None:
            self._add(ROUTERS, name, inputs, len(bank.members))

    def resolve_square(self) -> None:
        """Square matrices are like the others of their family or, if it has none, like all others if [out, in]."""
        for family, examples in self.examples.items():
            if len(examples) > 1:
                self.problems.append(f"of {family}, {examples[False]} is [out, in] and {examples[True]} is [in, out]")
        everywhere = {one for family, examples in self.examples.items() for one in examples if family != ROUTERS}
        unclear: dict[str, list[str]] = defaultdict(list)
        for name, family in self.square.items():
            known = set(self.examples[family]) or (everywhere if everywhere == {False} else set())
            if len(known) == 1:
                self.transposed[name] = next(iter(known))
            elif not known:
                unclear[family].append(name)
        for family, names in unclear.items():
            more = f" (and {len(names) - 1} more of {family})" if len(names) > 1 else ""
            shape = list(self.shapes[names[0]])
            self.problems.append(f"{names[0]} is {shape}: nothing tells whether it is [in, out] or [out, in]{more}")

    def _add(self, family: str, name: str, inputs: int, outputs: int) -> None:
        """Record a matrix that must have these sizes."""
        shape = self.shapes[name]
        if shape not in ((outputs, inputs), (inputs, outputs)):
            self.problems.append(f"{name} is {list(shape)}, expected {[outputs, inputs]} or {[inputs, outputs]}")
        elif inputs == outputs:
            self.square[name] = family
        else:
            self.transposed[name] = shape == (inputs, outputs)
            self.examples[family].setdefault(self.transposed[name], name)

    def _add_block(self, block: Module, width: int) -> int:
        for part in (*QKV, "attention out"):
            if block.has(part):
                self._add("attention", block.tensors[part, "weight"], width, width)
        if block.has("qkv"):
            self._add("attention", block.tensors["qkv", "weight"], width, 3 * width)
        return self._add_feed(block, width, width, "feed-forward parts")

    def _add_expert(self, expert: Module, inputs: int, outputs: int) -> int:
        if expert.has("linear"):
            self._add("experts", expert.tensors["linear", "weight"], inputs, outputs)
            return 0
        return self._add_feed(expert, inputs, outputs, "experts")

    def _add_feed(self, module: Module, inputs: int, outputs: int, family: str) -> int:
        """The inner size of a feed-forward; 0 where its first matrix is missing, which the mapping reports."""
        self._name_numbered(module)
        first = next((part for part in ("gate", "up", "gate and up") if module.has(part)), None)
        hidden = 0 if first is None else self._other_side(module.tensors[first, "weight"], inputs)
        hidden = hidden // 2 if first == "gate and up" else hidden
        if not hidden:
            return 0
        for part in FEED:
            if module.has(part):
                sizes = {"down": (hidden, outputs), "gate and up": (inputs, 2 * hidden)}.get(part, (inputs, hidden))
                self._add(family, module.tensors[part, "weight"], *sizes)
        return hidden

    def _other_side(self, name: str, inputs: int) -> int:
        """The side of a matrix that is not its inputs; 0 if neither side is."""
        sides = list(self.shapes[name])
        if len(sides) != 2 or inputs not in sides:
            self.problems.append(f"{name} is {sides}: no side of it is {inputs}")
            return 0
        sides.remove(inputs)
        return sides[0]

    def _same_size(self, sizes: dict[str, int], expected: int = 0) -> int:
        expected = expected or next(iter(sizes.values()))
        for name, size in sizes.items():
            if size != expected:
                self.problems.append(f"{name} has {size} channels inside, others of its kind {expected}")
        return expected

    def _name_numbered(self, module: Module) -> None:
        """Name numbered matrices: of two the first is up; of three the odd shape is down, and the gate is first."""
        numbered = sorted(key for key, kind in module.tensors if key.startswith("numbered") and kind == "weight")
        if not numbered:
            return
        parts = dict(zip(numbered, ("up", "down"), strict=False)) if len(numbered) == 2 else {}
        if len(numbered) == 3:
            shapes = {key: self.shapes[module.tensors[key, "weight"]] for key in numbered}
            unique = [key for key in numbered if list(shapes.values()).count(shapes[key]) == 1]
            if len(unique) == 1:
                rest = [key for key in numbered if key not in unique]
                parts = {unique[0]: "down", rest[0]: "gate", rest[1]: "up"}
        if not parts:
            names = ", ".join(module.tensors[key, "weight"] for key in numbered)
            self.problems.append(f"which of these is gate, up and down, neither names nor shapes tell: {names}")
            return
        for key, part in parts.items():
            for kind in ("weight", "bias"):
                if (name := module.tensors.pop((key, kind), None)) is not None:
                    module.tensors[part, kind] = name
