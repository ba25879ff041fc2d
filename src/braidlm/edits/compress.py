"""The edits `factorize`, `quantize` and `sparsify`: matrices with fewer parameters, bits or nonzero weights.

`factorize` makes matrices products of two narrow ones, by their largest singular values; `quantize` makes weights whole
numbers by torchao's affine scheme; `sparsify` sets the smallest weights to zero (magnitude pruning).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from braidlm.core import console
from braidlm.core.devices import weights_bytes
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost
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
from braidlm.model.compression import FactorisedLinear
from braidlm.model.config.ranges import Count, Probability, Rate, Size
from braidlm.opening.braid import OpenedBraid


@dataclass(frozen=True)
class Factors:
    """A matrix as a product, and the share of its energy (the sum of its squares) that the product has."""

    down: Tensor
    up: Tensor
    energy: float

    @property
    def rank(self) -> int:
        return self.down.shape[-2]


@edits.register("factorize")
@dataclass(frozen=True)
class Factorize(Edit):
    """Which matrices become products, and of which rank."""

    about: ClassVar[str] = "make matrices products of two narrow ones, with fewer parameters and FLOPs"

    energy: Probability | None = None
    """The share of a matrix's energy, the sum of its squares, that is kept at least; it decides each rank."""
    rank: Size | None = None
    """Instead of an energy: the rank of every matrix."""
    modules: tuple[str, ...] = ("stages.*",)
    """Addresses of linear layers or patterns of them: stages.*.feed.* takes those of feed-forward parts."""
    text: str | None = None
    """Held-out text, a file, folder or packed data: its bits per byte before and after are shown."""
    tokens: Count = 100_000
    """How many tokens of the text are read."""

    def __post_init__(self) -> None:
        if (self.energy is None) == (self.rank is None):
            raise BraidError("give either the energy to keep or a rank", todo="`--energy 0.9` or `--rank 64`")

    def plan(self, source: OpenedBraid) -> EditPlan:
        measure = measure_beside(source, self.text, self.tokens)
        built = source.info.model.model  # a matrix that an earlier edit made a product of two stays one
        matrices = [
            matrix
            for matrix in matrices_of(source, self.modules)
            if not isinstance(built.get_submodule(matrix.address.rpartition(".")[0]), FactorisedLinear)
        ]
        once = shared_once(matrices)
        factors: dict[str, Factors] = {}
        with console.progress("singular values", len(once), "matrices") as advance:
            for done, matrix in enumerate(once, start=1):
                own = factorised(matrix.rows(source.read(matrix.tensor)), self.energy, self.rank)
                if own.rank * (matrix.inputs + matrix.outputs) < matrix.inputs * matrix.outputs:
                    factors[matrix.tensor] = own
                advance(done, "")
        if not factors:
            raise BraidError(
                "no matrix has fewer parameters as a product of two",
                source.title,
                "Keep less energy, or choose a lower rank.",
            )
        ranks = {m.address: factors[m.tensor].rank for m in matrices if m.tensor in factors}
        config = compressed_config(source, {"low_rank": {"ranks": ranks}})
        model, account = planned(config)
        details = []
        for matrix in (one for one in once if one.tensor in factors):
            own = factors[matrix.tensor]
            account.origins[f"{matrix.layer}.down.weight"] = _half(matrix, own.down, "the factor that reads")
            account.origins[f"{matrix.layer}.up.weight"] = _half(matrix, own.up, "the factor that writes")
            if (bias := f"{matrix.layer}.up.bias") in account.origins:
                account.origins[bias] = from_source(f"{matrix.layer}.bias")
            shape = f"{f'{matrix.members} of ' if matrix.members else ''}{matrix.inputs} x {matrix.outputs}"
            details.append(f"  {matrix.address}: {shape}, rank {own.rank}, {own.energy:.1%} of the energy")
        notes = notes_of(source)
        if whole := len(once) - len(factors):
            notes.append(f"{whole} matrices stay: as products they would have more parameters")
        before, after = (model_cost(one).parameters for one in (source.info.model, model))
        title = f"Factorize {source.title}: {len(factors)} matrices become products, {staying(before, after)}"
        return EditPlan(title, model, account, notes, details, measure=measure)


def factorised(rows: Tensor, energy: float | None, rank: int | None) -> Factors:
    """Matrices [..., outputs, inputs] as up @ down of the smallest rank with this energy, or of a given one.

    The members of a bank have one rank, which suffices for each of them. The factors are of equal norm.
    """
    left, values, right = torch.linalg.svd(rows, full_matrices=False)
    squares = values.double().square()
    total = squares.sum(-1, keepdim=True)
    share = torch.where(total > 0, squares.cumsum(-1) / total, 1.0)  # any rank is enough for zeros
    if energy is not None:
        rank = int((share < energy).sum(-1).max().item()) + 1
    assert rank is not None
    rank = min(rank, values.shape[-1])
    roots = values[..., :rank].sqrt()
    up, down = left[..., :rank] * roots[..., None, :], right[..., :rank, :] * roots[..., None]
    return Factors(down, up, share[..., rank - 1].min().item())


def _half(matrix: Matrix, tensor: Tensor, text: str) -> Derived:
    """One of the two factors, which the plan has computed."""
    return from_source(matrix.tensor, Transform(lambda _: matrix.rows(tensor), text))


Scheme = Literal["int8", "int8_dynamic", "int4"]


@dataclass(frozen=True)
class Codes:
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
        model, account = planned(config)
        once = shared_once((*small, *eight))
        for matrix in once:
            account.origins |= _derived(matrix, self.group if matrix in small else None)
        before, after = weights_bytes(source.info.model), weights_bytes(model)
        notes = notes_of(source)
        if self.embedding and not ends:
            embedding, head = (getattr(source.info.architecture, end).kind for end in ("embedding", "head"))
            notes.append(
                f"`embedding` quantises nothing here: the embedding is `{embedding}` and the head `{head}`, and only "
                "`tokens` with `linear` can be quantised"
            )
        if self.scheme == "int4" and (wide := len(matrices) - len(small)):
            notes.append(f"{wide} matrices have 8 bits: {self.group} does not divide their inputs")
        stay = staying(before, after, "bytes of weights")
        title = f"Quantize {source.title} to {self.scheme}: {len(once)} matrices, {stay}"
        return EditPlan(title, model, account, notes, measure=measure)


def _derived(matrix: Matrix, group: int | None) -> dict[str, Derived]:
    """The tensors of a quantised layer but for its bias."""

    def compute(part: str, tensor: Tensor) -> Tensor:
        rows = matrix.rows(tensor)
        codes = codes_of_8_bits(rows) if group is None else codes_of_4_bits(rows, group)
        return getattr(codes, part)  # type: ignore[no-any-return]

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


PATTERN = (2, 4)
"""How many of how many inputs in a row keep their weights, in the pattern that GPUs multiply faster."""


@edits.register("sparsify")
@dataclass(frozen=True)
class Sparsify(Edit):
    """Which weights become zero."""

    about: ClassVar[str] = "set the smallest weights of each matrix to zero (magnitude pruning)"

    share: Rate | None = None
    """The share of each matrix's weights that becomes zero, wherever they are."""
    pattern: Literal["2:4"] | None = None
    """Instead of a share: of every 4 inputs in a row of an output, the 2 largest weights stay."""
    modules: tuple[str, ...] = ("stages.*",)
    """Addresses of linear layers or patterns of them: stages.*.feed.* takes those of feed-forward parts."""
    text: str | None = None
    """Held-out text, a file, folder or packed data: its bits per byte before and after are shown."""
    tokens: Count = 100_000
    """How many tokens of the text are read."""

    def __post_init__(self) -> None:
        if (self.share is None) == (self.pattern is None):
            raise BraidError("give either a share of the weights or a pattern", todo="`--share 0.5` or `--pattern 2:4`")

    def plan(self, source: OpenedBraid) -> EditPlan:
        measure = measure_beside(source, self.text, self.tokens)
        matrices = shared_once(matrices_of(source, self.modules))
        chosen = [m for m in matrices if self.pattern is None or m.inputs % PATTERN[1] == 0]
        if not chosen:
            raise BraidError(f"no matrix has a number of inputs that is a multiple of {PATTERN[1]}", source.title)

        def compute(matrix: Matrix, tensor: Tensor) -> Tensor:
            rows = matrix.rows(tensor)
            return matrix.rows(two_of_four(rows) if self.share is None else without_smallest(rows, self.share))

        text = "2 of 4 inputs stay" if self.share is None else f"the smallest {self.share:.1%} become zero"
        model, account = planned(source.config)
        account.origins |= {m.tensor: from_source(m.tensor, Transform(partial(compute, m), text)) for m in chosen}
        total = source.info.parameters
        zeros = round(sum(m.size for m in chosen) * (1 - PATTERN[0] / PATTERN[1] if self.share is None else self.share))
        notes = notes_of(source)
        if len(chosen) < len(matrices):
            notes.append(f"{len(matrices) - len(chosen)} matrices stay: {PATTERN[1]} does not divide their inputs")
        title = (
            f"Sparsify {source.title}: {len(chosen)} matrices, about {zeros:,} of {total:,} parameters "
            f"become zero ({zeros / total:.1%})"
        )
        return EditPlan(title, model, account, notes, measure=measure)


def without_smallest(rows: Tensor, share: float) -> Tensor:
    """Matrices [..., outputs, inputs], of each of which this share, the smallest in size, is zero."""
    flat = rows.flatten(-2)
    smallest = flat.abs().topk(math.floor(share * flat.shape[-1]), dim=-1, largest=False).indices
    return flat.scatter(-1, smallest, 0.0).unflatten(-1, rows.shape[-2:])


def two_of_four(rows: Tensor) -> Tensor:
    """Matrices [..., outputs, inputs] with two zeros, the smaller weights, in every four inputs in a row."""
    kept, of = PATTERN
    groups = rows.unflatten(-1, (-1, of))
    return groups.scatter(-1, groups.abs().topk(of - kept, dim=-1, largest=False).indices, 0.0).flatten(-2)
