"""Checks of attention for routed queries against torch's own operations in float64: outputs and gradients.

Run as a script in Triton's interpreter (`TRITON_INTERPRET=1`), or called by tests on a device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from braidlm.kernels.routed.attention import AttendRouted, plain_attend_routed
from braidlm.kernels.routed.attention_tiles import Tile, Tiles

LIMITS = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
"""Of a relative error."""


@dataclass(frozen=True)
class Rows:
    """Where the routed (token, block) pairs stand."""

    source: Tensor
    begins: Tensor
    routed: Tensor

    @property
    def block(self) -> Tensor:
        row = torch.arange(len(self.source), dtype=torch.int32, device=self.source.device)
        return torch.searchsorted(self.begins[:, 0].contiguous(), row, right=True) - 1


def rows_of(routed_NP: Tensor, batch: int, tile: int) -> Rows:
    """Sorted by block, then by token; a block begins at a multiple of `tile`; a spare tile at the end."""
    tokens, blocks = routed_NP.shape
    source, begins, used = [], [], 0
    for block in range(blocks):
        own = routed_NP[:, block].nonzero()[:, 0]
        counts = torch.bincount(own // (tokens // batch), minlength=batch)
        begins.append(used + torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
        room = -(-len(own) // tile) * tile
        source.append(torch.cat([own, own.new_full((room - len(own),), -1)]))
        used += room
    source.append(source[0].new_full((tile,), -1))
    return Rows(torch.cat(source).int(), torch.stack(begins).int(), routed_NP.to(torch.uint8))


def top(batch: int, time: int, blocks: int, k: int, device: str) -> Tensor:
    """Each token's k blocks, at random."""
    scores = torch.rand(batch * time, blocks, device=device)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(k, 1).indices, True)


def tiles(attend: tuple[int, int], query_gradient: tuple[int, int], key_gradient: tuple[int, int]) -> Tiles:
    return Tiles(*(Tile(*shape, warps=4, stages=2) for shape in (attend, query_gradient, key_gradient)))


SMALL = tiles((16, 16), (16, 16), (16, 16))
MIXED = tiles((32, 16), (16, 32), (32, 16))


def close(found: Tensor, wanted: Tensor, limit: float, what: str, floor: float = 1e-30) -> None:
    """`floor`: a norm below which what is wanted counts as nothing."""
    error = ((found.double() - wanted).norm() / wanted.norm().clamp_min(floor)).item()
    assert error <= limit, f"{what}: relative error {error:.2e}"


@contextmanager
def nan_where_unwritten() -> Iterator[None]:
    """New memory is full of NaN, so what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(
    batch: int, time: int, heads: int, dim: int, routed: Tensor, dtype: torch.dtype, what: str,
    window: int | None = None, used: Tiles | None = None, tile: int = 32,
) -> None:  # fmt: skip
    """Output and gradient against the reference; padding comes out as 0, gradients of unasked queries too."""
    rows, blocks = rows_of(routed, batch, tile), routed.shape[1]
    scale = dim**-0.5
    qkv = (2 * torch.randn(batch * time, blocks, 3, heads, dim, device=routed.device)).to(dtype)
    ours, theirs = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    with nan_where_unwritten():
        found = AttendRouted.apply(ours, rows.source, rows.begins, rows.routed, scale, 0.0, None, window, used)
    wanted = plain_attend_routed(theirs, rows.source, rows.begins, scale, window)
    assert found.dtype == dtype
    close(found, wanted, LIMITS[dtype], what)
    padding = rows.source < 0
    assert not found[padding].any(), f"{what}: padding is not 0"

    upstream = torch.randn_like(found)
    upstream[padding] = float("nan")  # nobody may read it
    with nan_where_unwritten():
        (gradient,) = torch.autograd.grad(found, ours, upstream)
    (exact,) = torch.autograd.grad(wanted, theirs, upstream.double().nan_to_num())
    for index, part in enumerate(("queries", "keys", "values")):
        # A query with one key has no gradient.
        floor = exact.norm().item() / 3 + 1e-30
        close(gradient[:, :, index], exact[:, :, index], LIMITS[dtype], f"{what}, gradient of {part}", floor)
    assert not gradient[:, :, 0][~routed].any(), f"{what}: unasked queries have a gradient"


def check_routings(device: str, dtype: torch.dtype) -> None:
    batch, time, blocks, heads, dim = 2, 37, 3, 2, 16
    for k, used in ((1, SMALL), (2, SMALL), (2, MIXED), (3, MIXED)):
        check(batch, time, heads, dim, top(batch, time, blocks, k, device), dtype, f"top {k}", used=used)
    for name, (sequence, block) in {
        "no rows in the first sequence": (slice(0, time), 1),
        "no rows in the last sequence": (slice(time, None), 2),
        "no rows in a block": (slice(None), 1),
        "no rows in the last block": (slice(None), 2),
        "no rows at all": (slice(None), slice(None)),
    }.items():
        routed = top(batch, time, blocks, 2, device)
        routed[sequence, block] = False
        check(batch, time, 1, dim, routed, dtype, name, used=SMALL)


def check_windows_and_sizes(device: str, dtype: torch.dtype) -> None:
    for window, k, used in ((1, 1, SMALL), (5, 1, MIXED), (18, 2, SMALL), (20, 1, MIXED), (100, 1, SMALL)):
        check(2, 37, 1, 16, top(2, 37, 2, k, device), dtype, f"{window=}", window=window, used=used)
    for batch, time, blocks, heads, dim in ((1, 1, 2, 1, 16), (3, 16, 1, 1, 32), (1, 65, 2, 2, 64), (2, 48, 5, 1, 16)):
        routed = top(batch, time, blocks, min(2, blocks), device)
        check(batch, time, heads, dim, routed, dtype, f"{batch} x {time}, {blocks} blocks of {heads} x {dim}")


def attention_with(qkv: Tensor, rows: Rows, batch: int, factors_RHT: Tensor, scale: float) -> Tensor:
    """The reference with given factors for each row, head and key."""
    query, key, value = qkv.unflatten(0, (batch, -1)).unbind(3)
    time = key.shape[1]
    real = rows.source >= 0
    source, block = rows.source[real].long(), rows.block[real]
    sequence, when = source // time, source % time
    score = torch.einsum("rhd,rthd->rht", query[sequence, when, block], key[sequence, :, block]) * scale
    later = torch.arange(time, device=qkv.device) > when[:, None]
    weight = score.masked_fill(later[:, None], float("-inf")).softmax(-1) * factors_RHT[real]
    mixed = torch.einsum("rht,rthd->rhd", weight, value[sequence, :, block]).flatten(1)
    return mixed.new_zeros(len(real), mixed.shape[1]).index_copy(0, real.nonzero()[:, 0], mixed)


def kept_by(seed: Tensor, rows: Rows, batch: int, time: int, heads: int, dropout: float, used: Tiles | None) -> Tensor:
    """What dropout makes of each row, head and key: values that are 1 in a channel of their own show it."""
    dim = 64
    assert time <= dim
    qkv = torch.zeros(batch, time, rows.begins.shape[0], 3, heads, dim, device=seed.device)
    qkv[:, :, :, 2] = torch.eye(dim, device=seed.device)[:time, None, None]
    out = AttendRouted.apply(qkv.flatten(0, 1), rows.source, rows.begins, rows.routed, 1.0, dropout, seed, None, used)
    seen = rows.source[:, None, None] % time + 1  # queries are 0: all keys weigh the same
    return (out.view(-1, heads, dim)[..., :time] * seen).round(decimals=4)


def check_dropout(device: str, dtype: torch.dtype) -> None:
    batch, time, blocks, heads, dim, scale = 2, 37, 2, 2, 16, 0.3
    rows = rows_of(top(batch, time, blocks, 1, device), batch, 32)
    qkv = torch.randn(batch * time, blocks, 3, heads, dim, device=device).to(dtype)
    real = rows.source >= 0
    past = torch.arange(time, device=device) <= rows.source[:, None] % time
    past = (past & real[:, None])[:, None].expand(-1, heads, -1)
    masks = []
    for dropout, seeds in ((0.5, (1, 2**40 + 7)), (0.1, (3,))):
        for number in seeds:
            seed = torch.tensor([number], device=device)
            factors = kept_by(seed, rows, batch, time, heads, dropout, SMALL)
            other = kept_by(seed, rows, batch, time, heads, dropout, MIXED)
            assert torch.equal(factors, other), "the mask depends on the tiles"
            kept = torch.tensor([0.0, 1 / (1 - dropout)], device=device)
            assert torch.isin(factors[past].unique(), kept.round(decimals=4)).all()
            share = (factors[past] == 0).float().mean().item()
            assert abs(share - dropout) < 5 * (dropout * (1 - dropout) / past.sum().item()) ** 0.5, share
            assert not torch.equal(factors[:, 0], factors[:, 1]), "heads drop the same"
            masks.append(factors)
            ours, theirs = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
            found = AttendRouted.apply(ours, rows.source, rows.begins, rows.routed, scale, dropout, seed, None, MIXED)
            seed += 1  # whoever counts steps may go on before the pass backward
            wanted = attention_with(theirs, rows, batch, factors.double(), scale)
            close(found, wanted, 10 * LIMITS[dtype], f"{dropout=}")
            upstream = torch.randn_like(found)
            (gradient,) = torch.autograd.grad(found, ours, upstream)
            (exact,) = torch.autograd.grad(wanted, theirs, upstream.double())
            close(gradient, exact, 10 * LIMITS[dtype], f"{dropout=}, gradient")
    assert not torch.equal(masks[0], masks[1]), "the seed changes nothing"


def check_mean_of_dropout(device: str) -> None:
    """Over many seeds the mean is what comes out without dropout; the errors shrink as those of a mean do."""
    batch, time, blocks, heads, dim, draws = 1, 16, 2, 1, 16, 32
    rows = rows_of(top(batch, time, blocks, 1, device), batch, 16)
    qkv = torch.randn(batch * time, blocks, 3, heads, dim, device=device)
    slot = (rows.source, rows.begins, rows.routed, 0.25)
    wanted = AttendRouted.apply(qkv, *slot, 0.0, None, None, SMALL)
    drawn = [
        AttendRouted.apply(qkv, *slot, 0.5, torch.tensor([seed], device=device), None, SMALL) for seed in range(draws)
    ]
    outcomes = torch.stack(drawn)
    errors = (outcomes - wanted).square().mean()
    of_mean = (outcomes.mean(0) - wanted).square().mean()
    assert 0.5 < of_mean * draws / errors < 2, of_mean * draws / errors


def check_real_size(dtype: torch.dtype) -> None:
    """As in training, with the tiles of the table."""
    torch.manual_seed(0)
    for window in (None, 200):
        routed = top(16, 512, 4, 2, "cuda")
        check(16, 512, 3, 64, routed, dtype, f"16 x 512, {window=}", window=window, tile=128)
    skewed = torch.rand(4 * 700, 4, device="cuda") < torch.tensor([0.97, 0.5, 0.02, 0.0], device="cuda")
    check(4, 700, 3, 64, skewed, dtype, "uneven loads", tile=128)


def check_replay() -> None:
    """Captured as a CUDA graph, forward and backward equal what is launched, for every seed that is put in slot."""
    batch, time, blocks, heads, dim = 4, 200, 4, 3, 64
    rows = rows_of(top(batch, time, blocks, 2, "cuda"), batch, 128)
    qkv = torch.randn(batch * time, blocks, 3, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(len(rows.source), heads * dim, device="cuda", dtype=torch.bfloat16)
    seed = torch.zeros(1, dtype=torch.long, device="cuda")

    def work() -> tuple[Tensor, Tensor]:
        out = AttendRouted.apply(qkv, rows.source, rows.begins, rows.routed, 0.125, 0.1, seed, None)
        return out, torch.autograd.grad(out, qkv, upstream)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # compiles, which a capture must not contain
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    outcomes = []
    for number in (1, 2):
        seed.fill_(number)
        graph.replay()
        for found, wanted in zip(captured, work(), strict=True):
            assert torch.equal(found, wanted)
        outcomes.append(captured[0].clone())
    assert not torch.equal(*outcomes), "the graph has kept its seed"


def check_everything(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_routings(device, dtype)
    check_windows_and_sizes(device, dtype)
    if dtype == torch.float32:
        check_dropout(device, dtype)
        check_mean_of_dropout(device)


if __name__ == "__main__":
    check_everything("cpu", torch.float32)
    print("equal")
