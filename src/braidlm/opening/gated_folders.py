"""Folders of gates: adapters that name the base they belong to, and folders that hold a decoder with its gates.

An adapter holds `gates.safetensors`, under the names that the gates have in the model, and `gate_config.json`. A folder
of both is opened by plain transformers with `trust_remote_code=True`: the code that it carries, `modeling_gated.py`,
derives from the decoder's own class in transformers. The type of the model is another one (`gated_llama`), so that
nothing can open the folder and leave out the gates unnoticed.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from braidlm.bridges.hugging_face import older_rope_settings
from braidlm.core.differences import compare_shapes, listed
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.files import sha256_of, write_json, write_text
from braidlm.core.models.card import CARD, USE, model_card, switch_section
from braidlm.core.models.folders import load_lineage, write_lineage
from braidlm.core.models.integrity import (
    ALLOW_CHANGED,
    WEIGHT_FILES,
    check_finite,
    check_hash,
    model_hash,
    opened_weights,
)
from braidlm.core.models.runs import LORA_CONFIG
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.bundle import alone
from braidlm.model.config.ranges import Layers, Size
from braidlm.model.config.strict import decode, encode
from braidlm.model.gates import GatedDecoder, GatesConfig, gate_kinds
from braidlm.opening.gating import MEMBERS, attach, detach, find_parts, gates_of, has_members
from braidlm.opening.names import is_hub_name, title_of

GATES, GATE_CONFIG = "gates.safetensors", "gate_config.json"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template*")
"""What a folder of base and gates has from the base beside its weights."""
USE_ADAPTER = """These are adapters for the model {base}, which is needed beside them. With Braid:

```python
from braidlm.opening.open import open_model

decoder = open_model(".")
model, tokenizer = decoder.load(), decoder.tokenizer
```

`model.save_pretrained` would leave gates out of what transformers opens. One whole folder, for anybody:
`braid convert . --to transformers --out ../whole`."""


@dataclass
class GateAdapter:
    """What `gate_config.json` says."""

    base: str
    """The base model: a folder, or a name on the Hub."""
    base_sha256: str | None
    """The SHA-256 of the base, as `weights_sha256` computes it; None if its weights never were in files."""
    model_type: str
    """What transformers calls the base's architecture."""
    width: Size
    """Channels of the base's stream."""
    depth: Layers
    gates: GatesConfig
    format: int = 1


def is_adapter(folder: Path | str) -> bool:
    """Whether a folder holds gates for a base model that it names."""
    return (Path(folder) / GATE_CONFIG).is_file()


def read_adapter(folder: Path | str) -> GateAdapter:
    """The configuration of a gate adapter."""
    path = Path(folder) / GATE_CONFIG
    if not path.is_file():
        raise BraidError(f"this is not a gate adapter (no {GATE_CONFIG})", str(folder))
    with errors_at(str(path)):
        return decode(GateAdapter, read_json(path))


def weights_sha256(base: Path | str) -> str:
    """The SHA-256 over the files of a folder that hold weights."""
    if not any(any(Path(base).glob(pattern)) for pattern in WEIGHT_FILES):
        raise BraidError("this folder holds no weights", str(base))
    return model_hash(Path(base), WEIGHT_FILES)


def gates_config_of(model: "transformers.PreTrainedModel") -> GatesConfig:
    """Kind and layers of the gates that a decoder has."""
    gates = gates_of(model)
    if not gates:
        raise BraidError("this model has no gates", todo="Add some: `braid edit gate MODEL --out DIR`.")
    return GatesConfig(next(iter(gates.values())).choice, list(gates))


def write_adapter_files(
    model: "transformers.PreTrainedModel",
    folder: Path,
    base: str,
    base_sha256: str | None,
    lineage: dict[str, Any],
    name: str,
    tokenizer: BraidTokenizer | None = None,
) -> None:
    """The files of an adapter, into a folder that the caller makes final."""
    parts, gates = find_parts(model), gates_config_of(model)
    adapter = GateAdapter(base, base_sha256, model.config.model_type, parts.width, len(parts.layers), gates)
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in gate_tensors(model).items()}
    save_file(tensors, folder / GATES, metadata={"format": "pt"})
    write_json(folder / GATE_CONFIG, encode(adapter))
    record = write_lineage(folder, tokenizer, lineage, {"file": GATES, "sha256": sha256_of(folder / GATES)})
    write_adapter_card(folder, name, record, base)


def write_adapter_card(folder: Path, name: str, record: dict[str, Any], base: str) -> None:
    """The card of adapters. Where the base lies on this machine is for their configuration; a card is for others."""
    use = USE_ADAPTER.format(base=base if is_hub_name(base) else title_of(Path(base)))
    use += "\n\n## Switch parts off"
    if (folder / GATES).is_file():
        use += "\nGates by their layers, for a while: `with braidlm.opening.gating.without(model, [1]): ...`"
    if (folder / LORA_CONFIG).is_file():
        use += "\nLoRA adapters: `with peft.PeftModel.from_pretrained(base, folder).disable_adapter(): ...`"
    write_text(folder / CARD, model_card(name, record, use=use))


def gate_tensors(model: "transformers.PreTrainedModel") -> dict[str, Tensor]:
    """The parameters of the gates, by their names in the model."""
    parts = find_parts(model)
    return {
        f"{parts.layers_name}.{number - 1}.gate.{name}": parameter
        for number, gate in gates_of(model).items()
        for name, parameter in gate.named_parameters()
    }


def load_adapter(
    folder: Path | str, model: "transformers.PreTrainedModel", base: Path | str | None = None
) -> GateAdapter:
    """Attach the gates of an adapter to a decoder that is in memory; `detach` takes them away again. With the folder
    `base` that the decoder came from, its weights must be those that the gates were made for."""
    adapter = read_adapter(folder)
    recorded = None if os.environ.get(ALLOW_CHANGED) == "1" else adapter.base_sha256
    if base is not None and recorded is not None and weights_sha256(base) != recorded:
        what = f"the weights of the base, {base}, are not those that these gates were made for (another SHA-256)"
        todo = f"Use the base as it was. If it was changed on purpose, set {ALLOW_CHANGED}=1."
        raise BraidError(what, str(folder), todo)
    path = Path(folder) / GATES
    with opened_weights(path) as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    check_hash(path, load_lineage(folder))
    check_finite(path)
    with errors_at(str(folder)):
        parts = find_parts(model)
        if (parts.width, len(parts.layers)) != (adapter.width, adapter.depth):
            what = f"these gates are for another model, of width {adapter.width} and {adapter.depth} layers;"
            has = f"this one has width {parts.width} and {len(parts.layers)} layers"
            raise BraidError(f"{what} {has}", todo=f"Load them on {adapter.base}.")
        attach(model, adapter.gates)
    own = gate_tensors(model)
    expected, found = ({name: tuple(tensor.shape) for name, tensor in each.items()} for each in (own, stored))
    if problems := compare_shapes(expected, found, f"{GATE_CONFIG} says"):
        detach(model)
        raise BraidError(f"the gates do not fit their configuration: {listed(problems)}", str(folder))
    with torch.no_grad():
        for name, parameter in own.items():
            if not parameter.is_meta:
                parameter.copy_(stored[name])
    return adapter


CODE = "modeling_gated.py"
PREFIX = "gated_"
CLASSES = """

# The model: the decoder's own class, with gates.
from transformers import {config}, {model}  # noqa: E402


class Gated{config}({config}):
    model_type = "{prefix}{kind}"


class Gated{model}(GatedDecoder, {model}):
    config_class = Gated{config}
"""


def write_decoder(model: "transformers.PreTrainedModel", folder: Path) -> None:
    """A complete folder of a decoder, with its gates if it has any; weights, configuration and code."""
    if has_members(model):
        from braidlm.opening.members import write_members

        write_members(model, folder)
        return
    if not gates_of(model):
        model.save_pretrained(folder)
        return
    kind = model.config.model_type.removeprefix(PREFIX)
    plain_config, plain = _plain_classes(kind, model)
    gates = gates_config_of(model)
    if not gate_kinds[gates.kind.kind].__module__.startswith("braidlm.model."):
        what = f"the gates are of a kind of another package, '{gates.kind.kind}', whose code a folder cannot carry"
        raise BraidError(what, todo="Save the gates alone, as an adapter.")
    classes = CLASSES.format(config=plain_config.__name__, model=plain.__name__, kind=kind, prefix=PREFIX)
    code = alone("A decoder with gates", "gates.py") + classes
    # Code that a folder brings along reads its weights under the names that they have in memory.
    model.save_pretrained(folder, save_original_format=False)
    module = CODE.removesuffix(".py")
    saved = read_json(folder / "config.json")
    config = {
        **saved,
        **older_rope_settings(saved.get("rope_parameters")),
        "model_type": f"{PREFIX}{kind}",
        "architectures": [f"Gated{plain.__name__}"],
        "auto_map": {
            "AutoConfig": f"{module}.Gated{plain_config.__name__}",
            "AutoModelForCausalLM": f"{module}.Gated{plain.__name__}",
        },
        "gates": {**encode(gates), "inside": find_parts(model).layers_name},
    }
    write_json(folder / "config.json", config)
    write_text(folder / CODE, code)


def write_whole_files(
    model: "transformers.PreTrainedModel",
    folder: Path,
    lineage: dict[str, Any],
    name: str,
    tokenizer: BraidTokenizer | None = None,
    beside: Iterable[Path] = (),
) -> None:
    """All files of a whole decoder, into a folder that the caller makes final: with its gates if it has any, with a
    tokenizer or with files `beside` the weights that it was made of."""
    write_decoder(model, folder)
    for path in beside:
        shutil.copyfile(path, folder / path.name)
    if tokenizer is not None:
        tokenizer.save(folder)
    hashes = {path.name: sha256_of(path) for path in sorted(folder.glob("*.safetensors"))}
    record = write_lineage(folder, tokenizer, lineage, {"files": hashes})
    use = "\n\n".join([USE, *switch_section(model)])
    write_text(folder / CARD, model_card(name, record, use=use))


def register_ours(folder: Path) -> None:
    """Let transformers open a folder of members, or of a decoder with gates, by our own code, in place of its."""
    kind = read_json(folder / "config.json").get("model_type")
    if kind == MEMBERS:
        import_module("braidlm.opening.members")  # which registers its classes
    if not isinstance(kind, str) or not kind.startswith(PREFIX) or kind in transformers.CONFIG_MAPPING:
        return
    plain_config, plain = _plain_classes(kind.removeprefix(PREFIX), folder)
    config: Any = type(f"Gated{plain_config.__name__}", (plain_config,), {"model_type": kind})
    model: Any = type(f"Gated{plain.__name__}", (GatedDecoder, plain), {"config_class": config})
    transformers.AutoConfig.register(kind, config)
    transformers.AutoModelForCausalLM.register(config, model)


def _plain_classes(
    kind: str, where: Any
) -> "tuple[type[transformers.PretrainedConfig], type[transformers.PreTrainedModel]]":
    """The classes of transformers for a type of model, which it must have itself."""
    if (
        kind not in transformers.CONFIG_MAPPING
        or transformers.CONFIG_MAPPING[kind] not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        what = f"transformers itself has no decoder '{kind}': its code is another folder's"
        raise BraidError(what, str(where) if isinstance(where, Path) else None, "Save the gates alone, as an adapter.")
    return transformers.CONFIG_MAPPING[kind], transformers.MODEL_FOR_CAUSAL_LM_MAPPING[
        transformers.CONFIG_MAPPING[kind]
    ]
