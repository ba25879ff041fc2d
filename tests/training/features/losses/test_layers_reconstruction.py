"""The reconstruction loss: the head's loss of the inputs, read from their embeddings."""

import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.model.heads.losses import IGNORED
from braidlm.model.span import LayerRecord
from braidlm.training.features.extra_losses import ExtraLossConfig, TrainingPass
from braidlm.training.features.losses.layers import Reconstruction
from tests.tiny_models import random_ids, tiny_model

BYTES = {"width": 8, "heads": 2, "piece": 4}


def test_it_is_what_the_head_says_of_each_embedding() -> None:
    model = tiny_model(
        torch.float64, embedding={"kind": "bytes", **BYTES}, head={"kind": "bytes_autoregressive", **BYTES}
    ).train()
    inputs, labels, record = random_ids(2, 5), random_ids(2, 5, seed=1), LayerRecord([])
    labels[0, 3:] = IGNORED
    hidden = model.run(inputs, record=record).hidden
    assert record.hidden_states is not None
    done = TrainingPass(model, inputs, labels, torch.tensor(8.0), hidden, tuple(record.hidden_states))
    loss = Reconstruction(ExtraLossConfig(), model)(done)
    loss.backward()
    assert all(p.grad is not None for end in (model.model.embedding, model.head) for p in end.parameters())
    assert all(p.grad is None for p in model.model.stages.parameters()), "no layer is between the two"

    tokens = inputs[labels != IGNORED]
    with torch.no_grad():
        vectors = model.model.norm(model.model.embedding(tokens))
        expected = -model.head.log_probabilities(vectors, torch.arange(8), tokens).sum() / 8
    torch.testing.assert_close(loss.detach(), expected, rtol=0, atol=1e-9)


def test_a_head_that_reads_another_width_is_refused() -> None:
    model = tiny_model(stages=[{"project": {"to": 24}}], tie_embeddings=False)
    with pytest.raises(BraidError, match="reads a width of 24 and the embedding has 16"):
        Reconstruction(ExtraLossConfig(), model)
