"""A decoder of transformers that is built with gates, for folders that hold base and gates together."""

from typing import Any

from .config.registry import Choice
from .gates import gate_kinds, gated, make_gate


class GatedDecoder:
    """Mixed into a decoder's class: gates around the layers that `config.gates` lists.

    `config.gates` has `kind` (with its options), `layers` (counted from 1) and `inside`, the name of their list.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        options = dict(config.gates["kind"])
        kind = options.pop("kind")
        choice = Choice(kind, gate_kinds[kind].Config(**options))
        model: Any = self
        layers, width = model.get_submodule(config.gates["inside"]), config.get_text_config().hidden_size
        for number in config.gates["layers"]:
            layers[number - 1] = gated(layers[number - 1], make_gate(choice, width))
