"""A decoder of transformers in the training loop: as it is, with gates, or under LoRA."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of, write_text
from braidlm.core.models.card import exported_card
from braidlm.core.models.folders import load_lineage, write_lineage
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import share_of_batch
from braidlm.opening.adapter import GATES, gate_tensors, read_adapter, write_adapter_files
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.decoder_costs import decoder_cost
from braidlm.opening.full_folder import write_decoder
from braidlm.opening.gating import gates_of
from braidlm.training.features.extra_losses import ExtraLoss
from braidlm.training.features.memory import Memory
from braidlm.training.lora import DecoderLora, layer_matrices
from braidlm.training.step.objective import BatchLosses
from braidlm.training.trainables.trainable import Trainable

if TYPE_CHECKING:  # it needs Triton
    from braidlm.kernels.lowered_model import LoweredModel


class TrainableDecoder(Trainable):
    """A decoder whose parameters, or gates alone, or adapters are trained."""

    capturable = False  # masks of transformers may be made by looking at the device
    compiled_by_default = False

    def __init__(self, model: PreTrainedModel, source: OpenedDecoder, lora: DecoderLora | None = None):
        """`source` is what the model was loaded from: the base of what is saved, where that is frozen."""
        self.model, self.source, self.lora = model, source, lora
        gated = {parameter for gate in gates_of(model).values() for parameter in gate.parameters()}
        others = [parameter for parameter in model.parameters() if parameter not in gated]
        trains_base = lora is None and any(parameter.requires_grad for parameter in others)
        trains_gates = any(parameter.requires_grad for parameter in gated)
        self.is_whole = trains_base or (trains_gates and not source.has_gates)
        """Whether what is saved is the whole decoder, and not adapters that name their base."""

    def objective(
        self, lowered: "LoweredModel | None" = None, extra: Mapping[str, ExtraLoss] | None = None
    ) -> "DecoderObjective":
        return DecoderObjective(self.model)

    def text_loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return summed_loss(self.model(input_ids=inputs, use_cache=False, return_dict=True).logits, labels)

    def matrices(self) -> list[nn.Parameter]:
        return [module.weight for module in layer_matrices(self.model).values()]  # type: ignore[misc]

    def flops_per_token(self, length: int) -> int:
        return decoder_cost(self.model, length).flops_per_token

    def checkpoint_activations(self) -> None:
        # The other kind of checkpoint gives no gradients to a layer whose input has none, as behind a frozen base.
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def write(self, folder: Path, tokenizer: BraidTokenizer | None, lineage: dict[str, Any], name: str) -> None:
        """Adapters that name their base, where that is frozen; else a complete folder of transformers."""
        if self.is_whole:
            write_decoder(self.model, folder)
        elif self.source.has_gates:
            base = read_adapter(self.source.folder)
            facts = {**lineage, "tokenizer": None if tokenizer is None else tokenizer.fingerprint}
            write_adapter_files(self.model, folder, base.base, base.base_sha256, facts, name)
        if self.lora is not None:
            self.lora.write(folder)
        if tokenizer is not None:
            tokenizer.save(folder)
        if not self.is_whole and self.lora is None:
            return  # gates have written their own lineage and card
        hashes = {path.name: sha256_of(path) for path in sorted(folder.glob("*.safetensors"))}
        record = write_lineage(folder, tokenizer, lineage, {"files": hashes})
        write_text(folder / "README.md", exported_card(name, record))

    def read(self, folder: Path) -> None:
        sources = (load_lineage(folder) or {}).get("sources") or []
        if not self.is_whole and sources and self.source.record() not in sources:
            raise BraidError(
                "the decoder that these adapters were trained on has changed since",
                str(folder),
                "Go on with the decoder that it was, or begin a new run with another folder (out=DIR).",
            )
        if self.is_whole:
            # Transformers converts names on the way, so that its own reader is what reads its folders.
            self.model.load_state_dict(OpenedDecoder(folder).load("cpu", self.model.dtype).state_dict())
        elif self.source.has_gates:
            self._read_gates(folder)
        if self.lora is not None:
            self.lora.read(folder)

    @torch.no_grad()
    def _read_gates(self, folder: Path) -> None:
        saved, own = load_file(folder / GATES), gate_tensors(self.model)
        if saved.keys() != own.keys():
            raise BraidError("these gates are of other layers", str(folder), "Begin a new run.")
        for name, parameter in own.items():
            parameter.copy_(saved[name])


class DecoderObjective(nn.Module):
    """The decoder as a function of a batch."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        # A sparse decoder's configuration gives the weight of a balance loss, but asks for none: generation fails with
        # `output_router_logits`. Training asks for it.
        balanced = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
        self.asked = {"output_router_logits": True} if balanced else {}

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor,
        count: Tensor,
        memory: Memory | None = None,
        continues: Tensor | None = None,
    ) -> BatchLosses:
        output = self.model(input_ids=inputs, use_cache=False, return_dict=True, **self.asked)
        return BatchLosses(summed_loss(output.logits, labels) / count, self._routing(output, labels, count), {}, {})

    def _routing(self, output: Any, labels: Tensor, count: Tensor) -> Tensor | None:
        """The balance loss of a decoder's own experts, where its configuration has a weight for one."""
        loss = getattr(output, "aux_loss", None)
        if not isinstance(loss, Tensor):
            return None
        weight = self.model.config.get_text_config().router_aux_loss_coef
        return weight * loss * share_of_batch(labels != IGNORED, count)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The summed loss of all labels, each at the position that predicts it; padding counts nothing."""
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")
