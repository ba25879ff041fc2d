"""`braid edit factorize`: matrices as products of two narrow ones, by their largest singular values."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost
from braidlm.edits.account import Derived, Transform, from_source, planned, staying
from braidlm.edits.edit import Edit, EditPlan, edits
from braidlm.edits.matrices import Matrix, compressed_config, matrices_of, measure_beside, notes_of, shared_once
from braidlm.model.compression import FactorisedLinear
from braidlm.model.config.ranges import Count, Probability, Size
from braidlm.opening.braid import OpenedBraid


class Factors(NamedTuple):
    """A matrix as a product, and the share of its energy (the sum of its squares) that the product has."""

    down: Tensor
    up: Tensor
    rank: int
    energy: float


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
        modules = dict(source.info.model.model.named_modules())  # what an earlier edit made a product stays one
        products = {name for name, module in modules.items() if isinstance(module, FactorisedLinear)}
        matrices = [m for m in matrices_of(source, self.modules) if m.address.rpartition(".")[0] not in products]
        once = shared_once(matrices)
        factors: dict[str, Factors] = {}
        with console.progress("singular values", len(once), "matrices") as advance:
            for done, matrix in enumerate(once, start=1):
                own = factorised(matrix.rows(source.read(matrix.tensor)), self.energy, self.rank)
                if own.rank * (matrix.inputs + matrix.outputs) < matrix.inputs * matrix.outputs:
                    factors[matrix.tensor] = own
                advance(done, "")
        if not factors:
            what = "no matrix has fewer parameters as a product of two"
            raise BraidError(what, source.title, "Keep less energy, or choose a lower rank.")
        ranks = {m.address: factors[m.tensor].rank for m in matrices if m.tensor in factors}
        derived: dict[str, Derived] = {}
        details = []
        for matrix in (one for one in once if one.tensor in factors):
            own = factors[matrix.tensor]
            derived[f"{matrix.layer}.down.weight"] = _half(matrix, own.down, "the factor that reads")
            derived[f"{matrix.layer}.up.weight"] = _half(matrix, own.up, "the factor that writes")
            derived[f"{matrix.layer}.up.bias"] = from_source(f"{matrix.layer}.bias")
            shape = f"{f'{matrix.members} of ' if matrix.members else ''}{matrix.inputs} x {matrix.outputs}"
            details.append(f"  {matrix.address}: {shape}, rank {own.rank}, {own.energy:.1%} of the energy")
        model, account = planned(compressed_config(source, {"low_rank": {"ranks": ranks}}))
        account.origins |= {name: origin for name, origin in derived.items() if name in account.origins}
        notes = notes_of(source)
        if whole := len(once) - len(factors):
            notes.append(f"{whole} matrices stay: as products they would have more parameters")
        before, after = (model_cost(one).parameters for one in (source.info.model, model))
        title = f"Factorize {source.title}: {len(factors)} matrices become products, {staying(before, after)}"
        return EditPlan(title, model, account, notes, details, measure=measure)


def factorised(rows: Tensor, energy: float | None, rank: int | None) -> Factors:
    """Matrices [..., outputs, inputs] as up @ down of the smallest rank with this energy, or of a given one. The
    members of a bank have one rank, which suffices for each of them. The factors are of equal norm."""
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
    return Factors(down, up, rank, share[..., rank - 1].min().item())


def _half(matrix: Matrix, tensor: Tensor, text: str) -> Derived:
    """One of the two factors, which the plan has computed."""
    return from_source(matrix.tensor, Transform(lambda _: matrix.rows(tensor), text))
