"""What a MoEP checkpoint is: its blocks, banks of experts and routers, found by the names and shapes of its tensors."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from braidlm.bridges.bridge import listed
from braidlm.bridges.checkpoint import Shapes
from braidlm.bridges.formats.moep.layout import Layouts
from braidlm.bridges.formats.moep.names import ATTENDING, Named, bare_name, list_of, number_of, read_names
from braidlm.bridges.formats.moep.parts import Bank, Form, Part
from braidlm.bridges.formats.moep.sizes import settle_matrices
from braidlm.core.errors import BraidError

FIRST = {"first", "in", "input", "initial", "pre", "start", "front", "entry", "early"}
LAST = {"last", "out", "output", "final", "post", "end", "back", "exit", "late"}
SHRINK = {"shrink", "down", "reduce", "compress", "in", "input", "narrow"}
GROW = {"grow", "up", "expand", "decompress", "out", "output", "widen"}


def read_form(shapes: Shapes) -> Form:
    """The form that names and shapes show; an error lists everything that has no place, or more than one."""
    named, unknown = read_names(iter(shapes))
    problems = [f"{name} {list(shapes[name])} has a name that no part of MoEP has" for name in unknown]
    parts = _gather(named, problems)
    ends = parts.pop("", Part(""))
    for part in ("embedding", "positions"):
        if len(shapes.get(ends.tensors.get((part, "weight"), ""), ())) != 2:
            problems.append(f"there is no matrix that could be the {part} of tokens")
    routers = {name: part for name, part in parts.items() if part.has("router")}
    blocks = {n: p for n, p in parts.items() if ATTENDING.intersection(kind for kind, _ in p.tensors)}
    experts = {name: part for name, part in parts.items() if name not in routers and name not in blocks}
    _raise(problems)
    vocabulary, width = shapes[ends.tensors["embedding", "weight"]]
    layers, wide = _layers(blocks, problems)
    banks = list(_lists(experts).values())
    if len(banks) != 2:
        found = ", ".join(f"{list_of(bank[0].name)} ({len(bank)})" for bank in banks) or "none"
        problems.append(f"MoEP has two banks of projection experts, to shrink and to grow; found {found}")
    for bank in banks:
        numbers = [number_of(expert.name) for expert in bank]
        if numbers != list(range(len(bank))):
            problems.append(f"{list_of(bank[0].name)} has the experts {numbers}, expected 0 to {len(bank) - 1}")
    _raise(problems)
    layer_banks = [Bank(members, Part("")) for members in layers]
    expert_banks = [Bank(members, Part("")) for members in banks]
    _give_routers(layer_banks, expert_banks, routers, problems)
    _raise(problems)
    first, last = _ends_of(wide, layers, problems)
    narrow = _narrow_width(layers, shapes, problems)
    _raise(problems)
    shrink, grow = _directions(expert_banks, width, narrow, shapes, problems)
    _raise(problems)
    positions = shapes[ends.tensors["positions", "weight"]][0]
    form = Form(ends, first, last, shrink, grow, layer_banks, vocabulary, positions, width, narrow, 0, Layouts(shapes))
    settle_matrices(form)
    _raise(form.layouts.problems)
    return form


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise BraidError(f"this is not a MoEP that Braid can place:{listed(problems)}")


def _gather(named: Iterable[Named], problems: list[str]) -> dict[str, Part]:
    """Tensors by what they are part of; two for one place are a problem."""
    parts: dict[str, Part] = {}
    for one in named:
        part = parts.setdefault(one.container, Part(one.container))
        key = (one.part if one.number is None else f"{one.part} {one.number}", one.kind)
        if key in part.tensors:
            problems.append(f"{part.tensors[key]} and {one.name} both look like the same {' '.join(key)}")
        part.tensors[key] = one.name
    return parts


def _lists(parts: dict[str, Part]) -> dict[str, list[Part]]:
    """Members of lists together, each list in its order."""
    found: dict[str, list[Part]] = defaultdict(list)
    for name in sorted(parts, key=lambda name: (list_of(name), number_of(name))):
        found[list_of(name)].append(parts[name])
    return found


def _layers(blocks: dict[str, Part], problems: list[str]) -> tuple[list[list[Part]], list[Part]]:
    """The blocks of each parallel layer, and the blocks that stand alone: a layer is a list inside a numbered place."""
    layers: list[list[Part]] = []
    wide: list[list[Part]] = []
    for name, members in _lists(blocks).items():
        inside = any(character.isdigit() for character in name)
        (layers if inside and members[0].name != name else wide).append(members)
    layers.sort(key=lambda members: number_of(list_of(members[0].name)))
    if not layers:
        problems.append("there are no parallel blocks (such as layers.0.blocks.0.ln_1.weight)")
    most = max(map(len, layers), default=0)
    places = [list_of(members[0].name) for members in layers]
    for place, members in zip(places, layers, strict=True):
        numbers = [number_of(block.name) for block in members]
        if numbers != list(range(most)):
            problems.append(f"{place} has the blocks {numbers}, expected 0 to {most - 1} as in other layers")
    numbers = [number_of(place) for place in places]
    if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        problems.append(f"the parallel layers have the numbers {numbers}: one is missing, or there is one twice")
    return layers, [block for members in wide for block in members]


def _ends_of(wide: list[Part], layers: list[list[Part]], problems: list[str]) -> tuple[list[Part], list[Part]]:
    """Which blocks stand before the parallel layers and which after: by words, else by numbers."""
    numbers = [number_of(list_of(members[0].name)) for members in layers]
    outer = list_of(layers[0][0].name).split(".")[0]
    first, last, unclear = [], [], []
    for block in wide:
        words = set(block.name.replace(".", "_").lower().split("_"))
        number = number_of(block.name)
        same_list = block.name.split(".")[0] == outer and number >= 0
        if (words & FIRST and not words & LAST) or (same_list and number < min(numbers)):
            first.append(block)
        elif (words & LAST and not words & FIRST) or (same_list and number > max(numbers)):
            last.append(block)
        else:
            unclear.append(block)
    if len(unclear) == 2 and not first and not last and list_of(unclear[0].name) == list_of(unclear[1].name):
        return unclear[:1], unclear[1:]
    if unclear or not wide:
        found = ", ".join(block.name for block in unclear) or "there are none"
        problems.append(f"which blocks of the full width stand before the parallel ones is not clear: {found}")
    return first, last


def _narrow_width(layers: list[list[Part]], shapes: Shapes, problems: list[str]) -> int:
    """Of the stream inside, which the first parallel block's first norm shows."""
    block = layers[0][0]
    name = block.tensors.get(("norm 1", "weight"))
    if name is None or len(shapes[name]) != 1:
        problems.append(f"missing the weight of norm 1 of {block.name}, a vector that shows the width inside")
        return 0
    return shapes[name][0]


def _give_routers(layers: list[Bank], experts: list[Bank], routers: dict[str, Part], problems: list[str]) -> None:
    """To each bank the router of its name; those that are left go to the layers in their order."""
    left = dict(routers)
    without: list[Bank] = []
    for bank in (*experts, *layers):
        place = list_of(bank.members[0].name)
        names = {bare_name(place), bare_name(place.rpartition(".")[0])} - {""}
        fitting = [name for name in left if bare_name(name) in names]
        if len(fitting) > 1:
            problems.append(f"{' and '.join(fitting)} both look like the router of {place}")
        if fitting:
            bank.router = left.pop(fitting[0])
        else:
            without.append(bank)
    if without and len(without) == len(left) == len(layers):  # routers.0, routers.1, ... beside the layers
        for bank, name in zip(layers, sorted(left, key=number_of), strict=True):
            bank.router = left.pop(name)
        return
    problems += [f"missing the router of {list_of(bank.members[0].name)}" for bank in without]
    problems += [f"{name} is the router of nothing that is there" for name in left]


def _directions(banks: list[Bank], width: int, narrow: int, shapes: Shapes, problems: list[str]) -> tuple[Bank, Bank]:
    """Which bank shrinks and which grows: by what their routers read, or by their names where the widths are one."""
    if width != narrow:
        reads = [_reads(bank, shapes) for bank in banks]
        for one, other in ((0, 1), (1, 0)):
            if width in reads[one] and narrow in reads[other]:
                return banks[one], banks[other]
        for bank in banks:
            name = bank.router.tensors["router", "weight"]
            problems.append(f"{name} is {list(shapes[name])}; routers of experts read {width} and {narrow} channels")
        return banks[0], banks[1]
    words = [set(bare_name(list_of(bank.members[0].name)).lower().split("_")) for bank in banks]
    for one, other in ((0, 1), (1, 0)):
        if words[one] & SHRINK and words[other] & GROW:
            return banks[one], banks[other]
    names = " and ".join(list_of(bank.members[0].name) for bank in banks)
    problems.append(f"neither shapes nor names tell which of {names} comes first")
    return banks[0], banks[1]


def _reads(bank: Bank, shapes: Shapes) -> set[int]:
    """What a router may read: the side of its matrix that is not the number of its choices."""
    sides = list(shapes[bank.router.tensors["router", "weight"]]) if bank.router.has("router") else []
    choices = len(bank.members)
    return {side for at, side in enumerate(sides) if len(sides) == 2 and sides[1 - at] == choices}
