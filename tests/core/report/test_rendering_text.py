"""Reports as Markdown and in the terminal, tables as CSV."""

import pytest

from braidlm.core.report.rendering import csv_text, markdown, show_report, table_markdown
from braidlm.core.report.report import Bars, Mark, Report, Strong, Table, Tokens


def small_report() -> Report:
    report = Report("Scores", "of two models", "The first is `better`.")
    report.facts({"n_items": 1234}).heading("All").text("A *star*, a snake_case and _one_.\n\nTwo.")
    report.table(Table(["name", "a|b"], [["x", Strong("1 ± 2")], ["y", Mark("2", "wrong")]], "A caption.", keep=1))
    report.chart(Bars({"a": 1.0}, "v"), "A chart.", name="bars").chart(Bars({"a": 1.0}, "v"))
    report.quote("two\n`lines`", "one", prompt="Once, ", note="a note").code("braid demo").code("long", "Everything")
    return report.links({"All": "a b.csv"}).add(Tokens([("l", [("t", "a")])], ["a"]))


def test_markdown_escapes_texts_and_keeps_code() -> None:
    assert markdown(small_report()) == (
        "# Scores\n\nof two models\n\nThe first is `better`.\n\n- n_items: 1,234\n\n## All\n\n"
        "A \\*star\\*, a snake_case and \\_one\\_.\n\nTwo.\n\n"
        "A caption.\n\n| name | a\\|b |\n| --- | --- |\n| x | **1 ± 2** |\n| y | ✗ 2 |\n\n"
        "A chart.\n\n|  | v |\n| --- | --- |\n| a | 1 |\n\n|  | v |\n| --- | --- |\n| a | 1 |\n\n"
        "**one**\n\n> Once, two  \n> \\`lines\\`  \n\na note\n\n```\nbraid demo\n```\n\n"
        "- [All](a%20b.csv)\n"
    )


def test_csv_has_every_digit_and_the_data_of_a_table() -> None:
    data = Table(["a", "b"], [[1 / 3, None], [True, Mark("x", "right")], [12345, "a,b"]])
    assert csv_text(Table(["for people"], [], data=data)) == 'a,b\n0.3333333333333333,\ntrue,x\n12345,"a,b"\n'


def test_a_table_alone_is_under_its_title() -> None:
    assert table_markdown(Table(["a"], [[1.0]], "caption", title="Size")) == "# Size\n\n| a |\n| --- |\n| 1 |\n"


def test_the_terminal_gets_texts_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(small_report())
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert {"The first is better.", "n_items: 1,234", "All", "A caption.", "    Once, two", "    a note"} <= set(lines)
    assert any(line.split() == ["x", "1", "±", "2", "*"] for line in lines)
    assert not any("bars" in line or "Everything" in line for line in lines)


def test_names_of_users_are_no_markup_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(Report("t").table(Table(["[red]a"], [["[/b]"], [Strong("[x]")]])))
    assert "[red]a" in (out := capsys.readouterr().out)
    assert "[/b]" in out
    assert "[x] *" in out
