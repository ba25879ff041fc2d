"""The embedding of bytes: exactly the mean over real bytes, however often and in whatever company a token is there."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model, read_tokenizer, save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.compose import compose
from braidlm.model.heads.bytes.embedding import GROUP
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.model.heads.bytes.byte_models import SMALL, TOKENS, byte_model
from tests.tiny_models import random_ids, tiny_model


def alone(embedding: Any, token: bytes) -> Tensor:
    """The vector of a token, from rows without any padding."""
    size, sums = embedding.config.piece, 0
    for begin in range(0, len(token), size):
        row = torch.tensor(list(token[max(0, begin - size) : begin + size]))
        positions = embedding.positions.weight.repeat(2, 1)[: len(row)]
        hidden = embedding.blocks((embedding.symbols(row) + positions)[None])[0]
        sums = sums + hidden[size if begin else 0 :].sum(0)
    return embedding.out(sums / len(token))


@pytest.fixture
def embedding() -> Any:
    return byte_model().model.embedding


def test_a_vector_is_the_mean_over_the_real_bytes(embedding: Any) -> None:
    vectors = embedding(torch.arange(len(TOKENS)))
    for token, vector in zip(TOKENS, vectors, strict=True):
        if token is not None:
            torch.testing.assert_close(vector, alone(embedding, token), rtol=0, atol=1e-12)
    assert torch.pdist(vectors).min() > 1e-3, "the order of bytes and of pieces matters"


def gradients(embedding: Any, ids: Tensor, vectors: Tensor) -> list[Tensor]:
    embedding.zero_grad()
    weights = torch.randn(*ids.shape, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (vectors * weights).sum().backward()
    return [parameter.grad.clone() for parameter in embedding.parameters()]


@pytest.mark.parametrize("shape", [(2, 3), (5, 9)], ids=["fewer than the vocabulary", "more"])
def test_each_token_once_gives_the_gradients_of_every_occurrence(
    embedding: Any, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(*shape, vocab_size=len(TOKENS))
    ids[0, 0] = 5
    expected = gradients(embedding, ids, embedding.encode(ids.flatten()).view(*ids.shape, -1))
    found = gradients(embedding, ids, embedding(ids))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as on a GPU: static shapes
    static = gradients(embedding, ids, embedding(ids))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(static, expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_vectors_are_remembered_until_the_weights_change(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding: Any = tiny_model(
        embedding={"kind": "bytes", **SMALL}, vocab_size=70, tie_embeddings=False
    ).model.embedding
    encoded: list[int] = []
    encode = type(embedding).encode

    def counting(self: Any, tokens: Tensor) -> Tensor:
        encoded.append(len(tokens))
        return encode(self, tokens)

    monkeypatch.setattr(type(embedding), "encode", counting)
    first = embedding(torch.tensor([[3, 69, 3]]))
    assert encoded == [GROUP, 70 - 2 * GROUP]
    assert torch.equal(embedding(torch.tensor([69, 3])), first[0, 1:])
    assert len(encoded) == 2
    with torch.inference_mode():
        embedding(torch.tensor([4, 35]))
    assert len(encoded) == 3
    embedding.out.weight.mul_(2)
    torch.testing.assert_close(embedding(torch.tensor([69])), 2 * first[0, 1:2])
    embedding.train()
    assert embedding.recalled.value is None
    assert torch.equal(embedding.eval()(torch.tensor([[3]]))[0], 2 * first[0, :1])


def saved(folder: Path, model: BraidForCausalLM) -> Path:
    return save_model(model, folder, bytes_tokenizer(), {"made_by": "braid train"})


def test_a_model_that_has_not_read_its_tokenizer_is_not_saved_with_it(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer()
    model = tiny_model(vocab_size=tokenizer.vocab_size, embedding={"kind": "bytes", **SMALL}, tie_embeddings=False)
    with pytest.raises(BraidError, match="ByteEmbedding has not read this tokenizer"):
        saved(tmp_path / "a", model)
    read_tokenizer(model, tokenizer)
    opened = load_model(saved(tmp_path / "a", model))
    assert opened.model.embedding.agrees_with(tokenizer.token_bytes)
    ids = random_ids(2, 5)
    with torch.no_grad():
        assert torch.equal(opened(ids).logits, model(ids).logits)
    saved(tmp_path / "b", copy.deepcopy(model))
    with pytest.raises(BraidError, match="the embedding is 'bytes', and such parts cannot be concatenated"):
        compose([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
