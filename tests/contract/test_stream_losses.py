"""Every extra loss on every head: the loss is a number, and its gradient reaches the model and what is the loss's own.

A head may read more than the stream, which losses of the stream must not see.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.data.tokenizing.tokenizer import SpecialTokens
from braidlm.model.config.strict import decode
from braidlm.model.heads.ends import heads
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.span import LayerRecord
from braidlm.training.features.distill.distillation import OnlineDistillation
from braidlm.training.features.distill.teachers import DistillConfig, TeacherConfig, Teachers
from braidlm.training.features.extra_losses import ExtraLoss, build_extra_losses, extra_losses
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.objective import Objective
from tests.contract.part_variants import architecture
from tests.tiny_models import random_ids, tiny_model

TOKENIZER = bytes_tokenizer(SpecialTokens.parse(["eos=<|endoftext|>", "mask=<mask>"]))
TEXTS = ["One. Two! Three is here. Four?", "A dog. A cat? A cow in a barn!", "It is. Or is it? It must be.. "]
OPTIONS: dict[str, dict[str, Any]] = {"early_exit": {"weights": "equal", "curriculum": "all"}}
"""So that a model of two layers has an exit in the first step."""
DISTILL = "distill"


def rows() -> Tensor:
    """[row, time] of one length."""
    return torch.tensor([TOKENIZER.encode(text)[:30] for text in TEXTS])


@pytest.fixture(params=list(heads))
def model(request: pytest.FixtureRequest) -> BraidForCausalLM:
    return tiny_model(vocab_size=TOKENIZER.vocab_size, **architecture("head", request.param, {})).train()


def build(name: str, model: BraidForCausalLM) -> ExtraLoss:
    torch.manual_seed(0)
    if name == DISTILL:
        other = tiny_model(seed=2, width=12, block={"attention": {"heads": 2}}, vocab_size=TOKENIZER.vocab_size)
        teachers = Teachers([other], [1.0], TOKENIZER.vocab_size, 1.0)
        return OnlineDistillation(DistillConfig([TeacherConfig("other")], hidden=0.5), model, teachers)
    choices = decode(TrainingConfig, {"budget": "1 step", "losses": [{name: OPTIONS.get(name, {})}]}).losses
    return build_extra_losses(choices, model)[name]


@pytest.mark.parametrize("name", [*extra_losses, DISTILL])
def test_every_extra_loss_trains_a_model_with_every_head(name: str, model: BraidForCausalLM) -> None:
    if name == "masked" and model.model.head_slots:
        with pytest.raises(BraidError, match="its head judges every token by those before it"):
            build(name, model)
        return
    loss, ids = build(name, model), rows()
    loss.begin_run(len(ids), seed=0)
    loss.read_tokenizer(TOKENIZER)
    loss.begin_step(0, 0.5)
    found = Objective(model, extra={name: loss})(ids[:, :-1], ids[:, 1:], torch.tensor(float(ids[:, 1:].numel())))
    assert found.text.isfinite()
    assert found.extra[name] > 0
    found.extra[name].backward()
    for parameter in (*model.model.embedding.parameters(), *loss.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0


def test_the_stream_is_the_last_layers_whatever_the_head_reads(model: BraidForCausalLM) -> None:
    ids, record = random_ids(2, 9), LayerRecord([])
    done = model.run(ids, record=record)
    assert torch.equal(done.hidden, (record.hidden_states or [])[-1])
    assert done.hidden.shape[-1] == model.model.width_out
    assert bool(done.read) == bool(model.model.head_slots)
