"""Tokens that leave early: after one layer, or once the model is sure."""

from typing import Any

import pytest
import torch
from torch import Tensor

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.decoding.early_exits import (
    ConfidentDecoder,
    EarlyExit,
    SpeculativeDecoder,
    drafting_layer,
    early_layers,
    leave_after,
)
from braidlm.core.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.tiny_models import random_ids, tiny_model

DEEP: list[Any] = [{"block": {"layers": 5}}]
SURE = 0.17
NARROW: list[Any] = ["block", {"project": {"to": 8}}, "block", {"project": {"to": 16}}, "block"]


def streams(model: BraidForCausalLM, text: list[int]) -> list[Tensor]:
    """The logits after each layer at the last token of a text."""
    with torch.no_grad():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        last = [model.model.norm(state[:, -1]) for state in states[1:-1]]
        return [model.head(state)[0] for state in [*last, states[-1][:, -1]]]


@pytest.mark.parametrize("layer", [1, 3, 5])
def test_an_exit_after_a_layer_is_the_full_forward_up_to_it(layer: int) -> None:
    model, prompt = tiny_model(torch.float64, stages=DEEP), random_ids(1, 4)[0].tolist()
    early_exit = EarlyExit(layer=layer)
    expected = []
    text = list(prompt)
    for _ in range(8):
        expected.append(int(streams(model, text)[layer - 1].argmax()))
        text.append(expected[-1])
    early_exit.prepare(model)
    decoder = early_exit.decoder(model, 1, 20)
    assert [t for (t,), _ in decode_tokens(decoder, [prompt], 8, Sampling(0))] == expected
    assert decoder.mean_layer == (layer if layer < 5 else None)


@pytest.mark.parametrize("confidence", [0.02, 0.2, 0.25, 1.0])
@pytest.mark.parametrize("layers", [[1, 2, 3, 4], [2]], ids=str)
def test_a_sure_token_leaves_and_changes_nothing_for_others(confidence: float, layers: list[int]) -> None:
    """Each token is that of the first sure exit of a full pass over the text so far: skipped layers are made up for."""
    model, prompt = tiny_model(torch.float64, stages=DEEP), random_ids(1, 4)[0].tolist()
    decoder = ConfidentDecoder(model, 1, 40, layers, confidence)
    text, left = list(prompt), []
    for (token,), logits in decode_tokens(decoder, [prompt], 25, Sampling(1.0, seed=3)):
        by_layer = streams(model, text)
        sure = [layer for layer in layers if float(by_layer[layer - 1].softmax(-1).max()) >= confidence]
        left.append(min(sure, default=5))
        torch.testing.assert_close(logits[0], by_layer[left[-1] - 1], rtol=0, atol=1e-10)
        text.append(token)  # type: ignore[arg-type]
    assert decoder.left_after == left
    assert decoder.mean_layer == sum(left) / len(left)
    if confidence in (0.2, 0.25) and len(layers) > 1:
        assert len(set(left)) > 1, "some leave early and some do not, or this test would show little"


def test_several_texts_leave_once_all_are_sure() -> None:
    model = tiny_model(torch.float64, stages=DEEP)
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (2, 5, 3)]
    decoder = ConfidentDecoder(model, 3, 40, [1, 2, 3, 4], SURE)
    texts = [list(prompt) for prompt in prompts]
    for step, (tokens, logits) in enumerate(decode_tokens(decoder, prompts, 12, Sampling(1.0, seed=3))):
        by_text = [streams(model, text) for text in texts]
        sure = [
            layer
            for layer in range(1, 5)
            if all(float(by_layer[layer - 1].softmax(-1).max()) >= SURE for by_layer in by_text)
        ]
        assert decoder.left_after[step] == min(sure, default=5)
        for row, by_layer in enumerate(by_text):
            torch.testing.assert_close(logits[row], by_layer[decoder.left_after[step] - 1], rtol=0, atol=1e-10)
            texts[row].append(tokens[row])  # type: ignore[arg-type]
    assert len(set(decoder.left_after)) > 1


def test_decoders_by_what_is_asked_for() -> None:
    model = tiny_model(stages=[{"block": {"layers": 8}}])
    assert type(EarlyExit().decoder(model, 1, 8)) is Decoder
    drafting = EarlyExit(speculate=3).decoder(model, 1, 8)
    assert isinstance(drafting, SpeculativeDecoder)
    assert (drafting.layer, drafting.drafts) == (2, 3)
    confident = EarlyExit(layer=3, confidence=0.5).decoder(model, 1, 8)
    assert isinstance(confident, ConfidentDecoder)
    assert confident.segments == [(0, 3), (3, None)]


def test_layers_that_can_be_left_early() -> None:
    narrow = tiny_model(stages=NARROW)
    assert early_layers(narrow) == [1]
    assert drafting_layer(narrow) == 1
    with pytest.raises(BraidError, match=r"cannot be left after layer 2\n.*16, after layers 1, 3"):
        leave_after(narrow, 2)


@pytest.mark.parametrize(
    ("stages", "options", "text"),
    [
        (DEEP, {"layer": 6}, "cannot be left after layer 6\n.*after layers 1, 2, 3, 4, 5"),
        (DEEP, {"layer": 9, "speculate": 2}, "cannot be left after layer 9"),
        (DEEP, {"layer": 5, "speculate": 2}, "only a layer before the last .*\n.*model: 1, 2, 3, 4"),
        (DEEP, {"layer": 5, "confidence": 0.5}, "only a layer before the last"),
        (["block"], {"speculate": 2}, "only a layer before the last .*\n.*none"),
    ],
)
def test_what_a_model_cannot_do_is_refused(stages: list[Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(BraidError, match=text):
        EarlyExit(**options).prepare(tiny_model(stages=stages))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layer": 0}, "layer: expected a whole number from 1 to"),
        ({"confidence": 0.0}, "confidence: expected a number above 0"),
        ({"speculate": 0}, "speculate: expected a whole number from 1 to"),
        ({"confidence": 0.5, "speculate": 2}, "either leave early when the model is sure, or are drafts"),
    ],
)
def test_impossible_exits_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BraidError, match=text):
        EarlyExit(**options)
