"""The former functions that draw at once, until every caller makes charts as data."""

from pathlib import Path
from typing import Any

from braidlm.core.files import write_bytes
from braidlm.core.report.charts import Bars, Lines, Points
from braidlm.core.report.drawing import draw, to_png, to_svg
from braidlm.core.report.write import check_drawing

__all__ = ["bar_chart", "check_drawing", "line_chart", "point_chart", "save_png", "to_svg"]


def _made(kind: Any) -> Any:
    return lambda *args, **options: draw(kind(*args, **{k: v for k, v in options.items() if v is not None}))


line_chart, point_chart, bar_chart = _made(Lines), _made(Points), _made(Bars)


def save_png(figure: Any, path: Path | str) -> None:
    write_bytes(path, to_png(figure))
