"""What the tensors of a MoEP checkpoint are by their names and shapes; names differ between versions of the code."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from braidlm.bridges.checkpoint import Shapes
from braidlm.core.differences import bullet_list
from braidlm.core.errors import BraidError

WRAPPERS = r"^(?:(?:module|_orig_mod|transformer|model|moep|backbone|decoder)\.)+"
"""Prefixes that training and outer classes add to every name."""
ATTENTION = r"(?:(?:self_)?att(?:n|ention)|mha)"
MLP = r"(?:mlp|ffn?|feed_?forward|feed)"
OUTSIDE = r"(?:[A-Za-z_]+\.)*?"
INSIDE = r"(?P<container>.+?)\."
FED = rf"{INSIDE}(?:{MLP}\.)?"
KIND = r"(?P<kind>weight|bias)"
EXPERTS = r"(?:experts?|projections?|projs|linears|ffns|mlps)"
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
    ("gate", rf"{FED}(?:gate_proj|w_?gate|c_gate)\.{KIND}"),
    ("gate", rf"{INSIDE}{MLP}\.gate\.{KIND}"),
    ("gate", rf"(?P<container>(?:.*[._])?{EXPERTS}\.\d+)\.gate\.{KIND}"),
    ("router", rf"(?P<container>.+\.gate)\.{KIND}"),
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
BARE = r"(?:^|(?<=[._]))(?:routers?|gat(?:e|es|ing)|experts?)(?:$|(?=[._]))"
NORMS = ("norm 1", "norm 2", "last norm")
QKV = ("query", "key", "value")
ATTENTION_PARTS = ("qkv", *QKV, "attention out")
FEED = ("gate and up", "gate", "up", "down")
FIRST = {"first", "in", "input", "initial", "pre", "start", "front", "entry", "early"}
LAST = {"last", "out", "output", "final", "post", "end", "back", "exit", "late"}


@dataclass
class Module:
    """A block, an expert, a router, or the outer module with the embeddings, the last norm and the head."""

    name: str
    tensors: dict[tuple[str, str], str] = field(default_factory=dict)
    """Names of tensors by part ("query", "norm 1") and kind (weight or bias)."""

    def has(self, *parts: str) -> bool:
        """Whether the module has the weight of one of these parts."""
        return any((part, "weight") in self.tensors for part in parts)

    @property
    def number(self) -> int:
        """The last number in the name, which is the index in a list; -1 if there is none."""
        return int(["-1", *re.findall(r"\d+", self.name)][-1])

    @property
    def list_name(self) -> str:
        """The name of the list that contains the module: its own name without the number at the end."""
        return re.sub(r"\.\d+$", "", self.name)


@dataclass
class Bank:
    """Modules that a router chooses from: the blocks of a parallel layer, or experts."""

    members: list[Module]
    router: Module = field(default_factory=lambda: Module(""))
    hidden: int = 0
    """Inner size of gated experts, and of blocks' feed-forward parts."""

    @property
    def list_name(self) -> str:
        return self.members[0].list_name

    @property
    def number(self) -> int:
        """The number of the module whose list the bank is, such as a layer's."""
        return Module(self.list_name).number

    @property
    def gated(self) -> bool:
        return any(member.has("gate", "gate and up") for member in self.members)

    @property
    def router_bias(self) -> bool:
        return has_bias([self.router], "router")


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
    hidden: int
    """Inner size of the feed-forward of blocks of the full width."""

    def has_bias(self, *parts: str) -> bool:
        """Whether any block, or the last norm, has a bias in one of these parts."""
        blocks = [block for layer in self.layers for block in layer.members]
        return has_bias([self.outer, *self.before, *self.after, *blocks], *parts)

    @property
    def gated(self) -> bool:
        """Whether feed-forward parts are gated."""
        return self.layers[0].gated

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
            "layers": {layers, layers + len(self.before) + len(self.after)},
            "parallel layers": {layers},
            "blocks of a layer": {paths},
            "experts": {len(self.shrink.members), len(self.grow.members), paths},
            "feed-forward": {self.hidden, self.layers[0].hidden},
        }


def has_bias(modules: Iterable[Module], *parts: str) -> bool:
    """Whether any module has a bias in one of these parts; then every module must have it."""
    return any((part, "bias") in module.tensors for module in modules for part in parts)


def read_structure(shapes: Shapes) -> MoepStructure:
    """The structure that names and shapes show; an error lists the tensors or modules that fit nowhere or twice."""
    modules = _modules(shapes)
    outer = modules.pop("", Module(""))
    ends = {part: outer.tensors.get((part, "weight"), "") for part in ("embedding", "positions")}
    for part, name in ends.items():
        if len(shapes.get(name, ())) != 2:
            raise _refusal(f"there is no matrix that could be the {part} of tokens")
    routers = {name: module for name, module in modules.items() if module.has("router")}
    blocks = [m for m in modules.values() if m.has(*NORMS, *ATTENTION_PARTS) or has_bias([m], *NORMS, *ATTENTION_PARTS)]
    experts = [m for name, m in modules.items() if name not in routers and m not in blocks]
    layers, wide = _layers(blocks)
    banks = [Bank(members) for members in _lists(experts)]
    if len(banks) != 2:
        names = ", ".join(f"{bank.list_name} ({len(bank.members)})" for bank in banks) or "none"
        raise _refusal(f"MoEP has two banks of projection experts, to shrink and to grow; found {names}")
    _check_numbers("experts", banks)
    _assign_routers(layers, banks, routers)
    before, after = _split_wide_blocks(wide, layers)
    (vocabulary, width), (positions, _) = (shapes[name] for name in ends.values())
    norm = layers[0].members[0].tensors.get(("norm 1", "weight"), "")
    if len(shapes.get(norm, ())) != 1:
        name = layers[0].members[0].name
        raise _refusal(f"missing the weight of norm 1 of {name}, a vector that shows the width inside")
    (narrow,) = shapes[norm]
    shrink, grow = _directions(banks, width, narrow, shapes)
    for bank in (shrink, grow, *layers):
        bank.hidden = _inner_size(bank.members, width if bank is shrink else narrow, shapes)
    hidden = _inner_size(wide, width, shapes)
    return MoepStructure(outer, before, after, shrink, grow, layers, vocabulary, positions, width, narrow, hidden)


def _refusal(*problems: str) -> BraidError:
    return BraidError(f"this is not a MoEP checkpoint that Braid can read:{bullet_list(problems)}")


def _modules(shapes: Shapes) -> dict[str, Module]:
    """Modules with their tensors; a tensor of an unknown name, and two for the same part, are a problem."""
    modules: dict[str, Module] = {}
    problems = []
    for name, shape in shapes.items():
        bare = re.sub(WRAPPERS, "", name)
        matches = ((part, match) for part, pattern in PATTERNS if (match := re.fullmatch(pattern, bare)))
        part, match = next(matches, ("", None))
        if match is None:
            problems.append(f"{name} {list(shape)} has a name that no part of MoEP has")
            continue
        groups = match.groupdict()
        key = (f"{part} {groups['number']}" if "number" in groups else part, groups["kind"])
        container = groups.get("container") or ""
        module = modules.setdefault(container, Module(container))
        if key in module.tensors:
            problems.append(f"{module.tensors[key]} and {name} both look like the same {' '.join(key)}")
        module.tensors[key] = name
    if problems:
        raise _refusal(*problems)
    return modules


def _lists(modules: Iterable[Module]) -> list[list[Module]]:
    """Modules grouped by the list that they are in, each list in its order."""
    lists: dict[str, list[Module]] = defaultdict(list)
    for module in sorted(modules, key=lambda one: (one.list_name, one.number)):
        lists[module.list_name].append(module)
    return list(lists.values())


def _check_numbers(what: str, banks: Sequence[Bank]) -> None:
    """Refuse a bank whose members are not numbered from 0; the layers must have equally many blocks."""
    problems = []
    for bank in banks:
        numbers = [member.number for member in bank.members]
        count = max(len(one.members) for one in banks) if what == "blocks" else len(numbers)
        if numbers != list(range(count)):
            problems.append(f"{bank.list_name} has the {what} {numbers}, expected 0 to {count - 1}")
    if problems:
        raise _refusal(*problems)


def _layers(blocks: Iterable[Module]) -> tuple[list[Bank], list[Module]]:
    """The parallel layers, each of which is a list of blocks inside a numbered module, and the other blocks."""
    layers: list[Bank] = []
    wide: list[Module] = []
    for members in _lists(blocks):
        name = members[0].list_name
        if re.search(r"\d", name) and members[0].name != name:
            layers.append(Bank(members))
        else:
            wide += members
    layers.sort(key=lambda layer: layer.number)
    if not layers:
        raise _refusal("there are no parallel blocks (such as layers.0.blocks.0.ln_1.weight)")
    _check_numbers("blocks", layers)
    numbers = [layer.number for layer in layers]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise _refusal(f"the parallel layers have the numbers {numbers}: one is missing, or there is one twice")
    return layers, wide


def _split_wide_blocks(wide: list[Module], layers: list[Bank]) -> tuple[list[Module], list[Module]]:
    """The blocks before the parallel layers and those after them: by words in their names, else by numbers."""
    top_level = layers[0].list_name.split(".")[0]
    before, after, unclear = [], [], []
    for block in wide:
        words = set(block.name.replace(".", "_").lower().split("_"))
        number = block.number if block.name.split(".")[0] == top_level else -1
        if (words & FIRST and not words & LAST) or 0 <= number < layers[0].number:
            before.append(block)
        elif (words & LAST and not words & FIRST) or number > layers[-1].number:
            after.append(block)
        else:
            unclear.append(block)
    if len(unclear) == 2 and unclear == wide and unclear[0].list_name == unclear[1].list_name:
        return unclear[:1], unclear[1:]
    if unclear or not wide:
        names = ", ".join(block.name for block in unclear) or "there are none"
        raise _refusal(f"which blocks of the full width stand before the parallel ones is not clear: {names}")
    return before, after


def _assign_routers(layers: list[Bank], experts: list[Bank], routers: dict[str, Module]) -> None:
    """Give each bank the router that shares its name; the remaining routers go to the layers in their order."""

    def bare(name: str) -> str:
        """The name that a router and its bank share: `shrink` for `shrink.experts`, `router_shrink` and the like."""
        return "_".join(word for word in re.split(r"[._]+", re.sub(BARE, "", name)) if word)

    remaining, without, problems = dict(routers), [], []
    for bank in (*experts, *layers):
        names = {bare(bank.list_name), bare(bank.list_name.rpartition(".")[0])} - {""}
        candidates = [name for name in remaining if bare(name) in names]
        if len(candidates) > 1:
            problems.append(f"{' and '.join(candidates)} both look like the router of {bank.list_name}")
        if candidates:
            bank.router = remaining.pop(candidates[0])
        else:
            without.append(bank)
    if without and len(without) == len(remaining) == len(layers):  # routers.0, routers.1, ... beside the layers
        for bank, router in zip(layers, sorted(remaining.values(), key=lambda one: one.number), strict=True):
            bank.router = router
        without, remaining = [], {}
    problems += [f"missing the router of {bank.list_name}" for bank in without]
    problems += [f"{name} is the router of nothing that is there" for name in remaining]
    if problems:
        raise _refusal(*problems)


def _directions(banks: list[Bank], width: int, narrow: int, shapes: Shapes) -> tuple[Bank, Bank]:
    """The bank that shrinks and the one that grows, by their routers' inputs."""
    if width == narrow:
        raise _refusal(f"the parallel blocks are as wide as the others, {width} channels")
    names = [bank.router.tensors["router", "weight"] for bank in banks]
    for first, second in ((0, 1), (1, 0)):
        if width in shapes[names[first]] and narrow in shapes[names[second]]:
            return banks[first], banks[second]
    expected = f"routers of experts read {width} and {narrow} channels"
    raise _refusal(*(f"{name} is {list(shapes[name])}; {expected}" for name in names))


def _inner_size(modules: list[Module], inputs: int, shapes: Shapes) -> int:
    """The inner size of feed-forward parts, whose numbered matrices get names; 0 where all first matrices are missing,
    and for experts of one matrix."""
    sizes = []
    for module in modules:
        _name_numbered(module, shapes)
        first = next((part for part in ("gate", "up", "gate and up") if module.has(part)), None)
        if first is not None:
            name = module.tensors[first, "weight"]
            sides = list(shapes[name])
            if len(sides) != 2 or inputs not in sides:
                raise _refusal(f"{name} is {sides}: no side of it is {inputs}")
            sides.remove(inputs)
            sizes.append(sides[0] // (2 if first == "gate and up" else 1))
    return sizes[0] if sizes else 0


def _name_numbered(module: Module, shapes: Shapes) -> None:
    """Name numbered matrices: of two the first is up; of three the odd shape is down, and the gate is first."""
    numbered = sorted(part for part, kind in module.tensors if part.startswith("numbered") and kind == "weight")
    names = [module.tensors[part, "weight"] for part in numbered]
    sizes, parts = [shapes[name] for name in names], {}
    down = [part for part, size in zip(numbered, sizes, strict=True) if sizes.count(size) == 1]
    if len(numbered) == 2:
        parts = dict(zip(numbered, ("up", "down"), strict=True))
    elif len(numbered) == 3 and len(down) == 1:
        gate, up = (part for part in numbered if part not in down)
        parts = {gate: "gate", up: "up", down[0]: "down"}
    elif numbered:
        raise _refusal(f"which of these is gate, up and down, neither names nor shapes tell: {', '.join(names)}")
    module.tensors = {(parts.get(part, part), kind): name for (part, kind), name in module.tensors.items()}
