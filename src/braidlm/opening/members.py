"""Folders of members: several decoders of transformers as one model, which carries its own code."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from braidlm.bridges.hugging_face import older_rope_settings
from braidlm.core.files import write_json, write_text
from braidlm.core.reading import read_json
from braidlm.model.bundle import alone
from braidlm.model.members import MembersConfig, MembersForCausalLM
from braidlm.opening.gating import MEMBERS

CODE = "modeling_members.py"
NOT_OF_A_MEMBER = ("transformers_version", "dtype", "architectures", "auto_map", "_name_or_path")
"""What config.json says once, for all members together."""
IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
AUTO_MAP = {
    "AutoConfig": f"{CODE.removesuffix('.py')}.{MembersConfig.__name__}",
    "AutoModelForCausalLM": f"{CODE.removesuffix('.py')}.{MembersForCausalLM.__name__}",
}

AutoConfig.register(MEMBERS, MembersConfig)
AutoModelForCausalLM.register(MembersConfig, MembersForCausalLM)


def members_config(
    decoders: Mapping[str, Any], members: Sequence[dict[str, Any]], judged: bool, rule: Mapping[str, Any], **ids: Any
) -> MembersConfig:
    """The configuration of a model whose decoders have these configurations of transformers; the members are `judged`
    by a `rule`: {window, settle}."""
    own = {name: _own(config) for name, config in decoders.items()}
    return MembersConfig(own, list(members), judged, **rule, architectures=[MembersForCausalLM.__name__], **ids)


def _own(config: Any) -> dict[str, Any]:
    settings = {key: value for key, value in config.to_diff_dict().items() if key not in NOT_OF_A_MEMBER}
    return {**settings, **older_rope_settings(settings.get("rope_parameters"))}


def of_decoders(config: MembersConfig, decoders: Mapping[str, PreTrainedModel]) -> MembersForCausalLM:
    """The model of a configuration, with these very decoders in memory."""
    with torch.device("meta"):
        model = MembersForCausalLM(config)
    for name, decoder in decoders.items():
        model.decoders[name] = decoder
    model.add_adapters()
    model.generation_config = GenerationConfig(**{key: getattr(config, key) for key in IDS})
    return model.eval()


def without_members(model: MembersForCausalLM, left: Container[str]) -> PreTrainedModel:
    """The model of these members alone, as if the others had never been there; of a whole decoder, that decoder."""
    config = model.config
    members = [member for member in config.members if member["name"] in left]
    used = {member["decoder"]: model.decoders[member["decoder"]] for member in members}
    for matrix in model.adapted:
        for name in matrix.adapters.keys() - {member["name"] for member in members}:
            del matrix.adapters[name]
    with_adapters = any(member.get("lora") for member in members)
    if len(members) == 1 and not with_adapters:
        (decoder,) = used.values()
        decoder.generation_config = model.generation_config
        return decoder  # type: ignore[return-value]
    if not with_adapters:  # the base is a member as any other
        called = {member["decoder"]: member["name"] for member in members}
        members = [member | {"decoder": member["name"]} for member in members]
        used = {called[name]: decoder for name, decoder in used.items()}
    ids = {key: getattr(config, key) for key in IDS}
    rule = {"window": config.window, "settle": config.settle}
    less = members_config({n: one.config for n, one in used.items()}, members, config.judged, rule, **ids)
    return of_decoders(less, used)  # type: ignore[arg-type]


def write_members(model: MembersForCausalLM, folder: Path) -> None:
    """Weights, configuration and code of a folder."""
    # Code that a folder brings along reads its weights under the names that they have in memory.
    model.save_pretrained(folder, save_original_format=False)
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "auto_map": AUTO_MAP})
    write_text(folder / CODE, alone("Decoders as members of one model", "members.py"))
