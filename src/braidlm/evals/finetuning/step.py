"""One step of fine-tuning: a batch forwards and backwards, then the optimizer.

On a GPU the step of a Braid model is captured as a CUDA graph once for each shape and replayed from then on: at these
sizes launching the kernels takes longer than running them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.evals.finetuning.classifier import member_outputs
from braidlm.evals.finetuning.hyperparameters import Hyperparameters
from braidlm.model.pretrained import BraidPreTrainedModel


class TrainingStep:
    """Trains those parameters of a classifier that require gradients."""

    def __init__(self, model: Any, hyperparameters: Hyperparameters, device: torch.device, replay: bool = True):
        self.model = model
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.replays = replay and self.on_gpu and isinstance(model, BraidPreTrainedModel)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.rate if self.on_gpu else hyperparameters.learning_rate,
            weight_decay=hyperparameters.weight_decay,
            fused=True,
            capturable=self.on_gpu,
        )
        self.loss = torch.zeros((), device=device)
        """The sum of all steps' losses since it was last set to zero."""
        self.graphs: dict[torch.Size, CapturedStep | None] = {}
        """By shape; None where a shape has been seen once and not captured."""

    def __call__(self, ids: Tensor, last_positions: Tensor, labels: Tensor, rate: float) -> None:
        """Train on one batch."""
        if self.on_gpu:
            self.rate.fill_(rate)
        else:
            self.optimizer.param_groups[0]["lr"] = rate
        if not self.replays or ids.shape not in self.graphs:
            self.train(ids, last_positions, labels)
            self.graphs[ids.shape] = None  # warm: kernels are tuned and the optimizer has its state
            return
        graph = self.graphs[ids.shape]
        if graph is None:
            try:
                graph = self.graphs[ids.shape] = CapturedStep(self, ids, last_positions, labels)
            except RuntimeError:  # some part of this model synchronizes, which a capture does not allow
                self.replays = False
                self.train(ids, last_positions, labels)
                return
        graph.replay(ids, last_positions, labels)

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


class CapturedStep:
    """A step captured as a CUDA graph for one shape."""

    def __init__(self, step: TrainingStep, *batch: Tensor):
        self.batch = [tensor.clone() for tensor in batch]
        self.graph = torch.cuda.CUDAGraph()
        step.optimizer.zero_grad(set_to_none=True)  # gradients are allocated in the graph's own memory
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            step.train(*self.batch)

    def replay(self, *batch: Tensor) -> None:
        for static, new in zip(self.batch, batch, strict=True):
            static.copy_(new)
        self.graph.replay()


def autocast(device: torch.device) -> torch.autocast:
    """bf16 products on a GPU, float32 elsewhere. Casts are not cached: a captured step has to cast again."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)
