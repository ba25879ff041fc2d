"""One step of fine-tuning: a batch forwards and backwards, then the optimizer.

On a GPU the step of a Braid model is recorded once for each shape and replayed from then on: at these sizes it takes
longer to launch the work than to do it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.evals.finetuning.classifier import classify
from braidlm.evals.finetuning.hyperparameters import Hyperparameters
from braidlm.model.modeling_braid import BraidPreTrainedModel


class Step:
    """Trains what of a classifier wants gradients."""

    def __init__(self, model: Any, how: Hyperparameters, device: torch.device, replay: bool = True):
        self.model = model
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.replays = replay and self.on_gpu and isinstance(model, BraidPreTrainedModel)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.rate if self.on_gpu else how.learning_rate,
            weight_decay=how.weight_decay,
            fused=True,
            capturable=self.on_gpu,
        )
        self.loss = torch.zeros((), device=device)
        """The sum of all steps' losses since it was last set to zero."""
        self.recorded: dict[torch.Size, Recorded | None] = {}

    def __call__(self, ids: Tensor, lasts: Tensor, labels: Tensor, rate: float) -> None:
        """Train on one batch."""
        if self.on_gpu:
            self.rate.fill_(rate)
        else:
            self.optimizer.param_groups[0]["lr"] = rate
        if not self.replays or ids.shape not in self.recorded:
            self.train(ids, lasts, labels)
            self.recorded[ids.shape] = None  # seen: kernels are tuned and the optimizer has its state
            return
        recorded = self.recorded[ids.shape]
        if recorded is None:
            try:
                recorded = self.recorded[ids.shape] = Recorded(self, ids, lasts, labels)
            except RuntimeError:  # some part of this model waits for the device, which no recording allows
                self.replays = False
                self.train(ids, lasts, labels)
                return
        recorded.replay(ids, lasts, labels)

    def train(self, ids: Tensor, lasts: Tensor, labels: Tensor) -> None:
        """The step itself; it waits for nothing."""
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device):
            logits, asked = classify(self.model, ids, lasts)
        if labels.is_floating_point():
            loss = F.mse_loss(logits[:, 0], labels)
        else:
            loss = F.cross_entropy(logits, labels)
        (loss + asked).backward()
        self.optimizer.step()
        self.loss += loss.detach()


class Recorded:
    """A step that was recorded for one shape."""

    def __init__(self, step: Step, *batch: Tensor):
        self.batch = [tensor.clone() for tensor in batch]
        self.graph = torch.cuda.CUDAGraph()
        step.optimizer.zero_grad(set_to_none=True)  # gradients get their places in the graph's own memory
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            step.train(*self.batch)

    def replay(self, *batch: Tensor) -> None:
        for held, new in zip(self.batch, batch, strict=True):
            held.copy_(new)
        self.graph.replay()


def autocast(device: torch.device) -> torch.autocast:
    """bf16 products on a GPU, float32 elsewhere. What was cast is not kept: a recorded step has to cast again."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)
