"""The files of a report, and which folders it may be written into."""

from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.core.report.rendering import check_out, write
from braidlm.core.report.report import Bars, Report, Table
from tests.report_pages import charts_of


def a_report() -> Report:
    report = Report("déjà vu – ✓", tables=[Table(["a"], [[1]], name="raw")], data={"results": {"b": 2}})
    report.table(Table(["a"], [[1]], name="tables/size", title="Size")).table(Table(["no file"], []))
    return report.chart(Bars({"a": 1.0}, "v"), name="bars").chart(Bars({"a": 1.0}, "v"))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_has_a_name_has_a_file(tmp_path: Path) -> None:
    beside = {"raw.csv", "results.json", "tables/size.csv", "tables/size.md"}
    assert write(a_report(), tmp_path / "out", "page", ("html", "md")) == tmp_path / "out/page.html"
    assert files(tmp_path / "out") == beside | {"page.html", "page.md"}
    assert list(charts_of(tmp_path / "out/page.html")) == ["bars", ""]
    assert "<h1>déjà vu – ✓</h1>" in (tmp_path / "out/page.html").read_text(encoding="utf-8")
    (tmp_path / "out/old.csv").touch()
    write(a_report(), tmp_path / "out", "page", fresh=True)
    assert files(tmp_path / "out") == beside | {"page.html"}


@pytest.mark.parametrize(
    ("inside", "fresh", "fine"),
    [
        ([], True, True),
        (["routes.html", "a.csv", "b.png"], True, True),
        (["routes.html", "thesis.tex"], True, False),
        (["routes.html", "thesis.tex"], False, True),
        (["a.csv"], False, False),
        (["kept"], False, True),
    ],
)
def test_a_folder_of_other_files_is_refused(tmp_path: Path, inside: list[str], fresh: bool, fine: bool) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in inside:
        (out / name).touch()
    if fine:
        check_out(out, "braid routes", "routes.html", "kept", fresh=fresh)
        return
    with pytest.raises(BraidError, match="this exists already and is not a report of `braid routes`"):
        check_out(out, "braid routes", "routes.html", "kept", fresh=fresh)


def test_a_file_is_refused_and_no_folder_is_fine(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BraidError, match="this exists already"):
        check_out(tmp_path / "file", "braid eval")
    check_out(tmp_path / "new", "braid eval")
