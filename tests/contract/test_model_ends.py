"""Embeddings and heads own their work: models whose ends have no `weight` do what others do, or are refused in words.

The parts of this file are registered only while it runs. `two_matrices` computes what it is asked for by itself, `sum`
shares parameters under other names and can be composed; so can the embedding `two_tables`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import cost_of, model_cost, stage_table
from braidlm.core.models.folders import check_weights, load_model, save_model
from braidlm.data.packing.prepare import prepare
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.compose import compose
from braidlm.evals.finetuning.classifier import classify, make_classifier
from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import Scorer
from braidlm.model.config.ranges import Size
from braidlm.model.heads.ends import Embedding, Head, embeddings, heads
from braidlm.model.heads.losses import log_probabilities_of, next_token_loss
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.convert import convert
from braidlm.training.train import train
from tests.tiny_models import VOCABULARY, ToyTokenizer, random_ids, tiny_model


class TwoTables(Embedding):
    """The sum of a vector for each token and one for its remainder by 5."""

    composed = {"tokens.weight": "side by side", "remainders.weight": "side by side"}

    @dataclass
    class Config:
        pass

    def __init__(self, config: Config, vocab_size: int, width: int):
        super().__init__()
        self.tokens, self.remainders = nn.Embedding(vocab_size, width), nn.Embedding(5, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.remainders(ids % 5)


class TwoMatrices(Head):
    """Two matrices in a row. Losses and log-probabilities need no call of `forward`."""

    @dataclass
    class Config:
        rank: Size = 4
        """Between the two."""

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__()
        self.down = nn.Linear(width, config.rank, bias=False)
        self.up = nn.Linear(config.rank, vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(self.down(hidden))

    def loss(self, hidden: Tensor, targets: Tensor, count: Any = None, logits: Tensor | None = None) -> Tensor:
        return next_token_loss(self.up(self.down(hidden)), targets, count)

    def log_probabilities(self, hidden: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        return log_probabilities_of(self.up(self.down(hidden)), rows, tokens)


class Sum(Head):
    """The sum of two linear layers, one of which may be the embedding's table."""

    composed = {"first.weight": "side by side", "second.weight": "side by side", "second.bias": "added up"}

    @dataclass
    class Config:
        factor: Size = 1
        """Of the second."""

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__()
        self.factor = config.factor
        self.first, self.second = nn.Linear(width, vocab_size, bias=False), nn.Linear(width, vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.first(hidden) + self.factor * self.second(hidden)

    def shared_with(self, embedding: Embedding) -> dict[str, str]:
        return {"first.weight": "tokens.weight"} if isinstance(embedding, TwoTables) else {}


MODELS: dict[str, dict[str, Any]] = {
    "two matrices": {"embedding": "two_tables", "head": "two_matrices", "tie_embeddings": False},
    "tied sum": {"embedding": "two_tables", "head": "sum", "tie_embeddings": True},
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """No other test file sees these parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(embeddings.parts, "two_tables", TwoTables)
        patch.setitem(heads.parts, "two_matrices", TwoMatrices)
        patch.setitem(heads.parts, "sum", Sum)
        yield


@pytest.fixture(params=MODELS)
def architecture(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODELS[request.param]


@pytest.fixture
def model(architecture: dict[str, Any]) -> BraidForCausalLM:
    return tiny_model(**architecture)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "stories"
    prepare("stories", folder, documents=40, tokenizer="bytes", workers=1)
    return folder


def without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks `two_matrices` for the logits of the whole vocabulary fails."""

    def forward(self: TwoMatrices, hidden: Tensor) -> Tensor:
        raise AssertionError("nobody needs all logits here")

    monkeypatch.setattr(TwoMatrices, "forward", forward)


def test_training_and_resuming(
    architecture: dict[str, Any], packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_logits(monkeypatch)
    recipe: dict[str, Any] = {
        "name": "ends",
        "out": str(tmp_path / "run"),
        "model": {"width": 16, "context": 32, "block": {"attention": {"heads": 2}}, "stages": ["block"]} | architecture,
        "data": {"length": 32, "sets": {"stories": {"path": str(packed), "holdout": 0.1}}},
        "training": {"budget": "4 steps", "batch": 4, "optimizer": {"lr": 1e-2}},
        "checkpoints": {"every": "4 steps"},
        "validation": {"every": "4 steps", "tokens": 200},
    }
    first = load_model(train(recipe).model).state_dict()
    second = load_model(train(recipe | {"training": recipe["training"] | {"budget": "8 steps"}}).model).state_dict()
    ends = [name for name in first if name.startswith(("model.embedding.", "head."))]
    assert len(ends) >= 4
    assert all(not torch.equal(first[name], second[name]) for name in ends)


def test_scores_are_the_losses(model: BraidForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random_ids(3, 9)
    scorer, requests = Scorer(model), [Request(row) for row in ids.tolist()]
    with_margins = scorer.score(requests, margins=True)
    with torch.no_grad():
        mean = model(ids, labels=ids).loss
    without_logits(monkeypatch)
    scores = scorer.score(requests)
    assert -scores.tokens.mean() == pytest.approx(mean.item(), abs=1e-5)
    assert with_margins.tokens == pytest.approx(scores.tokens, abs=1e-6)
    assert model.text_loss(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(mean.item(), abs=1e-5)


def test_forward_asks_the_head_for_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(**MODELS["two matrices"]), random_ids(2, 5)
    monkeypatch.setattr(TwoMatrices, "loss", lambda self, hidden, targets, count=None, logits=None: hidden.new_ones(()))
    assert model(ids, labels=ids).loss == 1


def test_generate_and_our_decoder_agree(model: BraidForCausalLM) -> None:
    ids = random_ids(2, 5)
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0)
    steps = decode_tokens(Decoder(model, 2, 32), ids.tolist(), 6, Sampling(temperature=0))
    assert torch.tensor([tokens for tokens, _ in steps]).T.tolist() == theirs[:, 5:].tolist()


def test_what_is_shared_counts_once(model: BraidForCausalLM) -> None:
    cost = model_cost(model, 16)
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    head = sum(p.numel() for p in model.head.parameters() if p.ndim == 2)
    assert cost_of(model.head, 16).flops_per_token == 2 * head
    rows = stage_table(model, 16)
    for fact, total in vars(cost).items():
        assert sum(row[fact] for row in rows) == total


def test_the_folder_holds_each_tensor_once(model: BraidForCausalLM, tmp_path: Path) -> None:
    save_model(model, tmp_path / "model", ToyTokenizer(), {})
    check_weights(tmp_path / "model", model)
    opened = load_model(tmp_path / "model")
    assert torch.equal(opened(random_ids(2, 5)).logits, model(random_ids(2, 5)).logits)
    assert opened.tied == model.tied
    for own, embedding in opened.tied.items():
        assert opened.get_parameter(own) is opened.get_parameter(embedding)


def test_fine_tuning_reaches_the_embedding(model: BraidForCausalLM) -> None:
    classifier: Any = make_classifier(model, 3)
    logits, _ = classify(classifier, random_ids(2, 5), torch.tensor([4, 2]))
    logits.sum().backward()
    assert all(p.grad is not None for p in classifier.model.embedding.parameters())


def test_kernels_leave_these_ends_to_themselves(model: BraidForCausalLM) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from braidlm.kernels.lowered_model import LoweredModel

    lowered, ids = LoweredModel(model), random_ids(2, 7)
    assert {"embedding", "head"} <= set(lowered.lowered.refusals)
    with torch.no_grad():
        loss = lowered.losses(ids[:, :-1], ids[:, 1:])[0]
        torch.testing.assert_close(loss, model.text_loss(ids[:, :-1], ids[:, 1:]), rtol=0, atol=1e-5)
        torch.testing.assert_close(lowered.logits(ids), model(ids).logits, rtol=0, atol=1e-5)


def saved_path(folder: Path, seed: int, **changes: Any) -> Path:
    tokenizer = bytes_tokenizer()
    model = tiny_model(seed=seed, vocab_size=tokenizer.vocab_size, **changes)
    return save_model(model, folder, tokenizer, {"made_by": "braid train"})


@pytest.mark.parametrize("tied", [[True, True], [True, False], [False, False]], ids=str)
def test_composed_vectors_stand_side_by_side_and_logits_add_up(tmp_path: Path, tied: list[bool]) -> None:
    changes = [MODELS["tied sum"] | {"tie_embeddings": each} for each in tied]
    folders = [saved_path(tmp_path / name, seed, **changes[seed]) for seed, name in enumerate("ab")]
    out = compose(folders, tmp_path / "out")
    assert out is not None
    whole, paths = load_model(out), [load_model(folder) for folder in folders]
    ids = random_ids(2, 5, vocab_size=VOCABULARY)
    vectors = [path.model.embedding(ids) for path in paths]
    assert torch.equal(whole.model.embedding(ids), torch.cat(vectors, -1))
    expected = sum(path.head(hidden) for path, hidden in zip(paths, vectors, strict=True))
    torch.testing.assert_close(whole.head(torch.cat(vectors, -1)), expected, rtol=0, atol=1e-5)
    assert bool(whole.tied) == all(tied)


def test_what_cannot_be_composed_or_exported_is_refused(tmp_path: Path) -> None:
    two = [saved_path(tmp_path / name, seed, **MODELS["two matrices"]) for seed, name in enumerate("ab")]
    with pytest.raises(BraidError, match="the head is 'two_matrices', and such parts cannot be concatenated"):
        compose(two, tmp_path / "out")
    other = MODELS["tied sum"] | {"tie_embeddings": False, "head": {"kind": "sum", "factor": 2}}
    plain = {"tie_embeddings": False}
    folders = [saved_path(tmp_path / "c", 2, **other), saved_path(tmp_path / "d", 3, **MODELS["tied sum"])]
    with pytest.raises(BraidError, match=r"heads differ: 'c' has sum \(factor 2\), 'd' has sum \(factor 1\)"):
        compose(folders, tmp_path / "out")
    with pytest.raises(BraidError, match="embeddings differ: 'c' has two_tables, 'e' has tokens; heads differ"):
        compose([folders[0], saved_path(tmp_path / "e", 4, **plain)], tmp_path / "out")
    with pytest.raises(BraidError, match=r"embedding\.kind is two_tables; .*\n.* head\.kind is two_matrices"):
        convert(two[0], to="llama", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ends_that_share_nothing_cannot_be_tied() -> None:
    with pytest.raises(BraidError, match="'two_matrices' has nothing to share with the embedding 'tokens'") as error:
        tiny_model(head="two_matrices", tie_embeddings=True)
    assert error.value.todo == "Set tie_embeddings: false."
    with pytest.raises(BraidError, match="head 'linear' has nothing to share with the embedding 'two_tables'"):
        tiny_model(embedding="two_tables", tie_embeddings=True)
