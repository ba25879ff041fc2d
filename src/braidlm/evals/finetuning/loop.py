"""Fine-tuning from one seed: epochs of steps with validation after each, and early stopping.

Hyperparameters are those of the papers, with the user's settings in their place.
All parameters are trained as in the BabyLM pipeline of 2025 (`eval_finetuning.sh`), whose values the MoEP paper uses.
Adapters (LoRA) are trained with the values of the PaPaformer paper (its Table 5), which come from the pipeline of 2024:
the learning rate for all parameters, 3e-5, would hardly change adapters.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.core.models.adapters import adaptable, lora, split_stacks
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.finetuning.classifier import HEAD, EncodedTexts, classify, make_classifier, member_outputs
from braidlm.evals.finetuning.data_sets import DataSet, all_metrics
from braidlm.model.pretrained import BraidPreTrainedModel

SEEDS = (42, 12, 3, 100, 200)
"""The first is the BabyLM pipeline's, all five are the PaPaformer paper's; more follow the last."""


@dataclass(frozen=True)
class Hyperparameters:
    """All hyperparameters of fine-tuning but the seed; the defaults are those for all parameters."""

    method: Literal["full", "lora"] = "full"
    learning_rate: float = 3e-5
    batch_size: int = 32
    epochs: int = 10
    length: int = 512
    """The maximum tokens of an example."""
    patience: int | None = None
    """Epochs without a better score after which training ends; None for never."""
    schedule: Literal["cosine", "linear"] = "cosine"
    warmup: float = 0.06
    """The fraction of all steps in which the learning rate rises."""
    final: float = 0.1
    """The fraction of the learning rate at the end."""
    weight_decay: float = 0.01
    rank: int = 8
    alpha: int = 16
    adapter_dropout: float = 0.1

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0."""
        warmup_steps = int(self.warmup * steps)
        if step < warmup_steps:
            return self.learning_rate * step / max(1, warmup_steps)
        done = (step - warmup_steps) / max(1, steps - warmup_steps)
        decay = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.final + (1 - self.final) * decay)


FULL = Hyperparameters()
FULL_FOR = {**dict.fromkeys(("boolq", "multirc"), replace(FULL, batch_size=16)), "wsc": replace(FULL, epochs=30)}
"""The pipeline's exceptions."""
LORA = Hyperparameters("lora", 1e-3, 64, 32, 128, 5, "linear", warmup=0.0, final=0.0, weight_decay=0.1)


def hyperparameters_for(data_set: str, settings: Settings) -> Hyperparameters:
    """The paper's values, overridden by the user's settings."""
    defaults = FULL_FOR.get(data_set, FULL) if settings.finetune == "full" else LORA
    names = ("learning_rate", "batch_size", "epochs", "length", "patience")
    overrides = {name: value for name in names if (value := getattr(settings, f"finetune_{name}")) is not None}
    return replace(defaults, **overrides)


def seeds_for(settings: Settings) -> list[int]:
    """As many seeds as the settings say."""
    return [*SEEDS, *range(SEEDS[-1] + 1, SEEDS[-1] + 1 + settings.seeds)][: settings.seeds]


SORTED_TOGETHER = 50
"""Batches whose texts are sorted by length together: enough to match lengths, few enough to stay random."""
WIDTH_MULTIPLE = {"cuda": 32, "cpu": 8}
"""Batches are padded to multiples of this width."""
TOKENS_PER_PASS = {"cuda": 65_536, "cpu": 2_048}
"""Tokens of one forward pass without gradients."""


def padded_width(length: int, multiple: int, max_length: int) -> int:
    """The width of a batch whose longest text has this length."""
    return min(max_length, -(-length // multiple) * multiple)


def training_batches(lengths: np.ndarray, size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The batches of one epoch in random order; all are full, and the remaining texts are left out."""
    size = min(size, len(lengths))
    order = rng.permutation(len(lengths))[: len(lengths) // size * size]
    batches = []
    for start in range(0, len(order), size * SORTED_TOGETHER):
        group = order[start : start + size * SORTED_TOGETHER]
        batches += np.split(group[np.argsort(lengths[group], kind="stable")], len(group) // size)
    return [batches[index] for index in rng.permutation(len(batches))]


def evaluation_batches(lengths: np.ndarray, max_tokens: int, multiple: int, max_length: int) -> Iterator[np.ndarray]:
    """Every text once, from the shortest to the longest."""
    order, begin = np.argsort(lengths, kind="stable"), 0
    for at, index in enumerate(order):
        if at > begin and padded_width(lengths[index], multiple, max_length) * (at + 1 - begin) > max_tokens:
            yield order[begin:at]
            begin = at
    yield order[begin:]


class TrainingStep:
    """Trains those parameters of a classifier that require gradients."""

    def __init__(self, model: Any, hyperparameters: Hyperparameters, device: torch.device, replay: bool = True):
        self.model = model
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.replays = replay and self.on_gpu and isinstance(model, BraidPreTrainedModel)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.rate = torch.zeros((), device=device)
        rate = self.rate if self.on_gpu else hyperparameters.learning_rate
        options: dict[str, Any] = {"weight_decay": hyperparameters.weight_decay, "capturable": self.on_gpu}
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, fused=True, **options)
        self.loss = torch.zeros((), device=device)
        """The sum of all steps' losses since it was last set to zero."""
        self.graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, list[Tensor]] | None] = {}
        """CUDA graphs of a step, and the batch that they read, by shape; None where a shape was seen once."""

    def __call__(self, ids: Tensor, last_positions: Tensor, labels: Tensor, rate: float) -> None:
        if self.on_gpu:
            self.rate.fill_(rate)
        else:
            self.optimizer.param_groups[0]["lr"] = rate
        batch = (ids, last_positions, labels)
        if not self.replays or ids.shape not in self.graphs:
            self.train(*batch)
            self.graphs[ids.shape] = None  # warm: kernels are tuned and the optimizer has its state
            return
        try:
            graph, static = self.graphs[ids.shape] or self._captured(*batch)
        except RuntimeError:  # some part of this model synchronizes, which a capture does not allow
            self.replays = False
            self.train(*batch)
            return
        for old, new in zip(static, batch, strict=True):
            old.copy_(new)
        graph.replay()

    def _captured(self, *batch: Tensor) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        static, graph = [tensor.clone() for tensor in batch], torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)  # gradients are allocated in the graph's own memory
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.train(*static)
        self.graphs[batch[0].shape] = graph, static
        return graph, static

    def train(self, ids: Tensor, last_positions: Tensor, labels: Tensor) -> None:
        """The step itself; it does not synchronize."""
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device):
            outputs, routing_loss = member_outputs(self.model, ids, last_positions)
        labels = labels.expand(outputs.shape[:2]).flatten()
        if labels.is_floating_point():
            loss = F.mse_loss(outputs.flatten(), labels)
        else:
            loss = F.cross_entropy(outputs.flatten(0, 1), labels)
        (loss + routing_loss / len(outputs)).backward()  # the mean over members of what each would have alone
        self.optimizer.step()
        self.loss += loss.detach()


def autocast(device: torch.device) -> torch.autocast:
    """bf16 products on a GPU, float32 elsewhere. Casts are not cached: a captured step has to cast again."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


@dataclass(frozen=True)
class TokenizedData:
    """The training and validation examples of a data set as tokens."""

    data_set: DataSet
    train: EncodedTexts
    train_labels: np.ndarray
    valid: EncodedTexts
    valid_labels: np.ndarray
    max_length: int


@dataclass
class FineTunedModel:
    """A model after fine-tuning, with the parameters of its best epoch."""

    classifier: nn.Module
    """Adapters are merged into its matrices."""
    answers: np.ndarray
    """The answers to the validation examples: classes or numbers."""
    trained: int
    """The number of trained parameters."""
    replayed: bool = False
    """Whether steps were replayed as CUDA graphs, which only saves time."""
    scores: list[float] = field(default_factory=list)
    """The score of the validation examples after each epoch."""
    losses: list[float] = field(default_factory=list)
    """The mean over the steps of each epoch."""

    @property
    def best_epoch(self) -> int:
        """Counted from 1."""
        return int(np.argmax(self.scores)) + 1


def fine_tune(
    model: Any,
    data: TokenizedData,
    hyperparameters: Hyperparameters,
    seed: int,
    advance: Callable[[int], None] = lambda tokens: None,
    replay: bool = True,
) -> FineTunedModel:
    """Fine-tune a copy of a language model; the model itself, and torch's random state, stay as they are.

    `advance` is called with the number of tokens since the last call.
    """
    device = data.train.ids.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode(False):
        torch.manual_seed(seed)
        classifier = make_classifier(model, data.data_set.classes or 1)
        adapted = add_adapters(classifier, hyperparameters) if hyperparameters.method == "lora" else None
        step = TrainingStep(classifier, hyperparameters, device, replay)
        tuned = FineTunedModel(classifier, np.zeros(0), sum(parameter.numel() for parameter in step.parameters))
        _train(tuned, step, data, hyperparameters, np.random.default_rng(seed), advance)
        if adapted is not None:
            tuned.classifier = adapted.merge_and_unload()
    return tuned


def _train(
    tuned: FineTunedModel,
    step: TrainingStep,
    data: TokenizedData,
    hyperparameters: Hyperparameters,
    rng: np.random.Generator,
    advance: Callable[[int], None],
) -> None:
    """All epochs; the model is left with the parameters of the best."""
    device, classes, metric = step.device, data.data_set.classes, data.data_set.metric
    labels = torch.from_numpy(data.train_labels).to(device, torch.float32 if classes is None else torch.int64)
    steps = hyperparameters.epochs * (len(data.train) // min(hyperparameters.batch_size, len(data.train)))
    best: list[Tensor] = []
    done = 0
    for _ in range(hyperparameters.epochs):
        tuned.classifier.train()
        step.loss.zero_()
        epoch = training_batches(data.train.lengths, hyperparameters.batch_size, rng)
        order = torch.from_numpy(np.concatenate(epoch)).to(device).split(len(epoch[0]))
        for indices, index in zip(epoch, order, strict=True):
            ids = _ids(data, data.train, indices, index)
            step(ids, data.train.last_positions[index], labels[index], hyperparameters.rate(done, steps))
            done += 1
            advance(int(data.train.lengths[indices].sum()))
        tuned.losses.append(float(step.loss) / len(epoch))
        if not math.isfinite(tuned.losses[-1]):
            todo = "Give a smaller learning rate with `--finetune-learning-rate`."
            raise BraidError("the loss is no longer a number", "fine-tuning", todo)
        answers = predict(tuned.classifier, data, data.valid)
        advance(int(data.valid.lengths.sum()))
        tuned.scores.append(all_metrics(answers, data.valid_labels, classes)[metric])
        if tuned.best_epoch == len(tuned.scores):
            tuned.answers = answers
            best = [parameter.detach().clone() for parameter in step.parameters]
        elif hyperparameters.patience is not None and len(tuned.scores) - tuned.best_epoch >= hyperparameters.patience:
            break
    tuned.replayed = step.replays
    with torch.no_grad():
        for parameter, value in zip(step.parameters, best, strict=True):
            parameter.copy_(value)


def _ids(data: TokenizedData, texts: EncodedTexts, indices: np.ndarray, index: Tensor) -> Tensor:
    """The tokens of some texts, padded to the width of the longest, rounded up."""
    multiple = WIDTH_MULTIPLE.get(texts.ids.device.type, WIDTH_MULTIPLE["cpu"])
    width = padded_width(int(texts.lengths[indices].max()), multiple, data.max_length)
    ids = texts.ids[index, :width]
    return F.pad(ids, (0, width - ids.shape[1]))


@torch.no_grad()
def predict(classifier: Any, data: TokenizedData, texts: EncodedTexts) -> np.ndarray:
    """[texts] the classes or numbers that a classifier predicts."""
    classifier.eval()
    device = texts.ids.device
    max_tokens, multiple = (each.get(device.type, each["cpu"]) for each in (TOKENS_PER_PASS, WIDTH_MULTIPLE))
    order, outputs = [], []
    for indices in evaluation_batches(texts.lengths, max_tokens, multiple, data.max_length):
        index = torch.from_numpy(indices).to(device)
        with autocast(device):
            logits, _ = classify(classifier, _ids(data, texts, indices, index), texts.last_positions[index])
        order.append(indices)
        outputs.append(logits[:, 0] if data.data_set.classes is None else logits.argmax(-1))
    sorted_answers = torch.cat(outputs).cpu().numpy()
    answers = np.empty_like(sorted_answers)
    answers[np.concatenate(order)] = sorted_answers
    return answers.astype(np.float64) if data.data_set.classes is None else answers


def add_adapters(model: Any, hyperparameters: Hyperparameters) -> Any:
    """peft's model around a classifier."""
    rank, alpha, dropout = hyperparameters.rank, hyperparameters.alpha, hyperparameters.adapter_dropout
    options: dict[str, Any] = {"task_type": "SEQ_CLS", "modules_to_save": [HEAD]}
    if isinstance(model, BraidPreTrainedModel):
        names = adaptable(model)
        return lora(model, names, rank, alpha, 0.0 if split_stacks(model, names)[1] else dropout, **options)
    from peft import LoraConfig, get_peft_model

    # GPT-2's layers in transformers hold transposed matrices.
    options["fan_in_fan_out"] = any(type(module).__name__ == "Conv1D" for module in model.modules())
    options |= {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": "all-linear"}
    return get_peft_model(model, LoraConfig(**options))
