"""The folder of a report: tables as CSV, pictures as PNG, and a page."""

from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, write_text
from braidlm.core.report import figures
from braidlm.routes.page import routes_page
from braidlm.routes.pictures import pictures
from braidlm.routes.report import RoutingReport
from braidlm.routes.tables import tables

PAGE = "routes.html"


def check_out(out: Path | str) -> None:
    """Say at once what would keep the report from being written: a folder of other things, or no way to draw."""
    figures.check_drawing()
    out = Path(out)
    if out.exists() and not _is_report(out):
        raise BraidError(
            "this exists already and is not a report of `braid routes`", str(out), "Choose another folder for --out."
        )


def write_folder(report: RoutingReport, out: Path | str) -> Path:
    """Write everything in one step; an older report gives way."""
    drawn = pictures(report)
    with atomic_folder(out, replace=True) as folder:
        for name, table in tables(report).items():
            write_text(folder / f"{name}.csv", table.csv())
        for name, figure in drawn.items():
            figures.save_png(figure, folder / f"{name}.png")
        routes_page(report, drawn).write(folder / PAGE)
    return Path(out) / PAGE


def _is_report(folder: Path) -> bool:
    """Whether a folder holds a page of ours and nothing that a new one would not bring, or is empty."""
    if not folder.is_dir():
        return False
    inside = list(folder.iterdir())
    ours = all(path.suffix in (".csv", ".png") or path.name == PAGE for path in inside)
    return not inside or (ours and (folder / PAGE) in inside)
