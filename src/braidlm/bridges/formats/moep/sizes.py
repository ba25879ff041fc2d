"""The sizes of a MoEP checkpoint's matrices: inner sizes, which of numbered ones is which, and how each lies."""

from braidlm.bridges.formats.moep.layout import ROUTERS, Layouts
from braidlm.bridges.formats.moep.parts import FED, QKV, Form, Part


def settle_matrices(form: Form) -> None:
    """Inner sizes, the roles of numbered matrices and how every matrix lies."""
    layouts = form.layouts
    hiddens = {block.name: _settle_block(block, form.width, layouts) for block in form.wide}
    form.hidden = next(iter(hiddens.values()))
    for layer in form.layers:
        inside = {block.name: _settle_block(block, form.narrow, layouts) for block in layer.members}
        layer.hidden = form.layers[0].hidden or next(iter(inside.values()))
        _note_other_sizes(inside, layer.hidden, layouts)
    _note_other_sizes(hiddens, form.hidden, layouts)
    for bank, inputs, outputs in ((form.shrink, form.width, form.narrow), (form.grow, form.narrow, form.width)):
        inner = {expert.name: _settle_expert(expert, inputs, outputs, layouts) for expert in bank.members}
        bank.hidden = next(iter(inner.values()))
        _note_other_sizes(inner, bank.hidden, layouts)
    for bank, inputs in ((form.shrink, form.width), (form.grow, form.narrow), *((b, form.narrow) for b in form.layers)):
        if (name := bank.router.tensors.get(("router", "weight"))) is not None:
            layouts.note(ROUTERS, name, inputs, len(bank.members))
    layouts.settle()


def _note_other_sizes(found: dict[str, int], usual: int, layouts: Layouts) -> None:
    for name, size in found.items():
        if size != usual:
            layouts.problems.append(f"{name} has {size} channels inside, others of its kind {usual}")


def _settle_block(block: Part, width: int, layouts: Layouts) -> int:
    """The inner size of a block's feed-forward."""
    for part in (*QKV, "attention out"):
        if block.has(part):
            layouts.note("attention", block.tensors[part, "weight"], width, width)
    if block.has("qkv"):
        layouts.note("attention", block.tensors["qkv", "weight"], width, 3 * width)
    return _settle_fed(block, width, width, "feed-forward parts", layouts)


def _settle_expert(expert: Part, inputs: int, outputs: int, layouts: Layouts) -> int:
    """The inner size of an expert; 0 for a single matrix."""
    if expert.has("linear"):
        layouts.note("experts", expert.tensors["linear", "weight"], inputs, outputs)
        return 0
    return _settle_fed(expert, inputs, outputs, "experts", layouts)


def _settle_fed(part: Part, inputs: int, outputs: int, family: str, layouts: Layouts) -> int:
    _name_numbered(part, inputs, outputs, layouts)
    known = next((name for name in ("gate", "up", "gate and up") if part.has(name)), None)
    if known is None:
        return 0  # what is missing is told where it is asked for
    hidden = layouts.other_side(part.tensors[known, "weight"], inputs, None)
    if known == "gate and up":
        hidden //= 2
    if not hidden:
        return 0
    for name in FED:
        if part.has(name):
            sizes = {"down": (hidden, outputs), "gate and up": (inputs, 2 * hidden)}.get(name, (inputs, hidden))
            layouts.note(family, part.tensors[name, "weight"], *sizes)
    return hidden


def _name_numbered(part: Part, inputs: int, outputs: int, layouts: Layouts) -> None:
    """Of two numbered matrices the first is up; of three the one of another shape is down, and the gate comes first."""
    numbered = sorted(key for key, kind in part.tensors if key.startswith("numbered") and kind == "weight")
    if not numbered:
        return
    roles = dict(zip(numbered, ("up", "down"), strict=False)) if len(numbered) == 2 else {}
    if len(numbered) == 3:
        shapes = {key: layouts.shapes[part.tensors[key, "weight"]] for key in numbered}
        odd = [key for key in numbered if list(shapes.values()).count(shapes[key]) == 1]
        if len(odd) == 1:
            rest = [key for key in numbered if key not in odd]
            roles = {odd[0]: "down", rest[0]: "gate", rest[1]: "up"}
    if not roles:
        names = ", ".join(f"{part.tensors[key, 'weight']}" for key in numbered)
        layouts.problems.append(f"which of these is gate, up and down, neither names nor shapes tell: {names}")
        return
    for key, role in roles.items():
        for kind in ("weight", "bias"):
            if (name := part.tensors.pop((key, kind), None)) is not None:
                part.tensors[role, kind] = name
