"""`braid edit share`: layers of a trained model that have the same weights from now on, to be tuned together.

A shared tensor is the average of those of all layers, or the first layer's. With a LoRA, each layer keeps the best
low-rank approximation of what its own matrices had beside the shared ones.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import skeleton
from braidlm.edits.account import SOURCE, Account, Derived, Fresh, Part, moved, parameters, targets
from braidlm.edits.edit import Edit, EditPlan, edits
from braidlm.edits.modules import layers_of, stages_of
from braidlm.model.config.ranges import Size
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.stages import LowRankLinear, LowRankStackedLinear
from braidlm.opening.braid import OpenedBraid


@edits.register("share")
@dataclass(frozen=True)
class Share(Edit):
    """What layers share, and where its weights come from."""

    about: ClassVar[str] = "let layers share feed-forward parts, attentions or whole blocks, for fewer parameters"

    what: Literal["feeds", "attentions", "blocks"]
    """What the layers of each stage share: feed-forward parts, attentions, or blocks with their norms and routers."""
    layers: Literal["all", "interior"] = "all"
    """Which layers share: all of a stage, or all but its first and its last."""
    by: Literal["average", "first"] = "average"
    """Whether a shared tensor is the average of the layers' own, or the first layer's."""
    lora: Size | None = None
    """Rank of a low-rank addition of each layer, which keeps as much of the layer's own matrices as it can."""

    def plan(self, source: OpenedBraid) -> EditPlan:
        stages, addresses = stages_of(layers_of(source.info))
        sharing = [number for number, stage in enumerate(stages) if self._share(stage)]
        if not sharing:
            least = f"at least {self._least} layers{'' if self.layers == 'all' else ', of which 2 are interior'}"
            raise BraidError(f"no stage of this model has {least} of one shape to share weights", source.title)
        model = skeleton(source.config_with(stages=stages))
        before = {n: origin.parts[0].tensor for n, origin in moved(model.state_dict(), addresses).derived.items()}
        old, new = source.info.parameters, parameters(model)
        fewer = f"{new:,} parameters in place of {old:,} ({new / old:.1%})"
        title = f"Share {self.what} of {self.layers} layers of {source.title}: {fewer}"
        notes = [f"stages.{n} ({next(iter(stages[n]))}) shares {self.what}" for n in sharing]
        if self.lora:
            notes.append("a LoRA begins as the best approximation of what its layer's own matrices had beside these")
        notes.append("the model predicts less well now: train it on, with `braid train RECIPE start_from=DIR`")
        finish = partial(_fit_low_rank, source=source, before=before) if self.lora else None
        account = self._account(model, before, source)
        return EditPlan(title, model, account, [*source.notes, *notes], finish=finish)

    @property
    def _least(self) -> int:
        return 2 if self.layers == "all" else 4

    def _share(self, stage: dict[str, Any]) -> bool:
        """Let a stage share, if it can and has layers enough."""
        ((_, options),) = stage.items()
        paths = options.get("paths") or [{"depth": None}]  # blocks in a row are as one path
        if "share" not in options or min(path["depth"] or options["layers"] for path in paths) < self._least:
            return False
        options["share"] = {"kind": self.what, "layers": self.layers, "lora": self.lora}
        return True

    def _account(self, model: BraidForCausalLM, before: Mapping[str, str], source: OpenedBraid) -> Account:
        account, uses = Account(), defaultdict(list)
        for name in model.state_dict():
            uses[model.tied.get(name, name)].append(Part(SOURCE, before[name]))
        for name in targets(model):
            own = [part for part in uses[name] if part.tensor in source.info.tensors]
            if not own:
                account.origins[name] = Fresh("low-rank additions", name.rpartition(".lora.")[0] + ".lora")
            elif self.by == "average":
                account.origins[name] = Derived(tuple(own), "averaged" if len(own) > 1 else "as it is")
            else:
                account.origins[name] = Derived((own[0],))
                account.left_out |= dict.fromkeys(own[1:], "the first layer's is shared")
        return account


def _fit_low_rank(model: BraidForCausalLM, source: OpenedBraid, before: Mapping[str, str]) -> None:
    """Give each low-rank addition the largest singular values of what its layer's own matrix had beside the shared. The
    rows of `down` are of length 1, also where nothing is lost, so that training can change `up`."""
    for address, module in model.named_modules():
        if not isinstance(module, (LowRankLinear, LowRankStackedLinear)):
            continue
        matrices: list[Any] = [source.read(before[f"{address}.weight"]) - module.weight]
        matrices += [module.lora.down.weight, module.lora.up.weight]
        if isinstance(module, LowRankStackedLinear):
            matrices = [matrix.transpose(-1, -2) for matrix in matrices]
        lost, down, up = matrices
        left, values, right = torch.linalg.svd(lost, full_matrices=False)
        rank = min(down.shape[-2], values.shape[-1])  # beyond it there is nothing to approximate
        down[..., :rank, :] = right[..., :rank, :]
        up[..., :rank] = left[..., :rank] * values[..., None, :rank]
