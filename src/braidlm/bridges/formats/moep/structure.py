"""What the tensors of a MoEP checkpoint are by their names, which differ between versions of the code."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from braidlm.bridges.bridge import bullet_list
from braidlm.bridges.checkpoint import Shapes
from braidlm.core.errors import BraidError

WRAPPERS = r"^(?:(?:module|_orig_mod|transformer|model|moep|backbone|decoder)\.)+"
"""Prefixes that training and outer classes add to every name."""
ATTENTION = r"(?:(?:self_)?att(?:n|ention)|mha)"
MLP = r"(?:mlp|ffn?|feed_?forward|feed)"
OUTSIDE = r"(?:[A-Za-z_]+\.)*?"
INSIDE = r"(?P<container>.+?)\."
FED = rf"{INSIDE}(?:{MLP}\.)?"
KIND = r"(?P<kind>weight|bias)"
LAYER = r"(?:\.(?:linear|proj|projection|gate|layer|fc))?"

PATTERNS = (
    ("positions", rf"{OUTSIDE}(?:wpe|pos(?:ition)?s?_emb\w*|positions?)\.{KIND}"),
    ("embedding", rf"{OUTSIDE}(?:wte|tok(?:en)?s?_emb\w*|embed_tokens|word_emb\w*|embeddings?|emb)\.{KIND}"),
    ("last norm", rf"{OUTSIDE}(?:ln_f|ln_final|final_(?:layer_?)?norm|norm_f|final_ln|norm)\.{KIND}"),
    ("head", rf"{OUTSIDE}(?:lm_head|head|output_head)\.{KIND}"),
    ("router", rf"(?P<container>.*?(?:router|gating)s?(?:_[a-z]+|\.\d+)?){LAYER}\.{KIND}"),
    ("router", rf"(?P<container>.+?\.gate)\.(?:linear|proj|layer|fc)\.{KIND}"),
    (
        "norm 1",
        rf"{INSIDE}(?:ln_?1|norm_?1|att(?:n|ention)_(?:layer_?)?norm|input_layernorm|ln_att(?:n|ention))\.{KIND}",
    ),
    (
        "norm 2",
        rf"{INSIDE}(?:ln_?2|norm_?2|{MLP}_(?:layer_?)?norm|post_attention_layernorm|ln_{MLP})\.{KIND}",
    ),
    ("qkv", rf"{INSIDE}{ATTENTION}\.(?:(?:c_attn|qkv|qkv_proj|w_?qkv)\.|in_proj_){KIND}"),
    ("query", rf"{INSIDE}{ATTENTION}\.(?:q|query|q_proj|w_?q|q_linear|to_q)\.{KIND}"),
    ("key", rf"{INSIDE}{ATTENTION}\.(?:k|key|k_proj|w_?k|k_linear|to_k)\.{KIND}"),
    ("value", rf"{INSIDE}{ATTENTION}\.(?:v|value|v_proj|w_?v|v_linear|to_v)\.{KIND}"),
    ("attention out", rf"{INSIDE}{ATTENTION}\.(?:c_proj|out_proj|o_proj|proj|out|w_?o|to_out)\.{KIND}"),
    ("gate and up", rf"{FED}(?:gate_up|gate_up_proj|w12)\.{KIND}"),
    ("gate", rf"{FED}(?:gate|gate_proj|w_?gate|c_gate)\.{KIND}"),
    ("up", rf"{FED}(?:up|up_proj|w_?up|c_fc|fc_in)\.{KIND}"),
    ("down", rf"{FED}(?:down|down_proj|w_?down|fc_out)\.{KIND}"),
    ("down", rf"{INSIDE}{MLP}\.(?:c_proj|out_proj|proj|out)\.{KIND}"),
    ("numbered", rf"{FED}(?:w|fc_?|linear_?|lin_?)(?P<number>\d)\.{KIND}"),
    ("numbered", rf"{INSIDE}{MLP}\.(?:net\.|layers\.)?(?P<number>\d)\.{KIND}"),
    ("linear", rf"(?P<container>.+?\.\d+)(?:\.(?:linear|proj|projection|fc|layer|0))?\.{KIND}"),
)
"""Parts and their possible names, tried in this order; for `numbered` matrices the shapes show which part they are."""
BUFFERS = rf".*{ATTENTION}\.(?:bias|mask|tril|causal_mask|masked_bias)|(?:.*\.)?position_ids"
"""Constants that some versions stored; `attn.bias` is a mask, since a layer's bias has the layer's name in it."""
BLOCK_PARTS = {"norm 1", "norm 2", "qkv", "query", "key", "value", "attention out"}
"""Parts that only blocks have."""
EXPERTS = r"(?:experts?|projections?|projs|linears|ffns|mlps)"
BARE = r"(?:^|(?<=[._]))(?:routers?|gat(?:e|es|ing)|experts?)(?:$|(?=[._]))"


@dataclass(frozen=True)
class NamedTensor:
    """A tensor as its name describes it."""

    container: str
    """The name of the block, expert or router that it belongs to; empty for the embeddings, last norm and head."""
    part: str
    kind: str
    """`weight` or `bias`."""
    number: int | None = None
    """The number of a numbered part."""


def read_name(name: str) -> NamedTensor | None:
    """What a tensor is, or None if its name matches no part."""
    bare = re.sub(WRAPPERS, "", name)
    for part, pattern in PATTERNS:
        if match := re.fullmatch(pattern, bare):
            groups = match.groupdict()
            container = groups.get("container") or ""
            number = None if groups.get("number") is None else int(groups["number"])
            if part == "gate" and not _is_feed_gate(bare, container):
                part, container = "router", f"{container}.gate"
            return NamedTensor(container, part, groups["kind"], number)
    return None


def is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a stored tensor is a constant that carries nothing learned."""
    return len(shape) != 1 and bool(re.fullmatch(BUFFERS, name))


def bare_name(container: str) -> str:
    """The name that a router and its bank share: `shrink` for `shrink.experts`, `router_shrink` and the like."""
    return "_".join(word for word in re.split(r"[._]+", re.sub(BARE, "", container)) if word)


def number_of(container: str) -> int:
    """The last number in a name, which is the index in a list; -1 if there is none."""
    numbers = re.findall(r"\d+", container)
    return int(numbers[-1]) if numbers else -1


def list_of(container: str) -> str:
    """The name of the list that contains a module: its own name without the number at the end."""
    return re.sub(r"\.\d+$", "", container)


def _is_feed_gate(name: str, container: str) -> bool:
    """Whether `gate` is a feed-forward's, which it is inside one or inside a numbered expert; else it is a router."""
    return bool(re.search(rf"\.{MLP}\.gate|gate_proj|w_?gate|c_gate", name)) or bool(
        re.search(rf"(?:^|[._]){EXPERTS}\.\d+$", container)
    )


FEED = ("gate and up", "gate", "up", "down")
QKV = ("query", "key", "value")
FIRST = {"first", "in", "input", "initial", "pre", "start", "front", "entry", "early"}
LAST = {"last", "out", "output", "final", "post", "end", "back", "exit", "late"}
SHRINK = {"shrink", "down", "reduce", "compress", "in", "input", "narrow"}
GROW = {"grow", "up", "expand", "decompress", "out", "output", "widen"}


@dataclass
class Module:
    """A block, an expert, a router, or the outer module with the embeddings, the last norm and the head."""

    name: str
    tensors: dict[tuple[str, str], str] = field(default_factory=dict)
    """Names of tensors by part ("query", "norm 1") and kind (weight or bias)."""

    def has(self, part: str, kind: str = "weight") -> bool:
        return (part, kind) in self.tensors


@dataclass
class Bank:
    """Modules that a router chooses from: the blocks of a parallel layer, or experts."""

    members: list[Module]
    router: Module
    hidden: int = 0
    """Inner size of gated experts, and of blocks' feed-forward parts."""

    @property
    def gated(self) -> bool:
        return any(member.has("gate") or member.has("gate and up") for member in self.members)

    def has_bias(self, *parts: str) -> bool:
        """Whether any member has a bias in one of these parts; then every member must have it."""
        return _any_bias(self.members, parts)


@dataclass
class MoepStructure:
    """The whole model, with every tensor of the file assigned to a module."""

    outer: Module
    before: list[Module]
    """Blocks of the full width before the parallel layers."""
    after: list[Module]
    """Blocks of the full width after them."""
    shrink: Bank
    grow: Bank
    layers: list[Bank]
    vocabulary: int
    positions: int
    width: int
    narrow: int
    hidden: int = 0
    """Inner size of the feed-forward of blocks of the full width."""

    @property
    def wide(self) -> list[Module]:
        return [*self.before, *self.after]

    @property
    def blocks(self) -> list[Module]:
        return [*self.wide, *(block for layer in self.layers for block in layer.members)]

    @property
    def gated(self) -> bool:
        """Whether feed-forward parts are gated."""
        return self.layers[0].gated

    @property
    def norm_bias(self) -> bool:
        return _any_bias([self.outer, *self.blocks], ("norm 1", "norm 2", "last norm"))

    @property
    def attention_bias(self) -> bool:
        return _any_bias(self.blocks, ("qkv", *QKV, "attention out"))

    @property
    def feed_bias(self) -> bool:
        return _any_bias(self.blocks, FEED)

    @property
    def description(self) -> str:
        """The model in words, for messages."""
        layers, paths = len(self.layers), len(self.layers[0].members)
        kind = "MoEP-SwiGLU" if self.gated else "MoEP"
        return f"a {kind} of {layers} layers of {paths} blocks, {self.width} and {self.narrow} wide"

    @property
    def sizes(self) -> dict[str, set[int]]:
        """The values that a configuration may have for each size."""
        layers, paths = len(self.layers), len(self.layers[0].members)
        return {
            "vocabulary": {self.vocabulary},
            "width": {self.width},
            "narrow width": {self.narrow},
            "positions": {self.positions},
            "layers": {layers, layers + len(self.wide)},
            "parallel layers": {layers},
            "blocks of a layer": {paths},
            "experts": {len(self.shrink.members), len(self.grow.members), paths},
            "feed-forward": {self.hidden, self.layers[0].hidden},
        }


def read_structure(shapes: Shapes) -> MoepStructure:
    """The structure that names and shapes show; an error lists every tensor that fits nowhere or twice."""
    problems: list[str] = []
    modules = _modules(shapes, problems)
    outer = modules.pop("", Module(""))
    for part in ("embedding", "positions"):
        if len(shapes.get(outer.tensors.get((part, "weight"), ""), ())) != 2:
            problems.append(f"there is no matrix that could be the {part} of tokens")
    routers = {name: module for name, module in modules.items() if module.has("router")}
    blocks = {n: m for n, m in modules.items() if BLOCK_PARTS.intersection(part for part, _ in m.tensors)}
    experts = {name: module for name, module in modules.items() if name not in routers and name not in blocks}
    raise_problems(problems)
    vocabulary, width = shapes[outer.tensors["embedding", "weight"]]
    layers, wide = _layers(blocks, problems)
    banks = list(_lists(experts).values())
    if len(banks) != 2:
        names = ", ".join(f"{list_of(bank[0].name)} ({len(bank)})" for bank in banks) or "none"
        problems.append(f"MoEP has two banks of projection experts, to shrink and to grow; found {names}")
    for bank in banks:
        numbers = [number_of(expert.name) for expert in bank]
        if numbers != list(range(len(bank))):
            problems.append(f"{list_of(bank[0].name)} has the experts {numbers}, expected 0 to {len(bank) - 1}")
    raise_problems(problems)
    layer_banks = [Bank(members, Module("")) for members in layers]
    expert_banks = [Bank(members, Module("")) for members in banks]
    _assign_routers(layer_banks, expert_banks, routers, problems)
    raise_problems(problems)
    before, after = _split_wide_blocks(wide, layers, problems)
    narrow = _narrow_width(layers, shapes, problems)
    raise_problems(problems)
    shrink, grow = _directions(expert_banks, width, narrow, shapes, problems)
    raise_problems(problems)
    positions = shapes[outer.tensors["positions", "weight"]][0]
    return MoepStructure(outer, before, after, shrink, grow, layer_banks, vocabulary, positions, width, narrow)


def raise_problems(problems: Sequence[str]) -> None:
    """One error with all problems, if there are any."""
    if problems:
        raise BraidError(f"this is not a MoEP checkpoint that Braid can read:{bullet_list(problems)}")


def _modules(shapes: Shapes, problems: list[str]) -> dict[str, Module]:
    """Modules with their tensors; a tensor of an unknown name, and two for the same part, are a problem."""
    modules: dict[str, Module] = {}
    for name, shape in shapes.items():
        tensor = read_name(name)
        if tensor is None:
            problems.append(f"{name} {list(shape)} has a name that no part of MoEP has")
            continue
        module = modules.setdefault(tensor.container, Module(tensor.container))
        key = (tensor.part if tensor.number is None else f"{tensor.part} {tensor.number}", tensor.kind)
        if key in module.tensors:
            problems.append(f"{module.tensors[key]} and {name} both look like the same {' '.join(key)}")
        module.tensors[key] = name
    return modules


def _lists(modules: dict[str, Module]) -> dict[str, list[Module]]:
    """Modules grouped by the list that they are in, each list in its order."""
    lists: dict[str, list[Module]] = defaultdict(list)
    for name in sorted(modules, key=lambda name: (list_of(name), number_of(name))):
        lists[list_of(name)].append(modules[name])
    return lists


def _layers(blocks: dict[str, Module], problems: list[str]) -> tuple[list[list[Module]], list[Module]]:
    """The blocks of each parallel layer, which is a list inside a numbered module, and the other blocks."""
    layers: list[list[Module]] = []
    wide: list[list[Module]] = []
    for name, members in _lists(blocks).items():
        inside = any(character.isdigit() for character in name)
        (layers if inside and members[0].name != name else wide).append(members)
    layers.sort(key=lambda members: number_of(list_of(members[0].name)))
    if not layers:
        problems.append("there are no parallel blocks (such as layers.0.blocks.0.ln_1.weight)")
    paths = max(map(len, layers), default=0)
    names = [list_of(members[0].name) for members in layers]
    for name, members in zip(names, layers, strict=True):
        numbers = [number_of(block.name) for block in members]
        if numbers != list(range(paths)):
            problems.append(f"{name} has the blocks {numbers}, expected 0 to {paths - 1} as in other layers")
    numbers = [number_of(name) for name in names]
    if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        problems.append(f"the parallel layers have the numbers {numbers}: one is missing, or there is one twice")
    return layers, [block for members in wide for block in members]


def _split_wide_blocks(
    wide: list[Module], layers: list[list[Module]], problems: list[str]
) -> tuple[list[Module], list[Module]]:
    """The blocks before the parallel layers and those after them: by words in their names, else by numbers."""
    numbers = [number_of(list_of(members[0].name)) for members in layers]
    top_level = list_of(layers[0][0].name).split(".")[0]
    before, after, unclear = [], [], []
    for block in wide:
        words = set(block.name.replace(".", "_").lower().split("_"))
        number = number_of(block.name)
        same_list = block.name.split(".")[0] == top_level and number >= 0
        if (words & FIRST and not words & LAST) or (same_list and number < min(numbers)):
            before.append(block)
        elif (words & LAST and not words & FIRST) or (same_list and number > max(numbers)):
            after.append(block)
        else:
            unclear.append(block)
    if len(unclear) == 2 and not before and not after and list_of(unclear[0].name) == list_of(unclear[1].name):
        return unclear[:1], unclear[1:]
    if unclear or not wide:
        names = ", ".join(block.name for block in unclear) or "there are none"
        problems.append(f"which blocks of the full width stand before the parallel ones is not clear: {names}")
    return before, after


def _narrow_width(layers: list[list[Module]], shapes: Shapes, problems: list[str]) -> int:
    """The width of the narrowed stream, which the first norm of the first parallel block shows."""
    block = layers[0][0]
    name = block.tensors.get(("norm 1", "weight"))
    if name is None or len(shapes[name]) != 1:
        problems.append(f"missing the weight of norm 1 of {block.name}, a vector that shows the width inside")
        return 0
    return shapes[name][0]


def _assign_routers(layers: list[Bank], experts: list[Bank], routers: dict[str, Module], problems: list[str]) -> None:
    """Give each bank the router that shares its name; the remaining routers go to the layers in their order."""
    remaining = dict(routers)
    without: list[Bank] = []
    for bank in (*experts, *layers):
        list_name = list_of(bank.members[0].name)
        names = {bare_name(list_name), bare_name(list_name.rpartition(".")[0])} - {""}
        candidates = [name for name in remaining if bare_name(name) in names]
        if len(candidates) > 1:
            problems.append(f"{' and '.join(candidates)} both look like the router of {list_name}")
        if candidates:
            bank.router = remaining.pop(candidates[0])
        else:
            without.append(bank)
    if without and len(without) == len(remaining) == len(layers):  # routers.0, routers.1, ... beside the layers
        for bank, name in zip(layers, sorted(remaining, key=number_of), strict=True):
            bank.router = remaining.pop(name)
        return
    problems += [f"missing the router of {list_of(bank.members[0].name)}" for bank in without]
    problems += [f"{name} is the router of nothing that is there" for name in remaining]


def _directions(banks: list[Bank], width: int, narrow: int, shapes: Shapes, problems: list[str]) -> tuple[Bank, Bank]:
    """The bank that shrinks and the one that grows: by their routers' inputs, or by name if the widths are equal."""
    if width != narrow:
        inputs = [_router_inputs(bank, shapes) for bank in banks]
        for one, other in ((0, 1), (1, 0)):
            if width in inputs[one] and narrow in inputs[other]:
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


def _router_inputs(bank: Bank, shapes: Shapes) -> set[int]:
    """The possible input sizes of a bank's router: the side of its matrix that is not the number of choices."""
    sides = list(shapes[bank.router.tensors["router", "weight"]]) if bank.router.has("router") else []
    choices = len(bank.members)
    return {side for at, side in enumerate(sides) if len(sides) == 2 and sides[1 - at] == choices}


def _any_bias(members: Iterable[Module], parts: Iterable[str]) -> bool:
    return any(member.has(part, "bias") for member in members for part in parts)
