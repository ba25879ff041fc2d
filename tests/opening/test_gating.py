"""Gates on decoders of transformers: what they compute, and that nothing around them notices."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Trainer, TrainingArguments

from braidlm.core.errors import BraidError
from braidlm.model.config.strict import decode
from braidlm.model.gates import GatedLayer, GatesConfig
from braidlm.opening.gating import attach, detach, find_parts, gates_of, without
from tests.opening.random_decoders import (
    CONFIGS,
    DEPTH,
    WIDTH,
    open_gates,
    tiny_decoder,
    tiny_decoder_config,
    token_ids,
)

KINDS: dict[str, Any] = {
    "matrix": "matrix",
    "matrix with bias": {"kind": "matrix", "bias": True},
    "low rank": {"kind": "matrix", "rank": 3},
    "vector": "vector",
    "scalar": "scalar",
}


def gates_config(kind: Any = "vector", layers: list[int] | None = None) -> GatesConfig:
    return decode(GatesConfig, {"kind": kind, "layers": layers})


def gated_decoder(name: str, kind: Any = "matrix", opened: bool = True, **options: Any) -> PreTrainedModel:
    model = tiny_decoder(name, **options)
    attach(model, gates_config(kind))
    if opened:
        open_gates(gates_of(model))
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    return model(ids, **options).logits


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attaching_changes_no_logit(name: str, kind: Any, dtype: torch.dtype) -> None:
    model, ids = tiny_decoder(name, dtype=dtype), token_ids(2, 9)
    before, names = logits(model, ids), list(model.state_dict())
    attach(model, gates_config(kind))
    assert torch.equal(logits(model, ids), before)
    assert list(gates_of(model)) == list(range(2, DEPTH + 1))
    assert [one for one in model.state_dict() if ".gate." not in one] == names
    assert all(parameter.dtype == torch.float32 for gate in gates_of(model).values() for parameter in gate.parameters())
    open_gates(gates_of(model))
    assert not torch.equal(logits(model, ids), before)
    with without(model, gates_of(model)):
        assert torch.equal(logits(model, ids), before)
    assert not torch.equal(logits(model, ids), before)
    detach(model)
    assert torch.equal(logits(model, ids), before)
    assert list(model.state_dict()) == names
    assert not any(isinstance(module, GatedLayer) for module in model.modules())


class RecordStream:
    """The reference: what goes into each plain layer and comes out, with the gates added by hooks from outside."""

    def __init__(self, layers: nn.ModuleList, gates: dict[int, Any]):
        self.outputs: list[Tensor] = []
        self.handles = []
        for number, layer in enumerate(layers, start=1):
            self.handles.append(layer.register_forward_hook(self._hook(gates.get(number)), with_kwargs=True))

    def _hook(self, gate: Any) -> Any:
        def add(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            hidden, *rest = output if isinstance(output, tuple) else (output,)
            if gate is not None:
                hidden = hidden + gate(args[0] if args else kwargs["hidden_states"])
            self.outputs.append(hidden)
            return (hidden, *rest) if isinstance(output, tuple) else hidden

        return add


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_gate_adds_its_output_for_the_layers_input(name: str, kind: Any) -> None:
    """h_i = B_i(h_{i-1}) + G_i(h_{i-1}), in the logits and in the hidden states that transformers returns."""
    model, ids = gated_decoder(name, kind, dtype=torch.float64), token_ids(2, 9)
    for gate in gates_of(model).values():
        gate.double()
    got = model(ids, output_hidden_states=True)
    plain = tiny_decoder(name, dtype=torch.float64)
    record = RecordStream(find_parts(plain).layers, gates_of(model))
    expected = plain(ids)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-12)
    assert len(got.hidden_states) == DEPTH + 1
    for ours, theirs in zip(got.hidden_states[1:-1], record.outputs[:-1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_hidden_states_recorded_before_attaching_do_not_hide_the_gates(name: str) -> None:
    """transformers installs what records them at the first call, on the layers that are there then."""
    model, ids = tiny_decoder(name), token_ids(1, 5)
    model(ids, output_hidden_states=True)
    attach(model, gates_config("matrix"))
    open_gates(gates_of(model))
    late = model(ids, output_hidden_states=True).hidden_states
    early = gated_decoder(name)(ids, output_hidden_states=True).hidden_states
    assert len(late) == len(early)
    assert all(torch.equal(a, b) for a, b in zip(late, early, strict=True))


def test_the_cache_gives_the_full_forward(name: str) -> None:
    model, ids = gated_decoder(name), token_ids(2, 9)
    first = model(ids[:, :5], use_cache=True)
    second = model(ids[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat((first.logits, second.logits), 1), logits(model, ids), rtol=0, atol=1e-5)


def test_left_padding_changes_nothing(name: str) -> None:
    model, ids = gated_decoder(name), token_ids(1, 6)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    padded = torch.cat((token_ids(1, 3, seed=5), ids), 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got = logits(model, padded, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(got[:, 3:], logits(model, ids), rtol=0, atol=1e-5)


def test_generate_goes_through_the_gates(name: str) -> None:
    model, ids = gated_decoder(name), token_ids(1, 5)
    made = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=2)
    expected = ids
    for _ in range(6):
        expected = torch.cat((expected, logits(model, expected)[:, -1:].argmax(-1)), 1)
    assert torch.equal(made, expected)


def gradients(model: PreTrainedModel, ids: Tensor) -> Iterator[Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        yield parameter.grad.clone()


def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    model, ids = gated_decoder(name).train(), token_ids(2, 9)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = list(gradients(model, ids))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for one, other in zip(plain, gradients(model, ids), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = token_ids(1, 8, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("kind", ["vector", {"kind": "matrix", "rank": 3, "bias": True}], ids=str)
def test_training_the_gates_alone_leaves_the_base_bit_identical(name: str, kind: Any, tmp_path: Any) -> None:
    """By transformers' own Trainer."""
    model, ids = tiny_decoder(name), token_ids(1, 7)
    base, before = copy.deepcopy(model.state_dict()), logits(model, ids)
    model.requires_grad_(False)
    attach(model, gates_config(kind))
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, learning_rate=0.1, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=Rows()).train()
    assert all(parameter.abs().max() > 0 for gate in gates_of(model).values() for parameter in gate.parameters())
    state = model.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in base.items())
    assert not torch.equal(logits(model.eval(), ids), before)
    detach(model)
    assert torch.equal(logits(model.eval(), ids), before)


@pytest.mark.parametrize("config", [MistralConfig, LlamaConfig], ids=["mistral 7b", "llama 7b"])
@pytest.mark.parametrize(("kind", "each"), [("matrix", 4096 * 4096), ("vector", 4096), ("scalar", 1)])
def test_the_gates_of_a_7b_model_have_as_many_parameters_as_the_paper_says(config: Any, kind: str, each: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config())
    attach(model, gates_config(kind))
    gates = gates_of(model)
    assert len(gates) == 31
    assert sum(parameter.numel() for gate in gates.values() for parameter in gate.parameters()) == 31 * each
    assert all(parameter.is_meta for gate in gates.values() for parameter in gate.parameters())


def test_layers_can_be_chosen(name: str) -> None:
    model = tiny_decoder(name)
    attach(model, gates_config("vector", [4, 1]))
    assert list(gates_of(model)) == [1, 4]


def test_other_libraries_see_the_layers_own_class() -> None:
    model = gated_decoder("llama")
    plain = tiny_decoder("llama")
    for ours, theirs in zip(find_parts(model).layers, find_parts(plain).layers, strict=True):
        assert isinstance(ours, type(theirs))
        assert type(ours).__name__ == type(theirs).__name__  # `_no_split_modules` and FSDP's policies name classes
    copied = copy.deepcopy(model)
    ids = token_ids(1, 5)
    assert torch.equal(logits(copied, ids), logits(model, ids))
    open_gates(gates_of(copied), seed=3)
    assert not torch.equal(logits(copied, ids), logits(model, ids))


def test_a_gate_has_the_stream_s_type_under_autocast() -> None:
    """The stream of a float32 model stays float32 under autocast, gate or not."""
    for kind in KINDS.values():
        model, ids = tiny_decoder("llama"), token_ids(1, 5)
        with torch.autocast("cpu", torch.bfloat16):
            before = logits(model, ids)
            attach(model, gates_config(kind))
            assert torch.equal(logits(model, ids), before)


class TestRefusals:
    def test_attached_twice(self) -> None:
        model = gated_decoder("llama")
        with pytest.raises(BraidError, match="has gates already"):
            attach(model, gates_config("vector"))

    def test_a_layer_that_is_not_there(self) -> None:
        model = tiny_decoder("llama")
        with pytest.raises(BraidError, match="there is no layer 5: the model has 4"):
            attach(model, gates_config("vector", [2, 5]))
        assert not gates_of(model)

    def test_a_model_of_one_layer(self) -> None:
        model = AutoModelForCausalLM.from_config(tiny_decoder_config("llama", num_hidden_layers=1))
        with pytest.raises(BraidError, match="of one layer"):
            attach(model, gates_config())

    def test_a_rank_that_saves_nothing(self) -> None:
        with pytest.raises(BraidError, match=f"rank {WIDTH}"):
            attach(tiny_decoder("llama"), gates_config({"kind": "matrix", "rank": WIDTH}))


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(["llama", "gpt2", "gpt-neox"]),
    kind=st.sampled_from(list(KINDS.values())),
    layers=st.sets(st.integers(1, DEPTH), min_size=1),
    data=st.data(),
)
def test_some_gates_taken_away_are_those_gates_switched_off(
    name: str, kind: Any, layers: set[int], data: st.DataObject
) -> None:
    model, ids = tiny_decoder(name), token_ids(1, 5)
    plain = logits(model, ids)
    attach(model, gates_config(kind, sorted(layers)))
    assert torch.equal(logits(model, ids), plain)
    open_gates(gates_of(model))
    gone = data.draw(st.sets(st.sampled_from(sorted(layers))))
    with without(model, gone):
        expected = logits(model, ids)
    detach(model, gone)
    assert set(gates_of(model)) == layers - gone
    assert torch.equal(logits(model, ids), expected)
