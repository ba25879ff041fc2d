"""Writing a Mixtral folder: tensors one by one in the type that they have, and a check of what the result computes."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, MixtralConfig

from braidlm.bridges.bridge import bullet_list
from braidlm.bridges.rope import older_rope_settings
from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, write_json, write_text
from braidlm.core.models.card import exported_card
from braidlm.core.models.folders import GENERATION, errors_of_transformers, load_lineage, versions
from braidlm.core.models.licence import CARD, licence_record
from braidlm.core.models.memory import free_memory
from braidlm.edits.account import Fresh
from braidlm.edits.edit import PROBE, UNCHANGED
from braidlm.edits.upcycling.mixtral import EXPERTS, MixtralPlan
from braidlm.opening.shards import write_shards

COPIED = ("*token*.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template*", "LICENSE*", GENERATION)
"""Files of the source that the result has too: the tokenizer's, and how text is generated."""


def write_mixtral(plan: MixtralPlan, out: Path, record: dict[str, Any], noise: float) -> None:
    """Write the folder in one atomic step, after its logits have been compared with the source's."""
    source = plan.source.folder
    with atomic_folder(out) as folder:
        write_json(folder / "config.json", _settings(plan.config))
        write_shards(folder, plan.tensors, _reader(plan, record["options"]["seed"], noise))
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
        write_text(folder / CARD, exported_card(out.name, lineage))


def _settings(config: MixtralConfig) -> dict[str, Any]:
    """The content of config.json; rotary positions also under the names that transformers 4 reads."""
    return config.to_diff_dict() | older_rope_settings(config)


def _reader(plan: MixtralPlan, seed: int, noise: float) -> Callable[[str], Tensor]:
    """A function that makes one tensor of the new model; the writer asks for them in one fixed order."""
    generator = torch.Generator().manual_seed(seed)

    def read(name: str) -> Tensor:
        origin, target = plan.account.origins[name], plan.tensors[name]
        if isinstance(origin, Fresh):
            return (torch.randn(target.shape, generator=generator) * plan.config.initializer_range).to(target.dtype)
        tensor = origin.compute(lambda part: plan.checkpoint.read(part.tensor))
        if noise and EXPERTS in name:
            wide = tensor.float()
            tensor = (wide + noise * wide.std() * torch.randn(wide.shape, generator=generator)).to(target.dtype)
        return tensor

    return read


def _compare(plan: MixtralPlan, folder: Path, promised: bool) -> dict[str, Any]:
    """The change of logits on random tokens, for the lineage; where none is promised and one is found, an error.

    They are computed in float32, where rounding is small, by one model after the other. Where the new one does not fit
    into memory like that, they are not compared, and that is said.
    """
    needed, free = 4 * sum(tensor.numel() for tensor in plan.tensors.values()), free_memory(torch.device("cpu"))
    if free is not None and needed > free:
        numbers = f"in float32 the new model needs {needed / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free"
        console.say(f"  logits are not compared: {numbers}")
        return {"logits": "not compared"}
    length = min(PROBE[1], plan.config.max_position_embeddings)
    ids = torch.randint(plan.config.vocab_size, (PROBE[0], length), generator=torch.Generator().manual_seed(0))
    before, after = _logits(plan.source.folder, ids), _logits(folder, ids)
    change, largest = (after - before).abs().max().item(), before.abs().max().item()
    console.say(f"  a logit changed by at most {change:.3g} (the largest is {largest:.3g})")
    allowed = UNCHANGED * max(1.0, largest)
    if promised and not change <= allowed:
        raise BraidError(
            f"this edit promises not to change a logit by more than {allowed:.3g}, and one changed by {change:.3g}",
            todo="Nothing was written. Please report it: this is a mistake of Braid's.",
        )
    return {"largest_change_of_a_logit": change, "largest_logit": largest}


@torch.no_grad()
def _logits(folder: Path, ids: Tensor) -> Tensor:
    """The logits of a folder as plain transformers opens it; a tensor that it misses or does not know is an error."""
    with errors_of_transformers(folder):
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    if wrong := [f"{what}: {name}" for what in ("missing_keys", "unexpected_keys") for name in sorted(info[what])]:
        raise BraidError(f"transformers does not read these weights as they are:{bullet_list(wrong)}", str(folder))
    # Transformers needs twice the memory to load weights in another type than the file's.
    return model.float().eval()(ids).logits  # type: ignore[no-any-return]
