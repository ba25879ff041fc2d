"""One pass over texts: what each token chose in each layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.joins import Join
from braidlm.model.routing.routing import Routing
from braidlm.routes.layers import JoinRecords, Layer, record_joins, routing_modules
from braidlm.routes.texts import Text

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
    size = model.config.max_position_embeddings
    windows = [(n, at) for n, text in enumerate(texts) for at in range(0, len(text.ids), size)]
    # Windows of similar length are batched together, so that there is little padding; it is never counted.
    windows.sort(key=lambda window: len(texts[window[0]].ids) - window[1])
    choices = [TokenChoices.empty(layers, len(text.ids)) for text in texts]
    unrouted = {layer.name for layer in layers if layer.read_by == "cosine"}
    joins = {m.address: m for m in routing_modules(model) if isinstance(m, Join) and m.address in unrouted}
    done = 0
    with record_joins(joins.values()) as records:
        for begin in range(0, len(windows), batch):
            part = windows[begin : begin + batch]
            rows = [texts[n].ids[at : at + size] for n, at in part]
            routings = _routings(model, rows)
            for index, layer in enumerate(layers):
                if not layer.read_by:
                    continue
                chosen_BTK, weights_BTK = _choices_in(layer, routings, joins, records)
                for row, (n, at) in enumerate(part):
                    here = (index, slice(layer.top_k), slice(at, at + len(rows[row])))
                    choices[n].chosen_LKT[here] = chosen_BTK[row, : len(rows[row])].T
                    choices[n].weights_LKT[here] = weights_BTK[row, : len(rows[row])].T
            done += sum(map(len, rows))
            if advance is not None:
                advance(done, "")
    return choices


def _routings(model: BraidForCausalLM, rows: Sequence[Sequence[int]]) -> dict[str, Routing]:
    """The routings of one batch by their names; rows are padded on the right."""
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=model.device)
    body = model.model(ids, attention_mask=mask, use_cache=False)
    return {routing.name: routing for routing in body.routings or ()}


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
