"""The former function that draws at once, until every caller makes charts as data."""

from typing import Any

from braidlm.core.report.charts import HeatMap, HeatMaps
from braidlm.core.report.drawing import draw

__all__ = ["HeatMap", "heat_maps"]


def heat_maps(*args: Any) -> Any:
    return draw(HeatMaps(*args))
