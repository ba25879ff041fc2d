"""The charts of `braid routes`, as data."""

from braidlm.core.report.charts import Bars, HeatMap, HeatMaps, StackedShares
from braidlm.inspection.layers import Layer
from braidlm.inspection.measures import LayerTally
from braidlm.inspection.results import RoutingReport


def load_chart(result: RoutingReport) -> HeatMaps:
    """For each model and each kind of layer, the load of every choice in every layer, domains side by side."""
    lines: list[list[HeatMap]] = []
    for model in result.models:
        kinds: dict[tuple[str, int], list[tuple[Layer, LayerTally]]] = {}
        for layer, one in model.read():
            kinds.setdefault((layer.part, len(layer.choices)), []).append((layer, one))
        for (part, size), layers in kinds.items():
            title = ", ".join(filter(None, (model.name if len(result.models) > 1 else "", part)))
            names = [name.removeprefix("expert_") for name in layers[0][0].choices]
            labels = [layer.label.split()[1] for layer, _ in layers]
            lines.append([])
            for domain in dict.fromkeys(domain for _, one in layers for domain in one.load_by_domain):
                loads = [[share * size for share in one.load_by_domain[domain].values()] for _, one in layers]
                lines[-1].append(HeatMap(f"{title}: {domain}" if title else domain, labels, names, loads))
    return HeatMaps(lines, "load, 1 is an even share")


def share_chart(result: RoutingReport) -> StackedShares:
    """For each layer and domain the weight of each choice, over all tokens; models side by side.

    Where a token takes one choice, the weight is how often it is taken.
    """
    panels = {
        model.name: {
            (layer.label, domain): shares
            for layer, one in model.read()
            for domain, shares in one.weight_by_domain.items()
        }
        for model in result.models
    }
    return StackedShares(panels, result.choices, result.no_paths)


def information_chart(result: RoutingReport) -> Bars | None:
    """For each layer and model, the bits that the choice gives about the domain; None without domains."""
    bits: dict[str, dict[str, float]] = {}
    for model in result.models:
        for layer, one in model.read():
            if one.information is not None:
                bits.setdefault(layer.label, {})[model.name] = one.information
    if not bits:
        return None
    label = f"bits about the domain, from {result.models[0].tallies[-1].what}"
    single = len(result.models) == 1
    return Bars({at: next(iter(v.values())) for at, v in bits.items()} if single else bits, label)
