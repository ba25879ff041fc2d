"""`braid edit quantize`: weights as whole numbers of 8 or 4 bits, by torchao's affine scheme."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from braidlm.core.devices import weights_bytes
from braidlm.core.errors import BraidError
from braidlm.edits.account import Derived, Transform, from_source, planned, staying
from braidlm.edits.edit import Edit, EditPlan, edits
from braidlm.edits.matrices import (
    Matrix,
    compressed_config,
    ends_of,
    matrices_of,
    measure_beside,
    notes_of,
    shared_once,
)
from braidlm.model.config.ranges import Count, Size
from braidlm.opening.braid import OpenedBraid

Scheme = Literal["int8", "int8_dynamic", "int4"]


class Codes(NamedTuple):
    """Matrices [..., outputs, inputs] as whole numbers: a weight is (code - zero) * scale."""

    weight: Tensor
    scale: Tensor
    """[..., outputs, groups]"""
    zero: Tensor | None = None


@edits.register("quantize")
@dataclass(frozen=True)
class Quantize(Edit):
    """Which weights become whole numbers, and of how many bits."""

    about: ClassVar[str] = "store weights as whole numbers of 8 or 4 bits; the model cannot be trained afterwards"

    scheme: Scheme = "int8"
    """int8: weights of 8 bits, a factor for each output. int8_dynamic: the inputs of each product are rounded to 8 bits
    too. int4: weights of 4 bits, a factor and a zero for each group of inputs; embedding and head keep 8 bits."""
    group: Size = 32
    """With int4, how many inputs form a group; a matrix whose inputs it does not divide gets 8 bits."""
    embedding: bool = True
    """Whether embedding and head are quantised too, of which a small model largely consists."""
    modules: tuple[str, ...] = ("stages.*",)
    """Addresses of linear layers or patterns of them: stages.*.feed.* takes those of feed-forward parts."""
    text: str | None = None
    """Held-out text, a file, folder or packed data: its bits per byte before and after are shown."""
    tokens: Count = 100_000
    """How many tokens of the text are read."""

    def __post_init__(self) -> None:
        if self.group % 2:
            raise BraidError(f"group must be even, two codes of 4 bits are a byte, and it is {self.group}")

    def plan(self, source: OpenedBraid) -> EditPlan:
        measure = measure_beside(source, self.text, self.tokens)
        matrices, ends = matrices_of(source, self.modules), ends_of(source) if self.embedding else []
        small = [m for m in matrices if self.scheme == "int4" and m.inputs % self.group == 0]
        eight = [matrix for matrix in (*matrices, *ends) if matrix not in small]
        forms: dict[str, dict[str, Any]] = {
            "int4": {"modules": [m.address for m in small], "group": self.group},
            "int8": {"modules": [m.address for m in eight], "dynamic": self.scheme == "int8_dynamic"},
        }
        config = compressed_config(source, *({kind: form} for kind, form in forms.items() if form["modules"]))
        derived: dict[str, Derived] = {}
        once = shared_once((*small, *eight))
        for matrix in once:
            derived |= _derived(matrix, self.group if matrix in small else None)
        model, account = planned(config)
        account.origins |= derived
        before, after = weights_bytes(source.info.model), weights_bytes(model)
        notes = notes_of(source)
        if self.embedding and not ends:
            embedding, head = (getattr(source.info.architecture, end).kind for end in ("embedding", "head"))
            are = f"the embedding is `{embedding}` and the head `{head}`"
            only = "only `tokens` with `linear` can be quantised"
            notes.append(f"`embedding` quantises nothing here: {are}, and {only}")
        if self.scheme == "int4" and (wide := len(matrices) - len(small)):
            notes.append(f"{wide} matrices have 8 bits: {self.group} does not divide their inputs")
        stay = staying(before, after, "bytes of weights")
        title = f"Quantize {source.title} to {self.scheme}: {len(once)} matrices, {stay}"
        return EditPlan(title, model, account, notes, measure=measure)


def _derived(matrix: Matrix, group: int | None) -> dict[str, Derived]:
    """The tensors of a quantised layer but for its bias."""

    def compute(part: str, tensor: Tensor) -> Tensor:
        rows = matrix.rows(tensor)
        return getattr(codes_of_8_bits(rows) if group is None else codes_of_4_bits(rows, group), part)

    texts = {"weight": "codes of 8 bits", "scale": "factors of the codes"}
    if group is not None:
        texts |= {"weight": f"codes of 4 bits in groups of {group}", "zero": "zeros of the codes"}
    return {
        f"{matrix.layer}.{part}": from_source(matrix.tensor, Transform(partial(compute, part), text))
        for part, text in texts.items()
    }


def codes_of_8_bits(rows: Tensor) -> Codes:
    """Symmetric codes from -128 to 127, with a factor for each output."""
    scale = (rows.abs().amax(-1, keepdim=True) / 127.5).clamp_min(torch.finfo(rows.dtype).eps)
    return Codes((rows * (1 / scale)).round().clamp(-128, 127).to(torch.int8), scale)


def codes_of_4_bits(rows: Tensor, group: int) -> Codes:
    """Codes from 0 to 15, two in a byte; each group of inputs has a factor and the code that stands for 0."""
    grouped = rows.unflatten(-1, (-1, group))
    low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
    scale = ((high - low) / 15).clamp_min(torch.finfo(rows.dtype).eps)
    zero = (-low / scale).round().clamp(0, 15)
    codes = ((grouped * (1 / scale[..., None])).round() + zero[..., None]).clamp(0, 15).to(torch.uint8).flatten(-2)
    return Codes(codes[..., 0::2] | codes[..., 1::2] << 4, scale, zero.to(torch.uint8))
