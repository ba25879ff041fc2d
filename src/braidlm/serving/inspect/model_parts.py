"""What `/braid/models` tells of a model: what it is, and the names of its parts that can be switched off."""

from pathlib import Path
from typing import Any

import torch

from braidlm.core.errors import BraidError
from braidlm.inspection.layers import routing_modules, short_labels
from braidlm.inspection.token_routings import gate_name
from braidlm.model.paths.average import AverageHead
from braidlm.model.paths.switches import module_routers, path_names
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.gating import gates_of
from braidlm.opening.opened_model import OpenedModel
from braidlm.serving.chat_template import chat_template
from braidlm.serving.inspect.answers import ModelAnswer, Modules
from braidlm.serving.models import ServedModel


class ModelParts:
    """Finds the parts of models, which builds their modules without weights, once for each folder."""

    def __init__(self) -> None:
        self.known: dict[Path, dict[str, Any]] = {}

    def of(self, served: ServedModel, run: str | None) -> ModelAnswer:
        """A model that is served; one that cannot be opened now says why. `run` is the id of its run."""
        told: dict[str, Any] = {"name": served.name, "loaded": served.engine is not None, "run": run}
        try:
            opened = served.opened
            if opened.folder not in self.known:
                self.known[opened.folder] = _parts(opened)
            return ModelAnswer(**told, **self.known[opened.folder])
        except BraidError as error:  # a run before its first checkpoint, a folder that was removed
            return ModelAnswer(**told, problem=str(error))


def _parts(opened: OpenedModel) -> dict[str, Any]:
    if isinstance(opened, OpenedBraid):
        model: Any = opened.info.model
    else:
        assert isinstance(opened, OpenedDecoder)
        model = opened.skeleton(torch.float32)
    head, is_braid = getattr(model, "head", None), isinstance(opened, OpenedBraid)
    choosing = routing_modules(model) if is_braid else []
    labels = dict(zip(choosing, short_labels(model, choosing), strict=True)) if is_braid else {}
    return {
        "kind": opened.kind,
        "chat": chat_template(opened) is not None,
        "context": opened.context,
        "limit": opened.limit,
        "vocab_size": opened.vocab_size,
        "tokenizer": opened.tokenizer.fingerprint,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "paths": list(path_names(model)) if is_braid else [],
        "modules": [
            Modules(layer=router.address.removesuffix(".router"), label=labels[router], names=list(router.choices))
            for router in (module_routers(model) if is_braid else ())
        ],
        "gates": [gate_name(number) for number in gates_of(model)],
        "members": list(head.names) if isinstance(head, AverageHead) else [],
    }
