"""Packed answers: exactly their tokens are targets, whatever the tokenizer, and counts are those of the answers."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from braidlm.core.errors import BraidError
from braidlm.data.packing.packed_data import PackedData
from braidlm.data.packing.prepare import prepare
from braidlm.data.sources.format import ReadOptions
from braidlm.data.tokenizing.build import BraidTokenizer, SpecialTokens, load_tokenizer, train_bpe
from braidlm.data.tokenizing.encoding import PART_CHARS, Packer

ROWS = [
    {"q": f"Wie viel ist {n} + {n}, Zoë?", "a": f"{n} + {n} = {2 * n} Äpfel\n#### {2 * n}", "id": n} for n in range(40)
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts a space before a text, as Llama's, so that tokens do not spell it."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.NFC()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"])
    backend.train_from_iterator([f"Question: {row['q']}\nAnswer: {row['a']}" for row in ROWS], trainer)
    folder = tmp_path_factory.mktemp("metaspace")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    return folder


def packed(rows: Path, out: Path, tokenizer: str | Path, **options: object) -> PackedData:
    size = {"vocab_size": 300} if tokenizer == "bpe" else {}
    return prepare(rows, out, tokenizer=tokenizer, fields="q", answer="a", **size, **options)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "metaspace"])
def test_the_targets_are_the_answers(kind: str, rows: Path, metaspace: Path, tmp_path: Path) -> None:
    data = packed(rows, tmp_path / "out", metaspace if kind == "metaspace" else kind)
    tokenizer, starts, targets = load_tokenizer(data.tokenizer_folder), data.document_starts, data.targets
    assert targets is not None
    for number, row in enumerate(ROWS):
        ids, mask = (a[starts[number] : starts[number + 1]] for a in (data.tokens, targets))
        assert (np.diff(mask.astype(int)) >= 0).all(), "a prompt, then an answer"
        *answer, end = ids[mask == 1].tolist()
        assert end == data.manifest.eos_id
        assert tokenizer.decode(answer).strip() == row["a"]
        assert tokenizer.decode(ids[mask == 0].tolist()).strip() == f"Question: {row['q']}\nAnswer:"
    assert data.document_target_bytes.tolist() == [len(row["a"].encode()) for row in ROWS]
    assert data.manifest.targets is not None
    assert data.manifest.targets.tokens == targets.sum()
    assert data.manifest.targets.bytes == data.document_target_bytes.sum()


def test_shards_limits_and_processes_change_nothing(rows: Path, tmp_path: Path) -> None:
    whole = packed(rows, tmp_path / "whole", "bytes")
    sharded = packed(rows, tmp_path / "sharded", "bytes", shard_mb=0.0005, workers=2)
    limited = packed(rows, tmp_path / "limited", "bytes", shard_mb=0.0005, limit_documents=7)
    assert whole.targets is not None
    for data in (sharded, limited):
        assert data.targets is not None
        assert data.targets.tolist() == whole.targets[: data.manifest.tokens].tolist()
        documents = data.manifest.documents
        assert data.document_target_bytes.tolist() == whole.document_target_bytes[:documents].tolist()
    assert (sharded.manifest.documents, limited.manifest.documents) == (40, 7)


def test_a_prompt_may_be_longer_than_what_is_encoded_at_once(tmp_path: Path) -> None:
    question, answer = "ask " * PART_CHARS, "tell " * PART_CHARS
    (tmp_path / "long.jsonl").write_text(json.dumps({"q": question, "a": answer}))
    data = packed(tmp_path / "long.jsonl", tmp_path / "out", "bytes")
    assert data.targets is not None
    assert data.targets.tolist() == [0] * len(f"Question: {question.strip()}\nAnswer: ") + [1] * len(answer)


def test_data_without_answers_is_as_it_was(rows: Path, tmp_path: Path) -> None:
    data = prepare(rows, tmp_path / "out", tokenizer="bytes", fields="a")
    assert data.targets is None
    assert data.document_target_bytes.tolist() == data.document_bytes.tolist()
    assert not (tmp_path / "out" / "targets.bin").exists()
    assert "answer" not in ReadOptions().facts(), "else a command of an earlier version would not know its own result"


@pytest.mark.parametrize("name", ["targets.bin", "target_bytes.bin"])
def test_damage_is_found(name: str, rows: Path, tmp_path: Path) -> None:
    folder = packed(rows, tmp_path / "out", "bytes").folder
    file = folder / name
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(BraidError, match=name):
        _ = PackedData(folder).targets, PackedData(folder).document_target_bytes
    file.write_bytes(b"")
    with pytest.raises(BraidError, match=name):
        PackedData(folder)


SAMPLE = [f"{row['q']}\n{row['a']}\n\n" for row in ROWS]
SPACED = [BraidTokenizer(train_bpe(SAMPLE, 300, space_before=what), SpecialTokens()) for what in ("texts", "lines")]


@pytest.mark.parametrize("tokenizer", SPACED, ids=lambda tokenizer: tokenizer.space_before)
@given(
    st.lists(st.text(alphabet="ab ist+Zoë\n 漢", min_size=1, max_size=12), min_size=1, max_size=5), st.integers(0, 3)
)
def test_a_space_before_a_text_is_no_part_of_it(tokenizer: BraidTokenizer, texts: list[str], prompt: int) -> None:
    """Words, bytes and targets are those that the tokens' offsets say, at the speed of tokens that spell the text."""
    fast, exact = Packer(tokenizer), Packer(tokenizer)
    exact._token_bytes = None
    ends, prompts = [True] * len(texts), [min(prompt, len(text)) for text in texts]
    one, other = (packer.pack(texts, ends, prompts=prompts) for packer in (fast, exact))
    for name in ("tokens", "words", "targets", "texts"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert one.texts[:, 1].tolist() == [len(text.split()) for text in texts]
