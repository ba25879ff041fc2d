"""Heads of bytes: exact probabilities, equal on every way to them, and text from decisions about bytes."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from braidlm.cli.main import main
from braidlm.core.decoding.generation import TextStream
from braidlm.core.models.accounting import model_facts, skeleton, stage_table
from braidlm.core.models.presets import config_from
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import Scorer
from braidlm.model.errors import BraidError
from braidlm.model.heads.bytes.spelling import END, NOTHING, SYMBOLS
from tests.model.heads.bytes.byte_models import HEADS, SMALL, TOKENS, byte_model
from tests.tiny_models import random_ids, tiny_model


def pieces_of(token: int, size: int) -> list[list[int]]:
    """A token's symbols and its end, divided."""
    number = [index for index, other in enumerate(TOKENS) if other is None]
    own = TOKENS[token]
    symbols = [256 + number.index(token)] if own is None else list(own)
    symbols = [*symbols, END]
    return [symbols[begin : begin + size] for begin in range(0, len(symbols), size)]


def byte_by_byte(head: Any, hidden: Tensor, token: int) -> list[float]:
    """The log-probability of every symbol of a token, each computed by itself from those before it."""
    found: list[float] = []
    context: list[int] = []
    size = head.config.piece
    vectors = head.symbols.weight * head.config.width**0.5
    for piece in pieces_of(token, size):
        slots = head.slots_of(hidden[None] if not context else torch.zeros_like(hidden[None]))[0]
        positions = head.slots_of(torch.zeros_like(hidden[None]))[0]
        known = [positions[i] + vectors[symbol] for i, symbol in enumerate(context)]
        for index, symbol in enumerate(piece):
            if head.causal:  # nothing after it is there
                written = [*context[-1:], *piece[:index]] if context else [None, *piece[:index]]
                inputs = [slots[i] + (0 if s is None else vectors[s]) for i, s in enumerate(written)]
            else:
                inputs = list(slots)
            row = head.blocks(torch.stack([*known, *inputs])[None])[0, len(known) + index]
            logits = torch.cat((head.symbols.weight @ row, head.end(row)))
            found.append(logits.log_softmax(-1)[symbol].item())
        context = piece
    return found


@pytest.fixture(params=HEADS)
def model(request: pytest.FixtureRequest) -> Any:
    return byte_model(request.param)


@torch.no_grad()
def test_a_token_is_the_product_of_its_bytes_and_its_end(model: Any) -> None:
    hidden = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = model.head(hidden)
    for row in range(3):
        expected = [sum(byte_by_byte(model.head, hidden[row], token)) for token in range(len(TOKENS))]
        tokens = torch.arange(len(TOKENS))
        found = model.head.log_probabilities(hidden, torch.full_like(tokens, row), tokens)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)
        torch.testing.assert_close(logits[row], found, rtol=0, atol=1e-10)
    assert (logits.exp().sum(-1) < 1).all()


@torch.no_grad()
def test_bits_per_byte_are_those_of_the_bytes(model: Any) -> None:
    ids = random_ids(2, 9, vocab_size=len(TOKENS))
    hidden = model.model(ids).last_hidden_state
    expected = sum(
        sum(byte_by_byte(model.head, hidden[row, position - 1], int(ids[row, position])))
        for row in range(2)
        for position in range(1, 9)
    )
    scores = Scorer(model, dtype=torch.float64).score([Request(row) for row in ids.tolist()])
    assert scores.sums.sum() == pytest.approx(expected, abs=1e-9)
    assert model.text_loss(ids[:, :-1], ids[:, 1:], 1.0).item() == pytest.approx(-expected, abs=1e-9)
    with_margins = Scorer(model, dtype=torch.float64).score([Request(row) for row in ids.tolist()], margins=True)
    assert with_margins.tokens == pytest.approx(scores.tokens, abs=1e-9)


def test_the_loss_has_the_gradients_of_all_logits(model: Any) -> None:
    model.train()
    hidden = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    targets = random_ids(2, 5, vocab_size=len(TOKENS))
    targets[0, 1] = 5  # of three pieces
    targets[1, 3] = -100
    results = []
    for from_logits in (False, True):
        model.zero_grad()
        hidden.grad = None
        if from_logits:
            logits = model.head(hidden)
            loss = -logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets != -100].sum() / 9
        else:
            loss = model.head.loss(hidden, targets)
        loss.backward()
        results.append([loss.detach(), hidden.grad, *(p.grad for p in model.head.parameters())])
    for direct, expected in zip(*results, strict=True):
        torch.testing.assert_close(direct, expected, rtol=0, atol=1e-10)


def test_rows_in_parts_give_the_same(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([0, 5, 2, 6, 8])
    with torch.no_grad():
        whole = model.head(hidden), model.head.token_log_probabilities(hidden, tokens)
        monkeypatch.setattr("braidlm.model.heads.bytes.decoder.KEYS_AT_ONCE", 1)
        monkeypatch.setattr("braidlm.model.heads.bytes.decoder.TOKENS_AT_ONCE", 2)
        parts = model.head(hidden), model.head.token_log_probabilities(hidden, tokens)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


@torch.no_grad()
def test_what_is_remembered_follows_the_weights(model: Any) -> None:
    hidden = torch.randn(2, 16, dtype=torch.float64)
    before = model.head(hidden)
    model.head.slots.bias.add_(1.0)
    after = model.head(hidden)
    fresh = copy.deepcopy(model)
    fresh.head.recalled.forget()
    assert torch.equal(after, fresh.head(hidden))
    assert not torch.allclose(after[:, 5] - after[:, 6], before[:, 5] - before[:, 6])


def test_in_half_precision(model: Any) -> None:
    model = copy.deepcopy(model).bfloat16()
    ids = random_ids(2, 6, vocab_size=len(TOKENS))
    output = model(ids, labels=ids)
    output.loss.backward()
    assert output.logits.dtype == torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


class Script(nn.Module):
    """In place of a model's last norm: a stream that says each symbol of the next tokens outright."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = torch.empty(0)
        self.read = 0

    def forward(self, hidden: Tensor) -> Tensor:
        begin, self.read = self.read, self.read + hidden.shape[1]
        return nn.functional.one_hot(self.symbols[begin : self.read], END + 1).to(hidden.dtype).flatten(1)[None]


@pytest.fixture(scope="module")
def scripted() -> Any:
    """A model that writes what its script says: its head has no transformer, and matrices that only pass on."""
    tokenizer, size = bytes_tokenizer(), 4
    ends = {"width": END + 1, "heads": 1, "piece": size}
    model = tiny_model(
        vocab_size=tokenizer.vocab_size,
        width=size * (END + 1),
        context=64,
        block={"norm": "rms", "attention": {"heads": 2}, "feed": {"kind": "mlp", "hidden": 4}},
        stages=[{"block": {"layers": 1}}],
        embedding={"kind": "bytes", **ends},
        head={"kind": "bytes_parallel", "layers": 0, **ends},
    )
    for end in (model.model.embedding, model.head):
        end.read_tokenizer(tokenizer.token_bytes)
    identity, head = torch.eye(END + 1), model.head
    with torch.no_grad():
        head.slots.weight.copy_(torch.eye(size * (END + 1)))
        head.slots.bias.zero_()
        head.symbols.weight.copy_(identity[:SYMBOLS])
        head.end.weight.copy_(identity[END:])
    model.model.norm = Script()
    return model


@given(text=st.text(max_size=12))
@settings(deadline=None, max_examples=25)
def test_generation_writes_every_text(scripted: Any, text: str) -> None:
    tokenizer, script = bytes_tokenizer(), scripted.model.norm
    wanted = [*tokenizer.encode(text), tokenizer.eos_id]
    symbols = scripted.head.spelling.first(torch.tensor(wanted))
    script.symbols, script.read = symbols.where(symbols != NOTHING, END), 0
    prompt = torch.tensor([[tokenizer.eos_id]])
    written = scripted.generate(
        prompt, do_sample=False, max_new_tokens=len(wanted), eos_token_id=tokenizer.eos_id, pad_token_id=0
    )[0, 1:].tolist()
    assert written == wanted
    shown = TextStream(tokenizer, [])
    assert "".join([*(shown.add(token) for token in written[:-1]), shown.finish()]) == text


def test_both_ends_are_a_small_share_of_a_table_of_tokens() -> None:
    for head in HEADS:
        model = skeleton(config_from("models/llama-bytes", [f"head={head}"], vocab_size=50_257))
        rows = {row["name"]: row["parameters"] for row in stage_table(model)}
        ends = model_facts(model)["ends"]
        assert ends["parameters"] == rows["embedding"] + rows["head"]
        assert ends["of_untied_tables"] == ends["parameters"] / (2 * 50_257 * 768) <= 0.1
        assert ends["of_tied_tables"] == ends["parameters"] / (50_257 * 768) <= 0.2


def test_show_prints_the_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "models/llama-bytes", "vocab_size=50257"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2,169,216 parameters: 2.8% of untied tables of tokens, 5.6% of a tied one" in shown
    assert main(["show", "models/llama", "vocab_size=50257"]) == 0
    assert "tables of tokens" not in capsys.readouterr().out


def test_flops_are_those_of_all_symbols_of_a_piece() -> None:
    rows = {row["name"]: row for row in stage_table(byte_model(layers=1))}
    size, width, hidden = 4, 8, 64  # a SwiGLU of this width
    block = size * 2 * (4 * width * width + 3 * width * hidden) + 4 * width * size * size
    assert rows["embedding"]["flops_per_token"] == block + 2 * width * 16
    assert rows["head"]["flops_per_token"] == block + 2 * 16 * size * width + size * 2 * width * (SYMBOLS + 1)


def test_bytes_of_different_widths_cannot_be_tied() -> None:
    ends: dict[str, Any] = {"embedding": {"kind": "bytes", **SMALL}, "head": {"kind": HEADS[0], **SMALL, "width": 16}}
    with pytest.raises(BraidError, match="bytes of one width, and the head has 16, the embedding 8"):
        tiny_model(**ends)
    assert not tiny_model(**ends, tie_embeddings=False).tied
    with pytest.raises(BraidError, match="'bytes_parallel' has nothing to share with the embedding 'tokens'"):
        tiny_model(head="bytes_parallel")


def test_transformers_finds_no_table_to_tie_in_a_head_of_bytes(model: Any) -> None:
    """Before version 5 it would give the head the `weight` of the embedding, and there is none."""
    assert model.get_output_embeddings() is None
    plain = tiny_model()
    assert plain.get_output_embeddings() is plain.head


def test_a_width_that_heads_cannot_divide() -> None:
    with pytest.raises(BraidError, match="a width of 9 does not divide into 2 heads"):
        tiny_model(embedding={"kind": "bytes", "width": 9, "heads": 2})
