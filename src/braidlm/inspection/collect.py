"""One pass over texts: what each token chose in each layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from braidlm.inspection.layers import JoinRecords, Layer, record_joins, routing_modules, weighs_tokens
from braidlm.inspection.texts import Text, Windows, windows_of
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.joins import Join
from braidlm.model.routing.routing import Routing

NO_CHOICE = -1
"""The index in a layer that cannot be read, where it takes fewer choices than others, and of tokens that pass it by."""


@dataclass(frozen=True)
class TokenChoices:
    """What the tokens of one text chose. Shapes: L layers, K the largest top_k of any layer, T tokens."""

    chosen_LKT: np.ndarray
    """Indices of choices, the one with the largest weight first; NO_CHOICE where there is none."""
    weights_LKT: np.ndarray
    """The weight of each of them; 0 where there is none."""

    @classmethod
    def empty(cls, layers: Sequence[Layer], tokens: int) -> "TokenChoices":
        """Arrays to be filled."""
        shape = (len(layers), max(layer.top_k for layer in layers), tokens)
        return cls(np.full(shape, NO_CHOICE, np.int16), np.zeros(shape, np.float32))

    @classmethod
    def top_1(cls, choices_LT: np.ndarray) -> "TokenChoices":
        """Every token takes one choice in each layer."""
        return cls(choices_LT[:, None], (choices_LT[:, None] != NO_CHOICE).astype(np.float32))

    @property
    def main_LT(self) -> np.ndarray:
        """The choice with the largest weight."""
        return self.chosen_LKT[:, 0]

    def part(self, tokens: slice) -> "TokenChoices":
        """The choices of some of the tokens."""
        return TokenChoices(self.chosen_LKT[..., tokens], self.weights_LKT[..., tokens])


def closest_path(outputs: Sequence[Tensor], joined: Tensor, active: Sequence[int]) -> Tensor:
    """For each token, which of the `active` paths' outputs has the largest cosine with the joined output, [B, T]."""
    joined = joined.float()
    cosines = torch.stack([torch.cosine_similarity(outputs[n].float(), joined, dim=-1) for n in active], dim=-1)
    return torch.tensor(active, device=joined.device)[cosines.argmax(-1)]


@torch.no_grad()
def collect_choices(
    model: BraidForCausalLM,
    layers: Sequence[Layer],
    texts: Sequence[Text],
    batch: int = 16,
    advance: Callable[[float, str], None] | None = None,
) -> list[TokenChoices]:
    """The choices of each text's tokens. Texts longer than the context are read in windows of it."""
    choices = [TokenChoices.empty(layers, len(text.ids)) for text in texts]
    unrouted = {layer.name for layer in layers if layer.read_by == "cosine"}
    joins = {m.address: m for m in routing_modules(model) if isinstance(m, Join) and m.address in unrouted}
    done = 0
    with record_joins(joins.values()) as records:
        for windows in windows_of([text.ids for text in texts], model.config.max_position_embeddings, batch):
            routings, shares_BTN = _routings(model, windows)
            for index, layer in enumerate(layers):
                if not layer.read_by:
                    continue
                if layer.read_by == "shares":
                    assert shares_BTN is not None
                    chosen_BTK, weights_BTK = _top_1(shares_BTN.argmax(-1))
                else:
                    chosen_BTK, weights_BTK = _choices_in(layer, routings, joins, records)
                for row, (n, at, ids) in enumerate(zip(windows.texts, windows.starts, windows.rows, strict=True)):
                    here = (index, slice(layer.top_k), slice(at, at + len(ids)))
                    choices[n].chosen_LKT[here] = chosen_BTK[row, : len(ids)].T
                    choices[n].weights_LKT[here] = weights_BTK[row, : len(ids)].T
            done += windows.tokens
            if advance is not None:
                advance(done, "")
    return choices


def _routings(model: BraidForCausalLM, windows: Windows) -> tuple[dict[str, Routing], Tensor | None]:
    """The routings of one batch by their names, and the shares that a head gives each path, if it weighs tokens."""
    ids, mask = windows.padded(model.device)
    done = model.run(ids, attention_mask=mask)
    shares_BTN = None
    if weighs_tokens(model):
        active = model.head.log_weights(done.hidden, **done.read)
        shares_BTN = active.new_full((*active.shape[:-1], len(model.head.names)), -torch.inf)
        shares_BTN[..., model.head.active] = active
    return {routing.name: routing for routing in done.routings}, shares_BTN


def _choices_in(
    layer: Layer, routings: dict[str, Routing], joins: dict[str, Join], records: JoinRecords
) -> tuple[np.ndarray, np.ndarray]:
    """Choices and weights [B, T, K] in one layer, the largest weight first."""
    if layer.read_by == "cosine":
        inactive = joins[layer.name].inactive
        active = [n for n, name in enumerate(layer.choices) if name not in inactive]
        return _top_1(closest_path(*records[layer.name], active))
    routing = routings[layer.name]
    if layer.top_k == 1:
        main_BT = routing.main_BT
        return _top_1(main_BT if routing.present_BT is None else main_BT.masked_fill(~routing.present_BT, NO_CHOICE))
    weights_BTK, order_BTK = routing.weights_BTK.sort(dim=-1, descending=True, stable=True)
    if routing.present_BT is not None:
        weights_BTK = weights_BTK * routing.present_BT[..., None]
    chosen_BTK = routing.chosen_BTK.gather(-1, order_BTK)
    # With fewer active paths than top_k, the router fills up with others at weight 0.
    chosen_BTK = chosen_BTK.masked_fill(weights_BTK == 0, NO_CHOICE)
    return chosen_BTK.cpu().numpy(), weights_BTK.float().cpu().numpy()


def _top_1(choice_BT: Tensor) -> tuple[np.ndarray, np.ndarray]:
    chosen_BTK = choice_BT[..., None].cpu().numpy()
    return chosen_BTK, (chosen_BTK != NO_CHOICE).astype(np.float32)
