"""Fine-tuning an average: its members learn apart, as they would alone, and what they answer is averaged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from braidlm.core.models.folders import load_model
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.finetuning.classifier import classify, make_classifier, member_outputs
from braidlm.evals.finetuning.loop import Hyperparameters, TrainingStep
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.tasks import TASKS
from tests.evals.labelled_examples import TOKENIZER, average_of, write_answerable
from tests.tiny_models import random_ids

IDS, LAST = random_ids(6, 9, vocab_size=TOKENIZER.vocab_size), torch.tensor([8, 3, 5, 8, 0, 7])
CLASSES = torch.tensor([0, 1, 2, 1, 0, 2])
EXPERTS = {
    "block": {"feed": {"kind": "swiglu", "hidden": 8, "experts": {"names": 3, "router": {"losses": {"switch": 1.0}}}}}
}
KINDS: dict[str, list[dict[str, Any]]] = {
    "a stack": [{}, {}, {}],
    "two widths": [{}, {"width": 24}],
    "dense and routed": [{}, EXPERTS],
    "experts": [EXPERTS, EXPERTS],
}


@pytest.fixture(params=KINDS)
def average_and_members(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, list[Any]]:
    """As classifiers of three classes; the members' heads are their parts of the average's."""
    made, apart = average_of(tmp_path, KINDS[request.param])
    classifier: Any = make_classifier(load_model(made), 3)
    members: list[Any] = [make_classifier(load_model(folder), 3) for folder in apart]
    widths = [member.score.weight.shape[1] for member in members]
    with torch.no_grad():
        for member, part in zip(members, classifier.score.weight.split(widths, 1), strict=True):
            member.score.weight.copy_(part)
    return classifier, members


def train(classifier: Any, labels: Tensor, steps: int = 5) -> None:
    classifier.train()
    step = TrainingStep(classifier, Hyperparameters(learning_rate=1e-2), torch.device("cpu"))
    for _ in range(steps):
        step(IDS, LAST, labels, 1e-2)
    classifier.eval()


def test_members_learn_as_they_do_alone(average_and_members: tuple[Any, list[Any]]) -> None:
    """AdamW divides by the size of gradients, so that a mean over members is no smaller rate for any of them."""
    classifier, members = average_and_members
    before = classify(classifier, IDS, LAST)[0]
    for one in (classifier, *members):
        train(one, CLASSES)
    with torch.no_grad():
        alone = torch.stack([classify(member, IDS, LAST)[0] for member in members])
        torch.testing.assert_close(member_outputs(classifier, IDS, LAST)[0], alone, rtol=0, atol=2e-3)
        answers = classify(classifier, IDS, LAST)[0]
    torch.testing.assert_close(answers.exp(), alone.softmax(-1).mean(0), rtol=0, atol=1e-3)
    assert (answers.exp() - before.exp()).abs().max() > 0.1


def test_numbers_of_members_are_averaged(tmp_path: Path) -> None:
    made, _ = average_of(tmp_path, KINDS["two widths"])
    classifier = make_classifier(load_model(made), 1)
    train(classifier, torch.linspace(0, 5, 6))
    with torch.no_grad():
        outputs, found = member_outputs(classifier, IDS, LAST)[0], classify(classifier, IDS, LAST)[0]
    torch.testing.assert_close(found, (outputs[0] + outputs[1]) / 2)
    assert not torch.allclose(outputs[0], outputs[1])


def test_a_member_that_is_switched_off_has_no_say(tmp_path: Path) -> None:
    made, _ = average_of(tmp_path, KINDS["a stack"])

    def outputs(*active: str) -> Tensor:
        torch.manual_seed(1)  # the same head
        return member_outputs(make_classifier(load_model(made, paths=active or None), 3), IDS, LAST)[0]

    everyone = outputs()
    assert len(everyone) == 3
    torch.testing.assert_close(outputs("c", "a"), everyone[[0, 2]])
    torch.testing.assert_close(outputs("b"), everyone[[1]])


@pytest.mark.parametrize("method", ["full", "lora"])
def test_from_a_folder_to_a_score(tmp_path: Path, method: Any) -> None:
    made, _ = average_of(tmp_path, KINDS["a stack"])
    settings = Settings(
        finetune=method, finetune_epochs=6, finetune_batch_size=16, finetune_learning_rate=5e-3, finetune_length=40
    )
    task = TASKS["glue_sst2"]().open(write_answerable(tmp_path / "data"))
    found = task.evaluate("glue_sst2", EvaluatedModel(Scorer(load_model(made)), TOKENIZER, settings=settings))
    assert found.score > 90
