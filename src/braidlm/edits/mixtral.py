"""Upcycling to Mixtral: the plan, the weights shard by shard, and a check of what the result computes."""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, MixtralConfig

from braidlm.bridges.bridge import bridges
from braidlm.bridges.checkpoint import INDEX_FILE, Checkpoint
from braidlm.bridges.hugging_face import HuggingFaceBridge, older_rope_settings
from braidlm.core import console
from braidlm.core.differences import bullet_list
from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, write_json, write_text
from braidlm.core.models.card import CARD, USE_AS_IT_IS, licence_record, model_card
from braidlm.core.models.folders import GENERATION, load_lineage, versions
from braidlm.core.models.logits import check_promise, fits_beside, logits_of_transformers, probe_ids, rounding
from braidlm.edits.account import SOURCE, Account, Fresh, from_source
from braidlm.opening.opened_model import OpenedModel

MIXTRAL_SOURCES = ("llama", "mistral")
"""The model types that have Mixtral's attention, norms and positions."""
KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "attention_dropout",
    "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",
)  # fmt: skip
"""Settings of the same name and meaning in Llama, Mistral and Mixtral."""
FEED = re.compile(r"(?P<layer>.+\.layers\.\d+)\.mlp\.(?P<matrix>\w+)\.weight")
EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""The matrices of a feed-forward part, and their names in an expert."""
EXPERTS = ".experts."
"""In the name of every tensor of an expert."""


@dataclass
class MixtralPlan:
    """The new model, and the origin of each of its tensors."""

    source: OpenedModel
    checkpoint: Checkpoint
    config: MixtralConfig
    account: Account
    tensors: dict[str, Tensor]
    """The new model's tensors on the meta device, by their names in its files."""
    notes: list[str]

    @property
    def title(self) -> str:
        """What becomes of which model, in one sentence."""
        before = sum(prod(shape) for shape in self.checkpoint.shapes.values())
        after = sum(tensor.numel() for tensor in self.tensors.values())
        count, top_k = self.config.num_local_experts, self.config.num_experts_per_tok
        idle = sum(t.numel() for name, t in self.tensors.items() if EXPERTS in name) * (count - top_k) // count
        experts = f"{count} experts for each feed-forward part, of which a token takes {top_k}"
        size = f"{after:,} parameters in place of {before:,}, {after - idle:,} active per token"
        written = f"{sum(tensor.nbytes for tensor in self.tensors.values()):,} bytes to write"
        return f"Upcycle {self.source.title} to Mixtral: {experts}; {size}; {written}"


def plan_mixtral(source: OpenedModel, experts: int, top_k: int) -> MixtralPlan:
    """Read a folder's configuration and the names of its tensors, and say what becomes of each."""
    bridge = bridges[source.kind]()
    assert isinstance(bridge, HuggingFaceBridge)
    config = bridge.foreign_config(source.folder)
    problems = []
    if getattr(config, "attention_bias", False):
        problems.append("attention has biases (attention_bias); Mixtral's has none")
    if getattr(config, "mlp_bias", False):
        problems.append("the feed-forward has biases (mlp_bias); Mixtral's has none")
    if len(kinds := sorted(set(getattr(config, "layer_types", None) or ()))) > 1:
        problems.append(f"layers have attention of several types ({', '.join(kinds)}); Mixtral has one for all")
    if problems:
        what = f"Mixtral cannot express this {bridge.title}:{bullet_list(problems)}"
        todo = "With `--to braid` the result is a Braid model, which can express more."
        raise BraidError(what, str(source.folder / "config.json"), todo)
    checkpoint = bridge.open_checkpoint(source.folder)
    notes = bridge.resolve_tied_head(config, checkpoint)
    checkpoint.check(bridge.target_of(config).shapes, f"the {bridge.title} that config.json describes", source.folder)
    stored = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        for name, tensor in checkpoint.stored.items()
    }
    account, tensors = _account(stored, experts)
    account.check(tensors, {SOURCE: stored})
    mixtral = MixtralConfig(
        **{name: getattr(config, name) for name in KEPT},
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        sliding_window=config.sliding_window if config.model_type == "mistral" else None,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        architectures=["MixtralForCausalLM"],
        dtype=stored[bridge.embedding].dtype,
    )
    left = [f"not read: {name} ({why})" for name, why in checkpoint.ignored.items()]
    return MixtralPlan(source, checkpoint, mixtral, account, tensors, notes + left[:3])


def _account(stored: dict[str, Tensor], experts: int) -> tuple[Account, dict[str, Tensor]]:
    """The origin of every tensor of Mixtral's files, and these tensors."""
    account, tensors = Account(), {}
    for name, tensor in stored.items():
        feed = FEED.fullmatch(name)
        if feed is None:
            account.origins[name], tensors[name] = from_source(name), tensor
            continue
        sparse = f"{feed['layer']}.block_sparse_moe"
        if feed["matrix"] == "gate_proj":
            router = f"{sparse}.gate.weight"
            account.origins[router] = Fresh("routers", f"{sparse}.gate")
            tensors[router] = tensor.new_empty(experts, tensor.shape[1])
        for number in range(experts):
            expert = f"{sparse}{EXPERTS}{number}.{EXPERT[feed['matrix']]}.weight"
            account.origins[expert], tensors[expert] = from_source(name), tensor
    return account, tensors


COPIED = ("*token*.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template*", "LICENSE*", GENERATION)
"""Files of the source that the result has too: the tokenizer's, and how text is generated."""


def write_mixtral(plan: MixtralPlan, out: Path, record: dict[str, Any], noise: float) -> None:
    """Write the folder in one atomic step, after its logits have been compared with the source's."""
    source = plan.source.folder
    generator = torch.Generator().manual_seed(record["options"]["seed"])

    def read(name: str) -> Tensor:  # the writer asks for the tensors in one fixed order
        origin, target = plan.account.origins[name], plan.tensors[name]
        if isinstance(origin, Fresh):
            return (torch.randn(target.shape, generator=generator) * plan.config.initializer_range).to(target.dtype)
        tensor = origin.compute(lambda part: plan.checkpoint.read(part.tensor))
        if noise and EXPERTS in name:
            wide = tensor.float()
            tensor = (wide + noise * wide.std() * torch.randn(wide.shape, generator=generator)).to(target.dtype)
        return tensor

    with atomic_folder(out) as folder:
        settings = plan.config.to_diff_dict() | older_rope_settings(plan.config.rope_parameters)
        write_json(folder / "config.json", settings)
        write_shards(folder, plan.tensors, read)
        GenerationConfig.from_model_config(plan.config).save_pretrained(folder)
        for path in (path for pattern in COPIED for path in source.glob(pattern)):
            shutil.copyfile(path, folder / path.name)
        origin = {"model": plan.source.title, "format": plan.source.kind, "weights": plan.checkpoint.hashes()}
        before = load_lineage(source)
        lineage = {
            "format": 1,
            **record,
            "measured": _compare(plan, folder, promised=not noise),
            "sources": [origin | licence_record(source) | ({"lineage": before} if before else {})],
            **plan.account.record(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
        }
        write_json(folder / "lineage.json", lineage)
        write_text(folder / CARD, model_card(out.name, lineage, use=USE_AS_IT_IS))


def _compare(plan: MixtralPlan, folder: Path, promised: bool) -> dict[str, Any]:
    """The change of logits on random tokens, for the lineage; where none is promised and one is found, an error.

    They are computed in float32, where rounding is small, by one model after the other. Where the new one does not fit
    into memory like that, they are not compared, and that is said.
    """
    if not fits_beside(plan.tensors.values()):
        return {"logits": "not compared"}
    ids = probe_ids(plan.config)
    before, after = (logits_of_transformers(each, ids) for each in (plan.source.folder, folder))
    change, largest = (after - before).abs().max().item(), before.abs().max().item()
    console.say(f"  a logit changed by at most {change:.3g} (the largest is {largest:.3g})")
    if promised:
        allowed = rounding(before)
        promise = f"this edit promises not to change a logit by more than {allowed:.3g}, and one changed by"
        check_promise(promise, before, after, allowed)
    return {"largest_change_of_a_logit": change, "largest_logit": largest}


SHARD_BYTES = 2_000_000_000
"""The largest size of a file, unless a tensor alone is larger; safetensors holds a shard twice while it writes."""


def write_shards(
    folder: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor], max_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors that `tensors` describes on the meta device; `read` gives each when its turn comes."""
    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=max_bytes)
    done = 0
    with console.progress("weights", len(tensors), "tensors") as advance:
        for file, names in split.filename_to_tensors.items():
            # Copies, because safetensors refuses tensors that share memory.
            shard = {name: read(name).clone(memory_format=torch.contiguous_format) for name in names}
            save_file(shard, folder / file, metadata={"format": "pt"})
            done += len(names)
            advance(done, file)
    if split.is_sharded:
        write_json(folder / INDEX_FILE, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
