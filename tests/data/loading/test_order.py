"""Orders of documents: scores, pacings, the record in the run's folder, and positions that can be resumed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch
from braidlm.data.loading.chunking import Consecutive, Contiguous, Windows
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.order import OrderedStream, order_documents, order_streams, orders, pacings, record_orders
from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.packing.packed_data import PackedData
from braidlm.data.packing.prepare import prepare
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import decode, encode
from tests.data.packed_sets import pack

DOCUMENTS = 60


def parts_of(stream: TokenStream) -> list[TokenStream]:
    return [stream.part(number, 0) for number in range(stream.parts)]


def documents(base: int = 1) -> list[list[int]]:
    """Of 3 to 32 tokens in no order; a token tells where it stands."""
    sizes = [3 + (7 * number) % 30 for number in range(DOCUMENTS)]
    starts = np.cumsum([base, *sizes])
    return [list(range(start, start + size)) for start, size in zip(starts[:-1], sizes, strict=True)]


DATA = pack(documents(), name="toy")
LENGTHS = np.diff(DATA.document_starts)


def choice(kind: str = "length", pacing: Any = "sorted", **options: Any) -> Choice:
    data = {"sets": {"a": {"source": "stories"}}, "order": {"kind": kind, "pacing": pacing, **options}}
    return decode(DataConfig, data).order


def ordered(*args: Any, data: PackedData = DATA, subset: Subset | None = None, **options: Any) -> OrderedStream:
    (stream,) = order_streams([TokenStream(data, subset)], choice(*args, **options), seed=3)
    assert isinstance(stream, OrderedStream)
    return stream


def document_of(tokens: np.ndarray) -> np.ndarray:
    """The document that each token is of."""
    return np.searchsorted(np.asarray(DATA.document_starts), tokens - 1, side="right") - 1


def loader(stream: TokenStream, chunking: Any = None, **changes: Any) -> Loader:
    return Loader([stream], chunking or Contiguous(), **{"length": 8, "rows": 3, "seed": 1, **changes})


def test_by_length_every_document_comes_once_and_never_a_longer_one_first() -> None:
    order = ordered().order
    assert sorted(order.documents) == list(range(DOCUMENTS))
    assert (np.diff(LENGTHS[order.documents]) >= 0).all()
    assert np.array_equal(order.scores, LENGTHS[order.documents])
    descending = ordered(descending=True).order
    assert (np.diff(LENGTHS[descending.documents]) <= 0).all()


def test_equal_scores_are_ordered_by_chance_which_the_seed_fixes() -> None:
    equal = TokenStream(pack([[n, n + 1] for n in range(1, 80, 2)]))
    length = orders.build(choice())
    first, again, other = (order_documents(length, equal, seed).documents for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, np.arange(40))


def test_only_the_documents_of_a_subset_are_ordered() -> None:
    stream = ordered(subset=Subset(0.25, 0.75))
    assert sorted(stream.order.documents) == Subset(0.25, 0.75).choose(DOCUMENTS).tolist()
    assert sum(map(len, parts_of(stream))) == len(stream)


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=9), min_size=1, max_size=20), st.integers(1, 7))
@settings(max_examples=50)
def test_surprisal_is_the_mean_of_the_tokens_of_a_document(texts: list[list[int]], block: int) -> None:
    stream = TokenStream(pack(texts))
    flat = [token for text in texts for token in text]
    bits = {token: -np.log2(flat.count(token) / len(flat)) for token in flat}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("braidlm.data.loading.order._TOKENS_PER_BLOCK", block)
        found = orders.build(choice("surprisal")).scores(stream)
    assert found == pytest.approx([np.mean([bits[token] for token in text]) for text in texts])


def test_held_out_documents_do_not_count_as_frequent() -> None:
    stream = TokenStream(pack([[1, 1], [1, 2], [2, 2], [3, 3]] * 5), Subset(0, 0.5))
    chosen = [[[1, 1], [1, 2], [2, 2], [3, 3]][n % 4] for n in stream.chosen]
    flat = [token for text in chosen for token in text]
    expected = [np.mean([-np.log2(flat.count(t) / len(flat)) for t in text]) for text in chosen]
    assert orders.build(choice("surprisal")).scores(stream) == pytest.approx(expected)


def rows(numbers: Sequence[Any], key: str = "difficulty") -> str:
    return "".join(
        json.dumps({"text": f"word {'abc'[n % 3]} end" if n != 2 else " ", key: value}) + "\n"
        for n, value in enumerate(numbers)
    )


def test_a_field_of_jsonl_gives_the_order(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text(rows([5, 1.5, 0, -3, "2"]))  # the third has no word and is not packed
    data = prepare(tmp_path / "some.jsonl", tmp_path / "packed", tokenizer="bytes", workers=1)
    order = order_documents(orders.build(choice("field", name="difficulty")), TokenStream(data), 1)
    assert order.scores.tolist() == [-3, 1.5, 2, 5]
    assert order.documents.tolist() == [2, 1, 3, 0]


@pytest.mark.parametrize(
    ("numbers", "name", "problem"),
    [
        ([1, "hard", 2, 3], "difficulty", "the field 'difficulty' is not a number but 'hard'"),
        ([1, None, 2, 3], "difficulty", "the field 'difficulty' is not a number but ''"),
        ([1, 2, 3, 4], "hardness", "there is no field 'hardness'"),
    ],
)
def test_wrong_fields(numbers: list[Any], name: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text(rows(numbers))
    data = prepare(tmp_path / "some.jsonl", tmp_path / "packed", tokenizer="bytes", workers=1)
    with pytest.raises(BraidError, match=problem):
        ordered("field", name=name, data=data)


def test_a_source_that_changed_or_has_no_fields(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(rows([1, 2, 3, 4]))
    data = prepare(file, tmp_path / "packed", tokenizer="bytes", workers=1)
    file.write_text(rows([1, 2, 3, 4, 5]))
    with pytest.raises(BraidError, match="the source has 4 documents now, and 3 were packed"):
        ordered("field", data=data)
    (tmp_path / "plain.txt").write_text("one\n\ntwo\n")
    plain = prepare(tmp_path / "plain.txt", tmp_path / "plain", tokenizer="bytes", workers=1)
    with pytest.raises(BraidError, match="documents of this source have no fields"):
        ordered("field", data=plain)


@pytest.mark.parametrize("kind", list(pacings))
def test_the_contract_of_every_pacing(kind: str) -> None:
    pacing = pacings.build(choice(pacing=kind).options.pacing)
    parts = pacing.parts()
    assert all(0 <= begin < end <= 1 for begin, end in parts)
    assert parts[-1][1] == pytest.approx(1)
    for part in range(len(parts)):
        assert 0 <= pacing.part_after(part) < len(parts)
        assert all(0 <= pacing.part_at(part, share / 20) < len(parts) for share in range(21))


@pytest.mark.parametrize(
    ("pacing", "levels"),
    [
        ({"kind": "linear", "start": 0.2, "full": 0.5, "levels": 4}, [0, 1, 2, 3, 4, 4, 4, 4]),
        ({"kind": "linear", "start": 0.5, "full": 1.0, "levels": 2}, [0, 0, 0, 0, 1, 1, 1, 1]),
        ({"kind": "root", "start": 0.2, "full": 0.5, "levels": 8}, [0, 3, 5, 6, 8, 8, 8, 8]),
        ({"kind": "root", "start": 1.0}, [10] * 8),
    ],
    ids=str,
)
def test_a_pool_grows_with_progress(pacing: dict[str, Any], levels: list[int]) -> None:
    rule = pacings.build(choice(pacing=pacing).options.pacing)
    assert [rule.part_at(0, step / 8) for step in range(8)] == levels


def test_a_pool_never_shrinks() -> None:
    rule = pacings.build(choice(pacing="linear").options.pacing)
    assert rule.part_at(7, 0.1) == 7


@given(st.integers(1, 12), st.booleans())
def test_buckets_divide_the_documents_evenly(count: int, descending: bool) -> None:
    stream = ordered(pacing={"kind": "sorted", "buckets": count}, descending=descending)
    assert np.array_equal(np.concatenate([part.chosen for part in parts_of(stream)]), stream.order.documents)
    assert max(abs(len(part) - len(stream) / count) for part in parts_of(stream)) <= LENGTHS.max()


def test_each_epoch_reads_the_buckets_in_their_order_and_all_of_them() -> None:
    stream = ordered(pacing={"kind": "sorted", "buckets": 3})
    loading = loader(stream, rows=1)
    bucket = {document: number for number, part in enumerate(parts_of(stream)) for document in part.chosen}
    seen, shown = [], []
    while loading.epochs["toy"] < 2:
        inputs = loading.next_batch().inputs
        shown.append(inputs.ravel())
        seen.append({bucket[document] for document in document_of(inputs).ravel()})
    assert all(len(one) == 1 for one in seen), "a chunk never mixes buckets"
    numbers = [min(one) for one in seen]
    half = len(numbers) // 2
    assert numbers[:half] == sorted(numbers[:half])
    assert numbers[half:] == sorted(numbers[half:])
    first, second = np.concatenate(shown[:half]), np.concatenate(shown[half:])
    assert len(set(first)) == len(first) > 0.9 * len(stream), "an epoch shows each token once"
    assert len(set(first) | set(second)) > len(first), "offsets move"
    assert not np.array_equal(first, second)


def test_a_growing_pool_has_only_the_first_documents_at_first_and_all_at_the_end() -> None:
    stream = ordered(pacing={"kind": "linear", "start": 0.25, "full": 0.5, "levels": 3})
    loading = loader(stream)
    longest = {}
    for step in range(200):
        inputs = loading.next_batch(step / 200).inputs
        longest[step] = LENGTHS[document_of(inputs)].max()
    sizes = [LENGTHS[part.chosen].max() for part in parts_of(stream)]
    assert max(longest[step] for step in range(33)) == sizes[0]
    assert max(longest[step] for step in range(34, 66)) == sizes[1]
    assert max(longest[step] for step in range(100, 200)) == sizes[-1] == LENGTHS.max()
    assert 200 * 3 * 8 / len(stream) == pytest.approx(loading.epochs["toy"], rel=0.1), "short rests are left out"


PACINGS = ["sorted", {"kind": "sorted", "buckets": 3}, "linear", {"kind": "root", "start": 0.3, "levels": 3}]
CHUNKINGS = [Contiguous(), Consecutive(), Windows(Windows.Config(stride=5))]


@given(st.integers(0, 14), st.sampled_from(PACINGS), st.sampled_from(CHUNKINGS), st.integers(1, 60))
@settings(max_examples=40)
def test_resuming_anywhere_is_as_never_stopping(stop: int, pacing: Any, chunking: Any, mark: int) -> None:
    """Every third batch is cut, so that some stops fall between two pieces."""

    def step(loading: Loader, number: int) -> tuple[Any, ...]:
        marks = {"tokens_left": mark} if number % 3 == 0 else {}
        batch: Batch = loading.next_batch(number / 16, **marks)
        return batch.inputs.tolist(), batch.labels.tolist(), batch.whole.continues.tolist(), batch.is_last_piece

    through, before, resumed = (loader(ordered(pacing=pacing), chunking, rows=9) for _ in range(3))
    expected = [step(through, number) for number in range(16)]
    for number in range(stop):
        step(before, number)
    resumed.load_state(json.loads(json.dumps(before.state())))
    assert [step(resumed, number) for number in range(stop, 16)] == expected[stop:]
    assert resumed.state() == through.state()
    assert resumed.epochs == through.epochs


def test_rows_that_read_on_do_so_within_a_part() -> None:
    stream = ordered(pacing={"kind": "sorted", "buckets": 3})
    loading = loader(stream, Consecutive(), rows=4)
    follows = dict(zip(*(np.concatenate([part.read(0, len(part))[0] for part in parts_of(stream)]),) * 2, strict=True))
    for part in parts_of(stream):
        tokens = part.read(0, len(part))[0]
        follows |= dict(zip(tokens.tolist(), np.roll(tokens, -1).tolist(), strict=True))
    before = loading.next_batch()
    for _ in range(60):
        after = loading.next_batch()
        for row in np.flatnonzero(after.whole.continues):
            assert follows[before.inputs[row, -1]] == after.inputs[row, 0]
        before = after


def test_positions_of_runs_without_parts_still_load() -> None:
    plain = loader(TokenStream(DATA))
    for _ in range(90):
        plain.next_batch()
    state, epochs = plain.state(), plain.epochs
    state["places"] = {name: place[:2] for name, place in state["places"].items()}
    resumed = loader(TokenStream(DATA))
    resumed.load_state(state)
    assert resumed.epochs == epochs
    assert np.array_equal(resumed.next_batch().inputs, plain.next_batch().inputs)


def test_a_position_belongs_to_its_order() -> None:
    saved = loader(ordered()).state()
    for stream in (TokenStream(DATA), ordered(descending=True), ordered(pacing="linear"), ordered("surprisal")):
        with pytest.raises(BraidError, match=r"the saved position belongs to other data:\n  data\.toy\.order"):
            loader(stream).load_state(saved)


@pytest.mark.parametrize("kind", ["length", "surprisal"])
def test_the_record_is_readable_and_is_read_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = ordered(kind)
    record_orders([stream], tmp_path)
    assert f"toy: 60 documents by {kind}, the lowest first (sorted, in 10 parts)" in capsys.readouterr().out
    lines = [line.split("\t") for line in (tmp_path / "toy.tsv").read_text().splitlines()]
    assert lines[0] == ["document", "score", "tokens", "part"]
    assert [int(line[0]) for line in lines[1:]] == stream.order.documents.tolist()
    assert [float(line[1]) for line in lines[1:]] == stream.order.scores.tolist()
    assert [int(line[2]) for line in lines[1:]] == LENGTHS[stream.order.documents].tolist()
    parts = [int(line[3]) for line in lines[1:]]
    assert parts == sorted(parts)
    assert set(parts) == set(range(10))
    facts = json.loads((tmp_path / "order.json").read_text())["toy"]
    assert (facts["kind"], facts["seed"], facts["documents"]) == (kind, 3, DOCUMENTS)
    assert facts["sha256"] == stream.order.sha256
    monkeypatch.setattr(orders[kind], "scores", None)  # computing it again would fail
    (again,) = order_streams([TokenStream(DATA)], choice(kind), 3, tmp_path)
    assert isinstance(again, OrderedStream)
    assert again.fingerprint() == stream.fingerprint()


def test_a_record_of_another_order_or_a_damaged_one_is_not_used(tmp_path: Path) -> None:
    record_orders([ordered()], tmp_path)
    (other,) = order_streams([TokenStream(DATA)], choice(descending=True), 3, tmp_path)
    assert other.fingerprint() == ordered(descending=True).fingerprint()
    text = (tmp_path / "toy.tsv").read_text()
    for damaged in ("", text[: len(text) // 2], text.replace("\n", "\nx", 3), text.replace("\n1\t", "\n0\t")):
        (tmp_path / "toy.tsv").write_text(damaged)
        (again,) = order_streams([TokenStream(DATA)], choice(), 3, tmp_path)
        assert again.fingerprint() == ordered().fingerprint()


@pytest.mark.parametrize(
    ("stream", "chunking", "problem"),
    [
        (lambda: ordered(pacing={"kind": "sorted", "buckets": 61}), None, "60 documents cannot be divided into 61"),
        (lambda: ordered(pacing={"kind": "sorted", "buckets": 20}), None, r"the shortest of the 20 parts .* needs 65"),
        (lambda: ordered(), Windows(Windows.Config(30, stride=4)), "`words_per_epoch` ends epochs before"),
    ],
)
def test_orders_that_cannot_be_read(stream: Any, chunking: Any, problem: str) -> None:
    with pytest.raises(BraidError, match=problem):
        loader(stream(), chunking, length=64)


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("lenght", "data.order: unknown order 'lenght'. Did you mean 'length'?"),
        ({"kind": "length", "pacing": "sort"}, "data.order.pacing: unknown pacing 'sort'. Did you mean 'sorted'?"),
        ({"kind": "length", "pacing": {"kind": "linear", "start": 0}}, "data.order.pacing.start: expected a number"),
        ({"kind": "length", "pacing": {"kind": "sorted", "buckets": 0}}, "data.order.pacing.buckets: expected a whole"),
    ],
    ids=str,
)
def test_wrong_options(order: Any, problem: str) -> None:
    with pytest.raises(BraidError) as caught:
        decode(DataConfig, {"sets": {"a": {"source": "stories"}}, "order": order}, "data")
    assert problem in str(caught.value)


def test_an_order_is_written_into_a_recipe_and_read_back() -> None:
    config = decode(DataConfig, {"sets": {"a": {"source": "stories"}}, "order": {"kind": "field", "name": "x.y"}})
    assert decode(DataConfig, encode(config)) == config
    assert decode(DataConfig, {"sets": {"a": {"source": "stories"}}}).order.kind == "shuffled"


def test_the_order_is_the_same_on_every_machine() -> None:
    """These numbers must never change: a resumed run would read other data."""
    assert ordered().order.documents[:8].tolist() == [0, 30, 43, 13, 26, 56, 9, 39]
