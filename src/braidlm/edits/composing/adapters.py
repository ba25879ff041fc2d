"""LoRA adapters as members that share their base: which matrices they change, and whether they stand on one base."""

import math
import re
from collections.abc import Mapping

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from braidlm.core.errors import BraidError
from braidlm.core.models.runs import LORA_CONFIG
from braidlm.core.reading import read_json
from braidlm.model.members import BASE, MembersForCausalLM
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.gated_folders import weights_sha256

WEIGHTS = "adapter_model.safetensors"
TENSOR = re.compile(r"base_model\.model\.(?P<matrix>.+)\.lora_(?P<side>[AB])\.weight")
MORE = ("use_dora", "modules_to_save", "target_parameters", "rank_pattern", "alpha_pattern", "lora_bias")
"""Settings of peft by which adapters are more than products of two matrices with one scale."""
APART = "Make each a whole folder (`braid convert ADAPTER --to transformers --out WHOLE`), and compose these."


def members_of(models: Mapping[str, OpenedDecoder]) -> dict[str, dict[str, object]]:
    """For each model its `decoder`, and `lora` where it is adapters on a base that it shares with others."""
    found = {name: matrices for name, one in models.items() if (matrices := lora_matrices(one)) is not None}
    shared = check_one_base({name: models[name] for name in found})
    members: dict[str, dict[str, object]] = {name: {"decoder": BASE, "lora": lora} for name, lora in found.items()}
    for name in models.keys() - found.keys():
        is_base = shared is not None and models[name].base is None and weights_sha256(models[name].folder) == shared
        if shared is not None and not is_base and name == BASE:
            what = f"beside adapters no other model can be called '{BASE}': that is what they stand on"
            raise BraidError(what, str(models[name].folder), "Give it another name with `--names`.")
        members[name] = {"decoder": BASE if is_base else name}
    return {name: members[name] for name in models}


def lora_matrices(one: OpenedDecoder) -> dict[str, dict[str, float]] | None:
    """Rank and scale of LoRA adapters by the matrix that they change; None for what has to be merged into its base."""
    if not one.has_lora or one.base is None or one.base.base is not None or not (one.folder / WEIGHTS).is_file():
        return None
    config = read_json(one.folder / LORA_CONFIG)
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or any(map(config.get, MORE)):
        return None
    modules, found = dict(one.base.skeleton(torch.float32).named_modules()), {}
    with safe_open(one.folder / WEIGHTS, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            match = TENSOR.fullmatch(name)
            if match is None or not isinstance(modules.get(match["matrix"]), (nn.Linear, Conv1D)):
                return None
            if match["side"] == "A":
                rank = file.get_slice(name).get_shape()[0]
                scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
                found[match["matrix"]] = {"rank": rank, "scale": scale}
    return found


def check_one_base(models: Mapping[str, OpenedDecoder]) -> str | None:
    """The hash of the base that all these adapters stand on; None without any."""
    first: tuple[str, str] | None = None
    for name, one in models.items():
        assert one.base is not None
        sources = (one.lineage or {}).get("sources") or []
        trained_on = {source["sha256"] for source in sources if "model" in source and source.get("sha256")}
        if trained_on and one.base.sha256 not in trained_on:
            what = f"'{name}' was trained on other weights than its base, {one.base.title}, has now (another SHA-256)"
            raise BraidError(what, str(one.folder), "Put the base back as it was, or train the adapters again.")
        own = weights_sha256(one.base.folder)
        if first is not None and own != first[1]:
            what = f"'{first[0]}' and '{name}' are adapters of other bases: their weights have other SHA-256 hashes"
            raise BraidError(what, str(one.folder), APART)
        first = first or (name, own)
    return None if first is None else first[1]


@torch.no_grad()
def fill_adapters(model: MembersForCausalLM, models: Mapping[str, OpenedDecoder]) -> None:
    """Give the adapters of a model of members the weights of these folders."""
    for name, member in model.members.items():
        tensors = load_file(models[name].folder / WEIGHTS) if member.get("lora") else {}
        for stored, tensor in tensors.items():
            match = TENSOR.fullmatch(stored)
            assert match is not None
            adapter = model.decoders[member["decoder"]].get_submodule(match["matrix"]).adapters[name]  # type: ignore[union-attr, operator, index]
            (adapter.down if match["side"] == "A" else adapter.up).weight.copy_(tensor)  # type: ignore[union-attr, operator]
