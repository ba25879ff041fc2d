"""Sequence classification: which token is read, and which loss is used."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from braidlm.model.modeling_braid import BraidForSequenceClassification
from tests.tiny_models import random_ids, randomised, tiny_config

ROWS = [random_ids(1, length, seed=length)[0] for length in (8, 3, 1)]


def classifier(labels: int = 3, **config: Any) -> BraidForSequenceClassification:
    model_config = tiny_config()
    model_config.num_labels = labels
    for name, value in config.items():
        setattr(model_config, name, value)
    return randomised(BraidForSequenceClassification(model_config)).double().eval()


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("given_mask", [True, False], ids=["mask", "pad token"])
def test_the_last_real_token_decides_whichever_side_is_padded(left: bool, given_mask: bool) -> None:
    model = classifier(pad_token_id=36)
    rows = [row % 36 for row in ROWS]  # no padding token inside
    ids, mask = torch.full((3, 8), 36), torch.zeros(3, 8, dtype=torch.long)
    for i, row in enumerate(rows):
        real = slice(8 - len(row), None) if left else slice(len(row))
        ids[i, real], mask[i, real] = row, 1
    got = model(ids, attention_mask=mask if given_mask else None).logits
    for i, row in enumerate(rows):
        hidden = model.model(row[None]).last_hidden_state[0, -1]
        torch.testing.assert_close(got[i], model.score(hidden), rtol=0, atol=1e-10)


def test_without_padding_the_last_token_decides() -> None:
    model, ids = classifier(), random_ids(2, 5)
    expected = model.score(model.model(ids).last_hidden_state[:, -1])
    torch.testing.assert_close(model(ids).logits, expected)


def test_a_single_label_is_cross_entropy() -> None:
    model, ids = classifier(), random_ids(4, 5)
    labels = torch.tensor([0, 2, 1, 2])
    output = model(ids, labels=labels)
    expected = -output.logits.log_softmax(-1)[torch.arange(4), labels].mean()
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_one_output_is_regression(shape: tuple[int, ...]) -> None:
    model, ids = classifier(labels=1), random_ids(4, 5)
    labels = torch.tensor([0.5, -1.0, 2.0, 0.0])
    output = model(ids, labels=labels.view(shape))
    expected = ((output.logits[:, 0] - labels) ** 2).mean()
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-6, atol=0)


def test_floating_labels_are_several_labels() -> None:
    model, ids = classifier(), random_ids(2, 5)
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    output = model(ids, labels=labels)
    p = output.logits.sigmoid()
    expected = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-5, atol=0)


def test_the_configurations_problem_type_decides_the_loss() -> None:
    ids, labels = random_ids(2, 5), torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    regression = classifier(problem_type="regression")(ids, labels=labels)
    torch.testing.assert_close(regression.loss, F.mse_loss(regression.logits.float(), labels))
    several = classifier(problem_type="multi_label_classification")(ids, labels=labels.long())
    expected = F.binary_cross_entropy_with_logits(several.logits.float(), labels)
    torch.testing.assert_close(several.loss, expected)


def test_gradients_reach_every_parameter() -> None:
    model = classifier().train()
    model(random_ids(4, 6), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_a_saved_classifier_loads_equal(tmp_path: Any) -> None:
    model, ids = classifier().float(), random_ids(2, 5)
    model.save_pretrained(tmp_path)
    loaded = BraidForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.num_labels == 3
    assert torch.equal(loaded(ids).logits, model(ids).logits)
