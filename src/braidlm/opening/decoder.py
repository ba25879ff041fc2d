"""The backend of transformers: a decoder as it is, one with gates, or one with LoRA adapters; and what it costs.

A folder of gates (gate_config.json), of LoRA adapters (adapter_config.json) or of both names its base, which is opened
as a decoder too, so that adapters may stand on adapters.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn

from braidlm.core.devices import check_weights_fit, weights_bytes
from braidlm.core.differences import listed
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.models.accounting import Cost, cost_facts
from braidlm.core.models.adapters import check_peft
from braidlm.core.models.folders import errors_of_transformers, load_lineage, model_type
from braidlm.core.models.integrity import check_hash, model_hash, not_finite, not_finite_error
from braidlm.core.models.runs import CONFIG, LORA_CONFIG
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.kernels.lower import replace_parts
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.ranges import Length
from braidlm.model.config.strict import decode
from braidlm.model.gates import GatedDecoder
from braidlm.model.paths.switches import use_paths
from braidlm.opening.gated_folders import (
    TOKENIZER_FILES,
    gate_tensors,
    is_adapter,
    load_adapter,
    read_adapter,
    register_ours,
)
from braidlm.opening.gating import MEMBERS, attach, check_decoder, find_parts, gates_of, has_members
from braidlm.opening.names import StrPath, find_or_fetch
from braidlm.opening.opened_model import OpenedModel, find_tokenizer


class OpenedDecoder(OpenedModel):
    """A decoder of transformers, and the base of its adapters."""

    def __init__(self, folder: Path, hub: str | None = None, **options: Any):
        super().__init__(folder, hub, **options)
        self.has_gates = is_adapter(self.folder)
        self.has_lora = not (self.folder / CONFIG).is_file() and (self.folder / LORA_CONFIG).is_file()
        if self.has_gates:
            self.base = decoder_by_name(read_adapter(self.folder).base)
        elif self.has_lora:
            base = read_json(self.folder / LORA_CONFIG).get("base_model_name_or_path")
            if not isinstance(base, str) or not base:
                what = "these adapters do not say which model they are for (no base_model_name_or_path)"
                raise BraidError(what, str(self.folder / LORA_CONFIG))
            self.base = decoder_by_name(base)
        elif read_json(self.folder / CONFIG).get("model_type") == BraidConfig.model_type:
            todo = "In a recipe it is named by start_from; every verb opens it by its folder."
            raise BraidError("this is a Braid model, not a decoder of transformers", str(self.folder), todo)

    @property
    def kind(self) -> str:  # type: ignore[override]
        if self.base is not None and not (self.folder / CONFIG).is_file():
            return self.base.kind
        return model_type(self.folder)

    @cached_property
    def config(self) -> "transformers.PretrainedConfig":
        """The configuration of the decoder without its adapters; code that a folder brings along is not run."""
        if self.base is not None:
            return self.base.config
        register_ours(self.folder)
        with errors_of_transformers(self.folder):
            config = transformers.AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        check_decoder(config)
        return config

    @cached_property
    def tokenizer(self) -> BraidTokenizer:
        """The decoder's own tokenizer, or that of its base."""
        if (own := find_tokenizer(self.folder)) is not None:
            return own
        if self.base is None:
            todo = "`AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)` in Python writes its tokenizer.json."
            raise BraidError("this model has no tokenizer that Braid reads", str(self.folder), todo)
        return self.base.tokenizer

    @property
    def context(self) -> int | None:
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    limit = context

    @property
    def vocab_size(self) -> int:
        if isinstance(size := getattr(self.config.get_text_config(), "vocab_size", None), int):
            return size
        what = "this is not the folder of a language model (its config.json has no vocab_size)"
        raise BraidError(what, str(self.folder))

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 over all files that determine the scores, those of the base too."""
        own = model_hash(self.folder)
        return own if self.base is None else hashlib.sha256(f"{own} {self.base.sha256}".encode()).hexdigest()

    @property
    def is_gated(self) -> bool:
        """Whether its layers have gates: an adapter's, or those of a folder of base and gates."""
        if self.base is None:
            return bool(getattr(self.config, "gates", None))
        return self.has_gates or self.base.is_gated

    def tokenizer_files(self) -> list[Path]:
        """The files of its tokenizer, which is its base's where it has none of its own."""
        files = ([path for pattern in TOKENIZER_FILES for path in part.folder.glob(pattern)] for part in self.parts)
        return next(filter(None, files), [])

    def record(self) -> dict[str, Any]:
        base = {} if self.base is None else {"base": self.base.record()}
        return {**self._named_record(self.title), "sha256": self.sha256, **base}

    def check(self) -> None:
        """Refuse what only Braid's models have; the configuration must be a decoder's."""
        if self.paths is not None:
            if self.kind != MEMBERS:
                what = "only Braid's models and members have paths to choose from"
                raise BraidError(what, str(self.folder), "Leave out --paths.")
            with errors_at(str(self.folder)):
                use_paths(self.skeleton(torch.float32), self.paths)
        if self.without:
            raise BraidError("only Braid's models have named modules", str(self.folder), "Leave out --without.")
        _ = self.config, self.lineage  # each refuses what cannot be read

    def skeleton(self, dtype: torch.dtype) -> "transformers.PreTrainedModel":
        """The decoder with its gates and without memory for its weights: enough to count them."""
        if self.base is None:
            with torch.device("meta"), errors_of_transformers(self.folder):
                model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
                    self.config, dtype=dtype
                )
            return _with_gates_in_float32(model, [])
        model = self.base.skeleton(dtype)
        if self.has_gates:
            attach(model, read_adapter(self.folder).gates)
        return model

    def _load(self, device: str | torch.device, dtype: torch.dtype | None) -> "transformers.PreTrainedModel":
        """The base is in `dtype` with LoRA adapters merged, gates are in float32."""
        dtype = dtype or torch.float32
        check_weights_fit(weights_bytes(self.skeleton(dtype)), device)
        model = self._in_memory(dtype)
        if names := not_finite(model.state_dict().items()):
            raise not_finite_error(names, str(self.folder))
        model = model.to(device).eval()  # type: ignore[assignment]
        replace_parts(model)
        return model

    def _in_memory(self, dtype: torch.dtype) -> "transformers.PreTrainedModel":
        if self.base is None:
            model = _load_plain(self.folder, dtype)
            if self.paths is not None:
                use_paths(model, self.paths)
            return model
        model = self.base._in_memory(dtype)
        if self.has_lora:
            check_peft("use a model whose adapters are merged.")
            from peft import PeftModel

            with errors_of_transformers(self.folder):
                adapted: Any = PeftModel.from_pretrained(model, str(self.folder))
                model = adapted.merge_and_unload()
            model.requires_grad_(True)  # peft has frozen it
        if self.has_gates:
            load_adapter(self.folder, model, self.base.folder)
        return model


def decoder_by_name(name: StrPath) -> OpenedDecoder:
    """A decoder by its name, which adapters give of their base."""
    folder, hub = find_or_fetch(name, bare=True)
    return OpenedDecoder(folder, hub)


def _load_plain(folder: Path, dtype: torch.dtype) -> "transformers.PreTrainedModel":
    register_ours(folder)
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        check_hash(path, load_lineage(folder))
    with errors_of_transformers(folder):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    if missing := sorted(info["missing_keys"]):  # transformers would fill them with random numbers
        what = f"weights are missing that the configuration asks for: {listed(missing)}"
        raise BraidError(what, str(folder), "config.json and the weights must come from the same model.")
    return _with_gates_in_float32(model, [] if dtype == torch.float32 else files)


@torch.no_grad()
def _with_gates_in_float32(
    model: "transformers.PreTrainedModel", files: Sequence[Path]
) -> "transformers.PreTrainedModel":
    """A decoder that was made with gates, which have the type of its own weights, with gates of their own type. The
    gates in `files` are as they were before they were rounded to the type of the other weights."""
    if isinstance(model, GatedDecoder):
        for gate in gates_of(model).values():
            gate.float()
        own = gate_tensors(model)
        for path in files:
            with safe_open(path, "pt") as file:
                for name in own.keys() & set(file.keys()):
                    own[name].copy_(file.get_tensor(name))
    return model


def cost_rows(model: "transformers.PreTrainedModel", length: int) -> dict[str, Cost]:
    """The costs of embedding, layers, their gates, what else there is, and head, at sequences of `length`; or of each
    decoder whose members are active."""
    if has_members(model):
        runs = Counter(model.members[name]["decoder"] for name in model.active)
        return {name: _member_cost(model.decoders[name], length, count) for name, count in runs.items()}
    parts, config = find_parts(model), model.config.get_text_config()
    used = getattr(config, "num_experts_per_tok", None)
    counts = (getattr(config, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    share = used / experts if used and (experts := next(filter(None, counts), None)) else 1.0  # that a token uses
    rows = {name: Cost() for name in ("embedding", "layers", "gates", "others", "head")}
    head = set(parts.head.parameters())
    for name, parameter in model.named_parameters():
        owner = _owner(name, parameter, parts)
        active = share if ".experts." in name else 1.0
        row = rows[owner]
        row.parameters += parameter.numel()
        row.active_parameters += round(active * parameter.numel())
        if parameter.ndim > 1 and owner not in ("embedding", "others"):
            row.flops_per_token += round(2 * active * parameter.numel())
    # Scores and sums of values: two products of each token with the half of the sequence that it sees on average.
    scores = 2 * (length + 1) * attention_heads(config) * head_size(config)
    rows["layers"].flops_per_token += scores * config.num_hidden_layers
    if tied := sum(p.numel() for p in head & set(parts.embedding.parameters())):
        rows["head"].flops_per_token += 2 * tied  # it is counted once, and still multiplied
    return {name: cost for name, cost in rows.items() if cost != Cost()}


def _member_cost(decoder: Any, length: int, runs: int) -> Cost:
    """What a decoder costs that is run for so many members; each runs its own adapters alone."""
    cost = sum(cost_rows(decoder, length).values(), Cost())
    adapters = sum(2 * parameter.numel() for name, parameter in decoder.named_parameters() if ".adapters." in name)
    cost.flops_per_token = runs * (cost.flops_per_token - adapters) + adapters
    return cost


def attention_heads(config: Any) -> int:
    """How many heads a layer attends with: none in a state-space model."""
    return getattr(config, "num_attention_heads", None) or 0


def head_size(config: Any) -> int:
    """Channels of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // max(1, attention_heads(config))


def _owner(name: str, parameter: nn.Parameter, parts: Any) -> str:
    if any(parameter is own for own in parts.embedding.parameters()):
        return "embedding"
    if any(parameter is own for own in parts.head.parameters()):
        return "head"
    if name.startswith(f"{parts.layers_name}."):
        return "gates" if name.split(".")[parts.layers_name.count(".") + 2] == "gate" else "layers"
    return "others"


def decoder_facts(opened: OpenedDecoder, length: int | None = None) -> dict[str, Any]:
    """Size, cost per token at sequences of `length` (by default the context), and memory."""
    decode(Length | None, length, "length")
    model = opened.skeleton(torch.float32)
    length = length or opened.context or 1
    costs = cost_rows(model, length)
    configs = [one.config.get_text_config() for one in members_of(model)]
    depth, width = max(one.num_hidden_layers for one in configs), sum(one.hidden_size for one in configs)
    cached = sum(2 * one.num_hidden_layers * _cached_channels(one) for one in configs)
    rows = [{"name": name, "layers": depth if name == "layers" else None, **vars(row)} for name, row in costs.items()]
    sizes = {"vocab_size": opened.vocab_size, "width": width, "context": opened.context or 0}
    parts = {"layers": depth, "stages": rows, "ends": None, "compression": [], "trainable": True}
    facts = cost_facts(sum(costs.values(), Cost()), length, cached, **sizes, **parts)
    return facts | {"kernels": {"summary": "plain, as transformers computes it", "refusals": {}}}


def members_of(model: "transformers.PreTrainedModel") -> list["transformers.PreTrainedModel"]:
    """The decoders of the active members, or the one decoder that a model is."""
    if not has_members(model):
        return [model]
    return [model.decoders[model.members[name]["decoder"]] for name in model.active]  # type: ignore[misc]


def _cached_channels(config: Any) -> int:
    """What a layer keeps of a token as its key."""
    return (getattr(config, "num_key_value_heads", None) or attention_heads(config)) * head_size(config)


def decoder_notes(opened: OpenedDecoder) -> list[str]:
    """What a decoder is, and what its adapters are for."""
    notes = []
    if opened.has_gates:
        gates = read_adapter(opened.folder).gates
        layers = ", ".join(map(str, gates.layers or ()))
        notes.append(f"Gates ({gates.kind.kind}) on layers {layers}.")  # type: ignore[attr-defined]
    if opened.has_lora:
        notes.append("LoRA adapters, counted as merged into its matrices.")
    if opened.base is not None:
        return [*notes, f"The base is {opened.base.address}.", *decoder_notes(opened.base)]
    if opened.kind == MEMBERS:
        kinds = {name: own["model_type"] for name, own in opened.config.decoders.items()}
        each = ", ".join(
            f"{one['name']} ({kinds[one['decoder']]}{', LoRA' * ('lora' in one)})" for one in opened.config.members
        )
        return [f"Its members, whose probabilities are averaged: {each}."]
    return [f"This is a decoder of transformers ('{opened.config.model_type}'), used as it is."]
