"""The one model that is left of an average as an ordinary model, as it was before it was composed."""

from typing import Any

from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.paths.parallel import BLOCK_OPTIONS, blocks_in_layer
from braidlm.opening.braid import OpenedBraid


def unwrapped(source: OpenedBraid, architecture: dict[str, Any]) -> tuple[BraidConfig, dict[str, str]] | None:
    """The configuration of an average of one path as that of the path alone, and the beginnings of its tensors' names
    with those that they have in the average; None where its layers do more than one block after another does.
    """
    (part,) = architecture["norm"]["paths"]
    stages, beginnings = [], {"model.norm.": f"model.norm.paths.{part['name']}."}
    for number, choice in enumerate(architecture["stages"]):
        stage = choice["parallel"]
        (path,) = stage["paths"]
        join = stage["join"]
        if stage["share"] is not None or join["norm"] is not None or join["residual"]:
            return None
        layers, depth = stage["layers"], path["depth"] or stage["layers"]
        for layer in range(layers):
            for inside, index in enumerate(blocks_in_layer(depth, layers, layer)):
                own = f"model.stages.{number}.layers."
                beginnings[f"{own}{index}."] = f"{own}{layer}.paths.{path['name']}.{inside}."
        stages.append({"block": {"layers": depth, **{name: path[name] for name in BLOCK_OPTIONS}}})
    head = {"kind": "linear", "bias": architecture["head"]["bias"]}
    frozen = [part for part in source.config.frozen if part not in ("paths", "joins")]
    config = source.config_with(frozen, **{**architecture, "stages": stages, "norm": part["norm"], "head": head})
    config.paths = None
    return config, beginnings
