"""From the parts of a MoEP checkpoint to the tensors of our model: every one has its place, or the import fails."""

from braidlm.bridges.bridge import Link, listed
from braidlm.bridges.formats.moep.parts import FED, QKV, Bank, Form, Part
from braidlm.core.errors import BraidError


def find_links(form: Form, tied: bool, where: str) -> list[Link]:
    """Which tensor is which of ours; what is missing and what is left over are told together."""
    placing = _Placing(form)
    placing.ends(tied)
    placing.blocks(form.first, "model.stages.0.layers")
    stage = 1 if form.first else 0
    placing.bank(form.shrink, f"model.stages.{stage}.experts")
    for number, layer in enumerate(form.layers):
        placing.layer(layer, f"model.stages.{stage + 1}.layers.{number}")
    placing.bank(form.grow, f"model.stages.{stage + 2}.experts")
    placing.blocks(form.last, f"model.stages.{stage + 3}.layers")
    used = {name for link in placing.links for name in link.foreign}
    parts = [form.ends, *form.blocks]
    for bank in (form.shrink, form.grow, *form.layers):
        parts += [bank.router, *bank.members]
    left = dict.fromkeys(name for part in parts for name in part.tensors.values() if name not in used)
    problems = placing.missing + [f"left over {name} {list(form.layouts.shapes[name])}" for name in left]
    if problems:
        raise BraidError(f"the weights are not those of {form.subject}:{listed(problems)}", where)
    return placing.links


class _Placing:
    """Links as they are found, and what is missing for others."""

    def __init__(self, form: Form):
        self.form, self.links, self.missing = form, list[Link](), list[str]()

    def ends(self, tied: bool) -> None:
        ends = [self.form.ends]
        self._link("model.embedding", ends, ("embedding",), bias=False)
        self._link("model.positions", ends, ("positions",), bias=False)
        self._link("model.norm", ends, ("last norm",), bias=self.form.norm_bias)
        if not tied:
            self._link("head", ends, ("head",), bias=False)

    def blocks(self, blocks: list[Part], ours: str) -> None:
        for number, block in enumerate(blocks):
            self._block([block], f"{ours}.{number}", self.form.width, self.form.hidden, None)

    def layer(self, layer: Bank, ours: str) -> None:
        members = len(layer.members)
        place, stacked = (f"{ours}.stack.0", members) if members > 1 else (f"{ours}.paths.path_1.0", None)
        self._block(layer.members, place, self.form.narrow, layer.hidden, stacked)
        self._router(layer, f"{ours}.join.router.scores", self.form.layers[0])

    def bank(self, bank: Bank, ours: str) -> None:
        members, bias = len(bank.members), bank.has_bias(*FED, "linear")
        if bank.gated:
            self._fed(bank.members, ours, "out", bank.hidden, members, bias)
        else:
            self._link(f"{ours}.out", bank.members, ("linear",), bias, members=members)
        self._router(bank, f"{ours}.router.scores", bank)

    def _block(self, blocks: list[Part], ours: str, width: int, hidden: int, members: int | None) -> None:
        self._link(f"{ours}.attention_norm", blocks, ("norm 1",), self.form.norm_bias, members=members)
        self._link(f"{ours}.feed_norm", blocks, ("norm 2",), self.form.norm_bias, members=members)
        apart = any(blocks[0].has(part) for part in QKV)
        parts, sizes = (QKV, (width,) * 3) if apart else (("qkv",), ())
        self._link(f"{ours}.attention.qkv", blocks, parts, self.form.attention_bias, sizes, members)
        self._link(f"{ours}.attention.out", blocks, ("attention out",), self.form.attention_bias, members=members)
        if self.form.gated:
            self._fed(blocks, f"{ours}.feed", "out", hidden, members, self.form.feed_bias)
            return
        self._link(f"{ours}.feed.up", blocks, ("up",), self.form.feed_bias, members=members)
        self._link(f"{ours}.feed.out", blocks, ("down",), self.form.feed_bias, members=members)

    def _fed(self, parts: list[Part], ours: str, out: str, hidden: int, members: int | None, bias: bool) -> None:
        """Of Swish-gated parts."""
        together = parts[0].has("gate and up")
        read, sizes = (("gate and up",), ()) if together else (("gate", "up"), (hidden, hidden))
        self._link(f"{ours}.gate_up", parts, read, bias, sizes, members)
        self._link(f"{ours}.{out}", parts, ("down",), bias, members=members)

    def _router(self, bank: Bank, ours: str, usual: Bank) -> None:
        self._link(ours, [bank.router], ("router",), usual.router.has("router", "bias"))

    def _link(
        self,
        ours: str,
        owners: list[Part],
        parts: tuple[str, ...],
        bias: bool,
        sizes: tuple[int, ...] = (),
        members: int | None = None,
    ) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            names = [self._name(owner, part, kind) for owner in owners for part in parts]
            if all(names):
                turned = {self.form.layouts.turned.get(name, False) for name in names}
                self.links.append(
                    Link(f"{ours}.{kind}", tuple(names), sizes, kind == "weight" and turned == {True}, members=members)
                )

    def _name(self, owner: Part, part: str, kind: str) -> str:
        name = owner.tensors.get((part, kind), "")
        if not name:
            self.missing.append(f"missing {kind} of {part}{f' in {owner.name}' if owner.name else ''}")
        return name
