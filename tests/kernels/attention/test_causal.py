"""Attention of routed queries against torch's operations."""

from dataclasses import dataclass

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.attention.causal import AttendRouted, all_queries, plain_attend_routed
from braidlm.kernels.attention.causal_tiles import Tile, Tiles
from braidlm.kernels.attention.split_heads import plain_split_heads
from braidlm.kernels.ops.column_sums import ColumnSums
from tests.kernels.comparison import TOLERANCES, assert_close, captured, nan_in_new_memory
from tests.kernels.rotary_tables import rotary_tables


@dataclass(frozen=True)
class Rows:
    """The sorted rows of routed (token, block) pairs."""

    source: Tensor
    sequence_offsets: Tensor
    routed: Tensor

    @property
    def queries(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.source, self.sequence_offsets, self.routed

    @property
    def block(self) -> Tensor:
        row = torch.arange(len(self.source), dtype=torch.int32, device=self.source.device)
        return torch.searchsorted(self.sequence_offsets[:, 0].contiguous(), row, right=True) - 1


def rows_of(routed_NP: Tensor, batch: int, tile: int) -> Rows:
    """Sorted by block, then by token; a block begins at a multiple of `tile`; a spare tile at the end."""
    tokens, blocks = routed_NP.shape
    source, offsets, used = [], [], 0
    for block in range(blocks):
        own = routed_NP[:, block].nonzero()[:, 0]
        counts = torch.bincount(own // (tokens // batch), minlength=batch)
        offsets.append(used + torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
        padded = -(-len(own) // tile) * tile
        source.append(torch.cat([own, own.new_full((padded - len(own),), -1)]))
        used += padded
    source.append(source[0].new_full((tile,), -1))
    return Rows(torch.cat(source).int(), torch.stack(offsets).int(), routed_NP.to(torch.uint8))


def top_k(batch: int, time: int, blocks: int, k: int, device: str) -> Tensor:
    """Each token's k blocks, at random."""
    scores = torch.rand(batch * time, blocks, device=device)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(k, 1).indices, True)


def tiles(attend: tuple[int, int], query_gradient: tuple[int, int], key_gradient: tuple[int, int]) -> Tiles:
    return Tiles(*(Tile(*shape, warps=4, stages=2) for shape in (attend, query_gradient, key_gradient)))


SMALL = tiles((16, 16), (16, 16), (16, 16))
MIXED = tiles((32, 16), (16, 32), (32, 16))


def check_attention(
    batch: int, time: int, heads: int, dim: int, routed: Tensor, dtype: torch.dtype,
    window: int | None = None, used: Tiles | None = None, tile: int = 32,
) -> None:  # fmt: skip
    """Output and gradient against the reference; padding is 0, and so are gradients of queries that are not routed."""
    rows, blocks, scale = rows_of(routed, batch, tile), routed.shape[1], dim**-0.5
    qkv = (2 * torch.randn(batch * time, blocks, 3, heads, dim, device=routed.device)).to(dtype)
    ours, theirs = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    with nan_in_new_memory():
        actual = AttendRouted.apply(ours, *rows.queries, scale, 0.0, None, window, used)
    expected = plain_attend_routed(theirs, rows.source, rows.sequence_offsets, scale, window)
    assert actual.dtype == dtype
    assert_close(actual, expected, TOLERANCES[dtype], "output")
    padding = rows.source < 0
    assert not actual[padding].any(), "padding is not 0"

    upstream = torch.randn_like(actual)
    upstream[padding] = float("nan")  # it must not be read
    with nan_in_new_memory():
        (gradient,) = torch.autograd.grad(actual, ours, upstream)
    (exact,) = torch.autograd.grad(expected, theirs, upstream.double().nan_to_num())
    floor = exact.norm().item() / 3 + 1e-30  # a query with one key has no gradient
    for index, part in enumerate(("queries", "keys", "values")):
        assert_close(gradient[:, :, index], exact[:, :, index], TOLERANCES[dtype], f"gradient of {part}", floor)
    assert not gradient[:, :, 0][~routed].any(), "queries that are not routed have a gradient"


@pytest.mark.parametrize(("k", "used"), [(1, SMALL), (2, MIXED), (3, MIXED)], ids=["top 1", "top 2", "top 3"])
def test_attention_equals_torch(k: int, used: Tiles, device: str, dtype: torch.dtype) -> None:
    check_attention(2, 37, 2, 16, top_k(2, 37, 3, k, device), dtype, used=used)


@pytest.mark.parametrize(
    ("sequence", "block"),
    [
        (slice(0, 37), 1),
        (slice(37, None), 2),
        (slice(None), 1),
        (slice(None), 2),
        (slice(None), slice(None)),
    ],
    ids=["the first sequence", "the last sequence", "a block", "the last block", "everything"],
)
def test_attention_equals_torch_without_rows_in(
    sequence: slice, block: int | slice, device: str, dtype: torch.dtype
) -> None:
    routed = top_k(2, 37, 3, 2, device)
    routed[sequence, block] = False
    check_attention(2, 37, 1, 16, routed, dtype, used=SMALL)


@pytest.mark.parametrize(
    ("window", "k", "used"), [(1, 1, SMALL), (5, 1, MIXED), (18, 2, SMALL), (20, 1, MIXED), (100, 1, SMALL)]
)
def test_attention_in_a_window_equals_torch(window: int, k: int, used: Tiles, device: str, dtype: torch.dtype) -> None:
    check_attention(2, 37, 1, 16, top_k(2, 37, 2, k, device), dtype, window=window, used=used)


@pytest.mark.parametrize(
    ("batch", "time", "blocks", "heads", "dim"),
    [(1, 1, 2, 1, 16), (3, 16, 1, 1, 32), (1, 65, 2, 2, 64), (2, 48, 5, 1, 16)],
)
def test_attention_of_every_size_equals_torch(
    batch: int, time: int, blocks: int, heads: int, dim: int, device: str, dtype: torch.dtype
) -> None:
    check_attention(batch, time, heads, dim, top_k(batch, time, blocks, min(2, blocks), device), dtype)


def attention_with(qkv: Tensor, rows: Rows, batch: int, factors_RHT: Tensor, scale: float) -> Tensor:
    """The reference with dropout factors for each row, head and key."""
    query, key, value = qkv.unflatten(0, (batch, -1)).unbind(3)
    time = key.shape[1]
    real = rows.source >= 0
    source, block = rows.source[real].long(), rows.block[real]
    sequence, position = source // time, source % time
    score = torch.einsum("rhd,rthd->rht", query[sequence, position, block], key[sequence, :, block]) * scale
    later = torch.arange(time, device=qkv.device) > position[:, None]
    weight = score.masked_fill(later[:, None], float("-inf")).softmax(-1) * factors_RHT[real]
    attended = torch.einsum("rht,rthd->rhd", weight, value[sequence, :, block]).flatten(1)
    return attended.new_zeros(len(real), attended.shape[1]).index_copy(0, real.nonzero()[:, 0], attended)


def dropout_factors(seed: Tensor, rows: Rows, batch: int, time: int, heads: int, dropout: float, used: Tiles) -> Tensor:
    """What dropout multiplies the weight of each row, head and key by: one-hot values show it."""
    dim = 64
    assert time <= dim
    qkv = torch.zeros(batch, time, rows.sequence_offsets.shape[0], 3, heads, dim, device=seed.device)
    qkv[:, :, :, 2] = torch.eye(dim, device=seed.device)[:time, None, None]
    out = AttendRouted.apply(qkv.flatten(0, 1), *rows.queries, 1.0, dropout, seed, None, used)
    visible = rows.source[:, None, None] % time + 1  # queries are 0, so all keys have the same weight
    return (out.view(-1, heads, dim)[..., :time] * visible).round(decimals=4)


@pytest.mark.parametrize(("dropout", "number"), [(0.5, 1), (0.5, 2**40 + 7), (0.1, 3)])
def test_attention_with_dropout_equals_the_reference(dropout: float, number: int, device: str) -> None:
    batch, time, blocks, heads, dim, scale = 1, 37, 2, 2, 16, 0.3
    rows = rows_of(top_k(batch, time, blocks, 1, device), batch, 32)
    qkv = torch.randn(batch * time, blocks, 3, heads, dim, device=device)
    past = torch.arange(time, device=device) <= rows.source[:, None] % time
    past = (past & (rows.source >= 0)[:, None])[:, None].expand(-1, heads, -1)
    seed = torch.tensor([number], device=device)
    factors = dropout_factors(seed, rows, batch, time, heads, dropout, SMALL)
    assert torch.equal(factors, dropout_factors(seed, rows, batch, time, heads, dropout, MIXED)), "tiles matter"
    assert not torch.equal(factors, dropout_factors(seed + 1, rows, batch, time, heads, dropout, SMALL))
    assert torch.isin(
        factors[past].unique(), torch.tensor([0.0, 1 / (1 - dropout)], device=device).round(decimals=4)
    ).all()
    share = (factors[past] == 0).float().mean().item()
    assert abs(share - dropout) < 5 * (dropout * (1 - dropout) / past.sum().item()) ** 0.5, share
    assert not torch.equal(factors[:, 0], factors[:, 1]), "heads drop the same"
    ours, theirs = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    actual = AttendRouted.apply(ours, *rows.queries, scale, dropout, seed, None, MIXED)
    seed += 1  # the seed of the next step may be there before the backward pass
    expected = attention_with(theirs, rows, batch, factors.double(), scale)
    tolerance, upstream = 10 * TOLERANCES[torch.float32], torch.randn_like(actual)
    assert_close(actual, expected, tolerance, "output")
    (gradient,) = torch.autograd.grad(actual, ours, upstream)
    (exact,) = torch.autograd.grad(expected, theirs, upstream.double())
    assert_close(gradient, exact, tolerance, "gradient")


def test_the_mean_over_seeds_is_attention_without_dropout(device: str) -> None:
    """The errors shrink as those of a mean do."""
    batch, time, blocks, heads, dim, draws = 1, 16, 2, 1, 16, 32
    rows = rows_of(top_k(batch, time, blocks, 1, device), batch, 16)
    qkv = torch.randn(batch * time, blocks, 3, heads, dim, device=device)
    expected = AttendRouted.apply(qkv, *rows.queries, 0.25, 0.0, None, None, SMALL)
    seeds = torch.arange(draws, device=device)[:, None]
    drawn = torch.stack([AttendRouted.apply(qkv, *rows.queries, 0.25, 0.5, seed, None, SMALL) for seed in seeds])
    errors, of_mean = (drawn - expected).square().mean(), (drawn.mean(0) - expected).square().mean()
    assert 0.5 < of_mean * draws / errors < 2, of_mean * draws / errors


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 200])
def test_attention_equals_torch_at_real_size(window: int | None) -> None:
    """With the tiles of the table."""
    check_attention(16, 512, 3, 64, top_k(16, 512, 4, 2, "cuda"), torch.bfloat16, window=window, tile=128)


@pytest.mark.gpu
def test_attention_equals_torch_with_uneven_loads() -> None:
    routed = torch.rand(4 * 700, 4, device="cuda") < torch.tensor([0.97, 0.5, 0.02, 0.0], device="cuda")
    check_attention(4, 700, 3, 64, routed, torch.bfloat16, tile=128)


@pytest.mark.gpu
def test_a_replayed_graph_reads_a_new_seed() -> None:
    batch, time, blocks, heads, dim = 4, 200, 4, 3, 64
    rows = rows_of(top_k(batch, time, blocks, 2, "cuda"), batch, 128)
    qkv = torch.randn(batch * time, blocks, 3, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(len(rows.source), heads * dim, device="cuda", dtype=torch.bfloat16)
    seed = torch.zeros(1, dtype=torch.long, device="cuda")

    def work() -> tuple[Tensor, Tensor]:
        out = AttendRouted.apply(qkv, *rows.queries, 0.125, 0.1, seed, None)
        return out, torch.autograd.grad(out, qkv, upstream)[0]

    graph, replayed = captured(work)
    outputs = []
    for number in (1, 2):
        seed.fill_(number)
        graph.replay()
        for ours, theirs in zip(replayed, work(), strict=True):
            assert torch.equal(ours, theirs)
        outputs.append(replayed[0].clone())
    assert not torch.equal(*outputs), "the graph has kept its seed"


@pytest.mark.parametrize("used", [SMALL, MIXED], ids=["small tiles", "mixed tiles"])
@pytest.mark.parametrize("rotation", ["halves", "interleaved", "of each row"])
def test_rotated_attention_equals_torch(rotation: str, used: Tiles, device: str, dtype: torch.dtype) -> None:
    batch, time, heads, dim, interleaved = 3, 37, 3, 16, rotation == "interleaved"
    index = torch.randint(90, (batch * time,), device=device) if rotation == "of each row" else None
    rotary = (*rotary_tables(time if index is None else 90, dim, interleaved, device), index)
    queries, scale = all_queries(batch, time, torch.device(device)), dim**-0.5
    qkv = torch.randn(batch * time, 1, 3, heads, dim, device=device).to(dtype)
    bias = torch.zeros(3 * heads * dim, device=device, requires_grad=True)
    ours, theirs = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    with nan_in_new_memory():
        actual = AttendRouted.apply(
            ours.clone(), *queries, scale, 0.0, None, None, used, bias, ColumnSums(1), None, None, rotary, interleaved
        )
    apart = plain_split_heads(theirs.view(batch, time, 3 * heads, dim), rotary, interleaved, heads)
    rotated = torch.stack([part.transpose(1, 2).flatten(0, 1) for part in apart], 1)[:, None]
    expected = plain_attend_routed(rotated, *queries[:2], scale, None)
    assert_close(actual, expected, TOLERANCES[dtype] * 2, "output")
    upstream = torch.randn_like(actual)
    with nan_in_new_memory():
        gradient, bias_gradient = torch.autograd.grad(actual, [ours, bias], upstream)
    (exact,) = torch.autograd.grad(expected, theirs, upstream.double())
    for part in range(3):
        assert_close(gradient[:, :, part], exact[:, :, part], TOLERANCES[dtype] * 2, f"gradient of part {part}")
    floor = exact.norm().item()  # the bias of keys has no gradient where nothing is rotated, and a small one here
    assert_close(bias_gradient, exact.sum(0).flatten(), TOLERANCES[dtype] * 2, "gradient of the bias", floor)
