"""Opening a decoder of transformers by its name, as it is: a plain one, one with gates, or one with LoRA adapters.

    FOLDER, RUN       a model folder of transformers
    ORG/NAME          a model on the Hub
    ADAPTERS          a folder of gates (gate_config.json), of LoRA adapters (adapter_config.json), or of both

A folder of adapters names its base, which is opened the same way, so that adapters may stand on adapters.
"""

import contextlib
import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from braidlm.bridges.locate import Location, find_tokenizer, locate_model
from braidlm.core.differences import listed
from braidlm.core.errors import BraidError
from braidlm.core.models.adapters import check_peft
from braidlm.core.models.folders import errors_of_transformers, load_lineage
from braidlm.core.models.integrity import check_hash, model_hash, not_finite, not_finite_error
from braidlm.core.models.licence import licence_record
from braidlm.core.models.memory import check_weights_fit, weights_bytes
from braidlm.core.models.names import StrPath, title_of
from braidlm.core.models.runs import CONFIG, LORA_CONFIG
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.decoders.adapter import gate_tensors, is_adapter, load_adapter, read_adapter
from braidlm.decoders.full_folder import register_gated
from braidlm.decoders.gating import attach, gates_of
from braidlm.decoders.structure import check_decoder
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.gated_decoder import GatedDecoder


class OpenDecoder:
    """A decoder whose folder is known, and whose configuration, tokenizer and weights are read on demand."""

    def __init__(self, location: Location, asked: str):
        self.folder, self.name = location.path, location.name
        is_on_hub = location.name == f"{asked}@{location.path.name}"
        self.address = asked if is_on_hub else str(location.path.resolve())
        """What opens it from any folder: its path, or its name on the Hub."""
        self.has_gates = is_adapter(self.folder)
        self.has_lora = not (self.folder / CONFIG).is_file() and (self.folder / LORA_CONFIG).is_file()
        self.base: OpenDecoder | None = None
        """What its adapters are for."""
        if self.has_gates:
            self.base = open_decoder(read_adapter(self.folder).base)
        elif self.has_lora:
            self.base = open_decoder(_base_of_lora(self.folder))
        elif read_json(self.folder / CONFIG).get("model_type") == BraidConfig.model_type:
            raise BraidError(
                "this is a Braid model, not a decoder of transformers",
                str(self.folder),
                "In a recipe it is named by start_from; every verb opens it by its folder.",
            )

    @cached_property
    def config(self) -> PretrainedConfig:
        """The configuration of the decoder without its adapters; code that a folder brings along is not run."""
        if self.base is not None:
            return self.base.config
        register_gated(self.folder)
        with errors_of_transformers(self.folder):
            config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        check_decoder(config)
        return config

    @cached_property
    def tokenizer(self) -> BraidTokenizer:
        """Its own tokenizer, or that of its base."""
        if (own := find_tokenizer(self.folder)) is not None:
            return own
        if self.base is None:
            raise BraidError(
                "this model has no tokenizer that Braid reads",
                str(self.folder),
                "`AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)` in Python writes its tokenizer.json.",
            )
        return self.base.tokenizer

    @property
    def context(self) -> int | None:
        """The most tokens that its positions are made for, if its configuration says so."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @cached_property
    def sha256(self) -> str:
        """Over all files that determine its scores."""
        own = model_hash(self.folder)
        return own if self.base is None else hashlib.sha256(f"{own} {self.base.sha256}".encode()).hexdigest()

    @property
    def is_gated(self) -> bool:
        """Whether its layers have gates: an adapter's, or those of a folder of base and gates."""
        if self.base is None:
            return bool(getattr(self.config, "gates", None))
        return self.has_gates or self.base.is_gated

    def record(self) -> dict[str, Any]:
        """Which model this is, for the lineage of another that is made of it."""
        base = {} if self.base is None else {"base": self.base.record()}
        return {"model": self.name, **licence_record(self.folder), "sha256": self.sha256, **base}

    def skeleton(self, dtype: torch.dtype) -> PreTrainedModel:
        """The decoder with its gates and without memory for its weights: enough to count them."""
        if self.base is None:
            with torch.device("meta"), errors_of_transformers(self.folder):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config, dtype=dtype)
            return _with_gates_in_float32(model, {})
        model = self.base.skeleton(dtype)
        if self.has_gates:
            attach(model, read_adapter(self.folder).gates)
        return model

    def load(self, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The model in memory, in evaluation mode: its base in `dtype` with LoRA adapters merged, gates in float32."""
        check_weights_fit(weights_bytes(self.skeleton(dtype)), device)
        model = self._load(dtype)
        if names := not_finite(model.state_dict().items()):
            raise not_finite_error(names, str(self.folder))
        model = model.to(device).eval()  # type: ignore[assignment]
        if model.device.type == "cuda":
            with contextlib.suppress(ImportError):  # without Triton torch's operations do it
                from braidlm.kernels.gates import lower_gates

                lower_gates(model)
        return model

    def _load(self, dtype: torch.dtype) -> PreTrainedModel:
        if self.base is None:
            return _load_plain(self.folder, dtype)
        model = self.base._load(dtype)
        if self.has_lora:
            model = _with_lora(model, self.folder)
        if self.has_gates:
            load_adapter(self.folder, model, self.base.folder)
        return model


def decoder_in(folder: Path) -> OpenDecoder:
    """The decoder of a folder."""
    return OpenDecoder(Location(folder, title_of(folder)), str(folder))


def open_decoder(name: StrPath) -> OpenDecoder:
    """A decoder of transformers by its name: a folder, a run, a model on the Hub, or a folder of adapters."""
    return OpenDecoder(locate_model(name), str(name))


def _load_plain(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    register_gated(folder)
    for path in sorted(folder.glob("*.safetensors")):
        check_hash(path, load_lineage(folder))
    with errors_of_transformers(folder):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    if missing := sorted(info["missing_keys"]):  # transformers would fill them with random numbers
        raise BraidError(
            f"weights are missing that the configuration asks for: {listed(missing)}",
            str(folder),
            "config.json and the weights must come from the same model.",
        )
    return _with_gates_in_float32(model, {} if dtype == torch.float32 else _stored_gates(model, folder))


@torch.no_grad()
def _with_gates_in_float32(model: PreTrainedModel, stored: dict[str, Tensor]) -> PreTrainedModel:
    """A decoder that was made with gates, which have the type of its own weights, with gates of their own type."""
    if isinstance(model, GatedDecoder):
        for gate in gates_of(model).values():
            gate.float()
        for name, parameter in gate_tensors(model).items():
            if name in stored:
                parameter.copy_(stored[name])
    return model


def _stored_gates(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The gates in the files of a folder, before they were rounded to the type of the other weights."""
    found: dict[str, Tensor] = {}
    wanted = set(gate_tensors(model)) if isinstance(model, GatedDecoder) else set()
    for path in sorted(folder.glob("*.safetensors")) if wanted else []:
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in wanted & set(file.keys())}
    return found


def _base_of_lora(folder: Path) -> str:
    base = read_json(folder / LORA_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise BraidError(
            "these adapters do not say which model they are for (no base_model_name_or_path)",
            str(folder / LORA_CONFIG),
        )
    return base


def _with_lora(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with adapters in its matrices."""
    check_peft("use a model whose adapters are merged.")
    from peft import PeftModel

    with errors_of_transformers(folder):
        adapted: Any = PeftModel.from_pretrained(model, str(folder))
        merged: PreTrainedModel = adapted.merge_and_unload()
    merged.requires_grad_(True)  # peft has frozen it
    return merged
