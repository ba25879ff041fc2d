"""Fine-tuning: what can be learned is, from the last real token; seeds, patience, and nothing else is touched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from braidlm.core.errors import BraidError
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.finetuning.classifier import classify, make_classifier
from braidlm.evals.finetuning.labelled_task import LabelledTask
from braidlm.evals.finetuning.loop import FineTunedModel, fine_tune, hyperparameters_for, predict
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.tasks import TASKS
from tests.evals.labelled_examples import STACKED, TOKENIZER, answerable, evaluated, write_answerable, write_rows

QUICK = {"finetune_epochs": 6, "finetune_batch_size": 16, "finetune_learning_rate": 5e-3, "finetune_length": 40}


def opened(folder: Path, name: str = "glue_sst2") -> LabelledTask:
    return TASKS[name]().open(folder)


def tuned(task: LabelledTask, model: EvaluatedModel, seed: int = 42) -> FineTunedModel:
    hyperparameters = hyperparameters_for(task.data_set.name, model.settings)
    return fine_tune(model.model, task.tokenize(model, hyperparameters), hyperparameters, seed)


def small_gpt2() -> EvaluatedModel:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 48, "vocab_size": TOKENIZER.vocab_size}
    return EvaluatedModel(Scorer(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))), TOKENIZER)


@pytest.mark.parametrize("architecture", [{}, STACKED], ids=["plain", "routed"])
def test_what_can_be_learned_is_learned(tmp_path: Path, architecture: dict[str, Any]) -> None:
    task = opened(write_answerable(tmp_path))
    found = task.evaluate("glue_sst2", evaluated(Settings(**QUICK), **architecture))
    assert found.chance == pytest.approx(65.0)  # 26 of the 40 are negative
    assert found.score > 90
    assert found.metric == "accuracy, %"
    assert found.count == 40
    assert set(found.also) == {"F1", "Matthews"}
    assert found.items["sst2"] == pytest.approx([int(a) for a in found.items["sst2"]])
    right = np.mean(np.array(found.items["sst2"]) == task.valid.labels)
    assert 100 * right == pytest.approx(found.score)
    share = found.score / 100
    assert found.standard_error == pytest.approx(100 * (share * (1 - share) / 40) ** 0.5)
    assert found.notes["majority class"] == pytest.approx(65.0)


def test_numbers_are_learned(tmp_path: Path) -> None:
    rows = [{"sentence1": f"{'a' * (i % 7)}{i % 6}", "sentence2": f"{i % 6}", "label": i % 6 * 1.0} for i in range(90)]
    write_rows(tmp_path / "stsb.train.jsonl", [{**row, "label": min(5.0, row["label"])} for row in rows])
    write_rows(tmp_path / "stsb.valid.jsonl", rows[:30])
    found = opened(tmp_path, "glue_stsb").evaluate("glue_stsb", evaluated(Settings(**{**QUICK, "finetune_epochs": 12})))
    assert found.score > 80
    assert found.chance == 0.0
    assert set(found.also) == {"Pearson", "Spearman"}
    assert "majority class" not in found.notes


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_the_last_real_token_decides_whichever_side_is_filled_up(tmp_path: Path, left: bool) -> None:
    """Against the model's own classifier with a mask, which a test of its own compares with unpadded texts."""
    model = evaluated(**STACKED)
    classifier: Any = make_classifier(model.model, 2).eval()
    rows = [TOKENIZER.encode(row["sentence"]) for row in answerable(9, seed=3)]
    width = max(map(len, rows))
    ids, mask = torch.zeros(9, width, dtype=torch.long), torch.zeros(9, width, dtype=torch.long)
    for index, row in enumerate(rows):
        columns = slice(width - len(row), None) if left else slice(len(row))
        ids[index, columns], mask[index, columns] = torch.tensor(row), 1
    behind = torch.tensor([row + [0] * (width + 3 - len(row)) for row in rows])
    found, _ = classify(classifier, behind, torch.tensor([len(row) - 1 for row in rows]))
    torch.testing.assert_close(found, classifier(ids, attention_mask=mask).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", [evaluated(), evaluated(**STACKED), small_gpt2()], ids=["plain", "routed", "gpt2"])
def test_answers_are_those_of_one_text_after_another(tmp_path: Path, model: EvaluatedModel) -> None:
    task = opened(write_answerable(tmp_path))
    tokenized = task.tokenize(model, hyperparameters_for("sst2", model.settings))
    classifier: Any = make_classifier(model.model, 2).eval()
    torch.nn.init.normal_(classifier.score.weight)
    expected = []
    for text, _ in task.valid.texts:
        hidden = classifier.base_model(torch.tensor([TOKENIZER.encode(text)])).last_hidden_state[0, -1]
        expected.append(int(classifier.score(hidden).argmax()))
    assert predict(classifier, tokenized, tokenized.valid).tolist() == expected
    assert len(set(expected)) == 2


def test_a_model_of_transformers_reads_as_its_own_classifier() -> None:
    model = small_gpt2()
    classifier: Any = make_classifier(model.model, 3).eval()
    assert isinstance(classifier, GPT2ForSequenceClassification)
    classifier.config.pad_token_id = 0
    rows = [[5, 6, 7], [8, 9], [4, 3, 2, 1]]
    ids = torch.tensor([row + [0] * (4 - len(row)) for row in rows])
    found, _ = classify(classifier, ids, torch.tensor([2, 1, 3]))
    torch.testing.assert_close(found, classifier(ids, attention_mask=(ids != 0).long()).logits, rtol=0, atol=1e-5)
    for name, weight in model.model.transformer.state_dict().items():
        assert torch.equal(classifier.transformer.state_dict()[name], weight)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.filterwarnings("error")
def test_a_model_of_transformers_learns(tmp_path: Path, method: Any) -> None:
    if method == "lora":
        pytest.importorskip("peft")
    model = small_gpt2()
    model.settings = Settings(finetune=method, **{**QUICK, "finetune_learning_rate": 1e-2})
    assert opened(write_answerable(tmp_path)).evaluate("glue_sst2", model).score > 90


def test_seeds_give_a_mean_and_a_spread(tmp_path: Path) -> None:
    quick = {**QUICK, "finetune_epochs": 1, "finetune_learning_rate": 1e-3}
    task = opened(write_answerable(tmp_path))
    found = task.evaluate("glue_sst2", evaluated(Settings(seeds=3, **quick)))
    scores = list(found.notes["seeds"].values())
    assert list(found.notes["seeds"]) == ["42", "12", "3"]
    assert len(set(scores)) > 1
    assert found.score == pytest.approx(np.mean(scores))
    assert found.notes["spread"] == pytest.approx(np.std(scores, ddof=1))
    of_items = np.mean([(share * (100 - share) / 40) ** 0.5 for share in scores])
    assert found.standard_error == pytest.approx((of_items**2 + np.var(scores, ddof=1) / 3) ** 0.5)
    once = task.evaluate("glue_sst2", evaluated(Settings(**quick)))
    assert once.score == scores[0]  # a seed does the same whoever came before it
    assert once.notes["spread"] is None


def test_patience_ends_training_and_the_best_epoch_counts(tmp_path: Path) -> None:
    still = {**QUICK, "finetune_learning_rate": 1e-9, "finetune_epochs": 9}
    task = opened(write_answerable(tmp_path))
    waiting = tuned(task, evaluated(Settings(finetune_patience=2, **still)))
    assert len(waiting.scores) == 3
    assert waiting.best_epoch == 1
    assert len(tuned(task, evaluated(Settings(**still))).scores) == 9


def test_the_model_is_handed_back_as_after_its_best_epoch(tmp_path: Path) -> None:
    task, model = opened(write_answerable(tmp_path)), evaluated(Settings(**{**QUICK, "finetune_learning_rate": 0.1}))
    found = tuned(task, model)
    assert found.best_epoch < len(found.scores)  # so large a rate spoils it again
    tokenized = task.tokenize(model, hyperparameters_for("sst2", model.settings))
    assert predict(found.classifier, tokenized, tokenized.valid).tolist() == found.answers.tolist()


def test_the_model_and_the_random_numbers_stay_as_they_are(tmp_path: Path) -> None:
    model = evaluated(Settings(**{**QUICK, "finetune_epochs": 1}))
    before = {name: weight.clone() for name, weight in model.model.state_dict().items()}
    numbers = torch.random.get_rng_state()
    with torch.inference_mode():
        opened(write_answerable(tmp_path)).evaluate("glue_sst2", model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), numbers)
    assert not model.model.training


def test_progress_reaches_the_end_even_where_training_ends_early(tmp_path: Path) -> None:
    settings = Settings(**{**QUICK, "finetune_learning_rate": 1e-9}, finetune_patience=1, seeds=2)
    seen: list[tuple[int, int]] = []
    opened(write_answerable(tmp_path)).evaluate("glue_sst2", evaluated(settings), lambda *now: seen.append(now))
    assert all(0 <= done <= total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == seen[0][1]


def test_examples_are_cut_to_what_the_model_reads(tmp_path: Path) -> None:
    model = evaluated(positions="learned", context=12)
    tokenized = opened(write_answerable(tmp_path)).tokenize(model, hyperparameters_for("sst2", model.settings))
    assert tokenized.max_length == tokenized.train.lengths.max() == 12


def test_a_loss_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    model = evaluated(Settings(**QUICK))
    with torch.no_grad():
        model.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(BraidError, match="the loss is no longer a number"):
        opened(write_answerable(tmp_path)).evaluate("glue_sst2", model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": 0}, "seeds: expected a whole number from 1 to 1000, got 0"),
        ({"finetune_epochs": 0}, "finetune_epochs: expected a whole number from 1 to"),
        ({"finetune_learning_rate": 2.0}, "finetune_learning_rate: expected a number above 0 and below 1, got 2.0"),
        ({"finetune_learning_rate": float("nan")}, "finetune_learning_rate: expected a number above 0 and below 1"),
        ({"finetune": "half"}, "finetune: 'half' is not one of full, lora"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BraidError, match=message):
        Settings(**settings)
