"""The former function that draws at once, until every caller makes charts as data."""

from typing import Any

from braidlm.core.report.charts import StackedShares
from braidlm.core.report.drawing import draw


def share_chart(*args: Any) -> Any:
    return draw(StackedShares(*args))
