"""Folders that hold a decoder with its gates: plain transformers opens them with `trust_remote_code=True`.

The code that a folder carries, `modeling_gated.py`, derives from the decoder's own class in transformers. The type of
the model is another one (`gated_llama`), so that nothing can open the folder and leave out the gates unnoticed.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from braidlm import __version__
from braidlm.bridges.rope import older_rope_settings
from braidlm.core.errors import BraidError
from braidlm.core.files import write_json, write_text
from braidlm.core.reading import read_json
from braidlm.model.bundle import ROOT, join_files
from braidlm.model.config.strict import encode
from braidlm.model.gates import GatedDecoder, gate_kinds
from braidlm.opening.adapter import gates_config_of
from braidlm.opening.gating import gates_of
from braidlm.opening.structure import find_parts

CODE = "modeling_gated.py"
PREFIX = "gated_"
HEADER = '''"""A decoder with gates, in one file, so that transformers opens this folder: see config.json, `auto_map`.

Written by braidlm {version}; a comment names the file of its package `braidlm.model` that each part comes from.
License: Apache-2.0.
"""

'''
CLASSES = """

# The model: the decoder's own class, with gates.
from transformers import {config}, {model}  # noqa: E402


class Gated{config}({config}):
    model_type = "{prefix}{kind}"


class Gated{model}(GatedDecoder, {model}):
    config_class = Gated{config}
"""


def write_decoder(model: PreTrainedModel, folder: Path) -> None:
    """A complete folder of a decoder, with its gates if it has any; weights, configuration and code."""
    if not gates_of(model):
        model.save_pretrained(folder)
        return
    kind = model.config.model_type.removeprefix(PREFIX)
    plain_config, plain = _plain_classes(kind, model)
    code = _code(kind, plain_config.__name__, plain.__name__, gates_config_of(model).kind.kind)
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
        "gates": {**encode(gates_config_of(model)), "inside": find_parts(model).layers_name},
    }
    write_json(folder / "config.json", config)
    write_text(folder / CODE, code)


def register_gated(folder: Path) -> None:
    """Let transformers open a folder of a decoder with gates by our own code, in place of the folder's."""
    kind = read_json(folder / "config.json").get("model_type")
    if not isinstance(kind, str) or not kind.startswith(PREFIX) or kind in CONFIG_MAPPING:
        return
    plain_config, plain = _plain_classes(kind.removeprefix(PREFIX), folder)
    config: Any = type(f"Gated{plain_config.__name__}", (plain_config,), {"model_type": kind})
    model: Any = type(f"Gated{plain.__name__}", (GatedDecoder, plain), {"config_class": config})
    AutoConfig.register(kind, config)
    AutoModelForCausalLM.register(config, model)


def _plain_classes(kind: str, where: Any) -> tuple[type[PretrainedConfig], type[PreTrainedModel]]:
    """The classes of transformers for a type of model, which it must have itself."""
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BraidError(
            f"transformers itself has no decoder '{kind}': its code is another folder's",
            str(where) if isinstance(where, Path) else None,
            "Save the gates alone, as an adapter.",
        )
    return CONFIG_MAPPING[kind], MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]


def _code(kind: str, config: str, model: str, gate: str) -> str:
    gate_class = gate_kinds[gate]
    if not gate_class.__module__.startswith("braidlm.model."):
        raise BraidError(
            f"the gates are of a kind of another package, '{gate}', whose code a folder cannot carry",
            todo="Save the gates alone, as an adapter.",
        )
    body = join_files([ROOT / "gates.py"])
    classes = CLASSES.format(config=config, model=model, kind=kind, prefix=PREFIX)
    return HEADER.format(version=__version__) + body.rstrip("\n") + "\n" + classes
