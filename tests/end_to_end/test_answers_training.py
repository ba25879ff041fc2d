"""Training on answers: the loss is that of each answer after its question, computed one item at a time."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from braidlm.data.loading.chunking import Documents
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.packing.packed_data import PackedData
from braidlm.data.packing.prepare import prepare
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.train import train
from tests.plain_losses import plain_losses
from tests.tiny_models import tiny_model
from tests.training.tiny_runs import merged, records, tiny_recipe

ALONE = {"attention": {"heads": 2, "window": 1}, "feed": {"kind": "swiglu", "hidden": 24}}
"""A block in which no token sees another one, so that items of one row cannot either."""


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> PackedData:
    folder = tmp_path_factory.mktemp("data") / "arithmetic"
    options = {"fields": "question", "answer": "answer", "documents": 60}
    return prepare("arithmetic", folder, tokenizer="bpe", vocab_size=320, workers=1, **options)


def item_losses(model: Any, data: PackedData, numbers: np.ndarray) -> Tensor:
    """The summed loss of each answer's tokens, from the EOS before the item on."""
    losses = []
    for number in numbers:
        item = slice(*data.document_starts[number : number + 2])
        ids = torch.tensor([[data.manifest.eos_id, *data.tokens[item].tolist()]])
        each = cross_entropy(model(input_ids=ids[:, :-1]).logits[0].float(), ids[0, 1:], reduction="none")
        losses.append(each[torch.from_numpy(data.targets[item] == 1)].sum())
    return torch.stack(losses)


@pytest.mark.parametrize("together", [True, False])
def test_the_loss_of_rows_is_that_of_items(problems: PackedData, together: bool) -> None:
    """Of several items in a row, where no token sees another; and of one in each row, where all see all."""
    longest = int(np.diff(problems.document_starts).max())
    length = 4 * longest if together else longest
    data = TokenStream(problems, Subset(0.0, 0.2))
    chunking = Documents()
    rows = len(chunking.starts(data, length, 0, 0))
    assert (rows < data.documents / 2) if together else (rows == data.documents)
    batch = Loader([data], chunking, length, rows=rows).next_batch()
    architecture = {"context": length, "positions": "rope"} | ({"block": ALONE} if together else {})
    model: BraidForCausalLM = tiny_model(vocab_size=problems.manifest.vocab_size, **architecture)

    inputs, labels = torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels)
    loss, _, _ = plain_losses(model, inputs, labels, torch.tensor(float(batch.target_count)))
    losses = item_losses(model, problems, data.chosen)
    expected = losses.sum() / batch.target_count
    torch.testing.assert_close(loss, expected)
    gradients, by_item = (torch.autograd.grad(each, list(model.parameters())) for each in (loss, expected))
    torch.testing.assert_close(gradients, by_item)


def test_validation_is_bits_per_byte_of_answers(problems: PackedData, tmp_path: Path) -> None:
    recipe = tiny_recipe(
        {"arithmetic": problems.folder},
        tmp_path / "run",
        model={"block": ALONE, "context": 128},
        data={"length": 128, "chunking": "documents"},
        validation={"every": "12 steps", "tokens": 100_000},
    )
    run = train(merged(recipe, {"data": {"sets": {"arithmetic": {"holdout": 0.2}}}}))
    *_, last = records(run.folder, "validation")
    model = AutoModelForCausalLM.from_pretrained(run.model, trust_remote_code=True)
    held_out = Subset(0.8, 1.0).choose(problems.manifest.documents)
    with torch.no_grad():
        nats = item_losses(model, problems, held_out).sum().item()
    size = int(problems.document_target_bytes[held_out].sum())
    found = last["sets"]["arithmetic"]
    assert found["bytes"] == size
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
