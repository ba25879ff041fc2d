"""`braid routes` end to end: the terminal, JSON, the folder of tables, pictures and a page."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from braidlm.cli.main import main
from braidlm.core.decoding.generation import Prompt
from braidlm.core.errors import BraidError
from braidlm.inspection.routes import routes
from tests.inspection.path_models import path_model, saved
from tests.report_pages import charts_of

PROMPTS = [
    {"prompt": "abc", "domain": "stories"},
    {"prompt": "a [b] & <c", "domain": "stories", "name": "[/odd] & <one>"},
    {"prompt": "123", "domain": "maths"},
    {"prompt": "4 +", "domain": "maths"},
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


@pytest.fixture(scope="module")
def written(folders: dict[str, Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of three models, written over an older one."""
    out = tmp_path_factory.mktemp("written") / "report"
    out.mkdir()
    for name in ("routes.html", "older.csv"):
        (out / name).touch()
    models = [folders[name] for name in ("letters", "stuck", "linear")]
    assert main([str(word) for word in ("routes", *models, "--prompts", prompts, "--out", out, "--quiet")]) == 0
    return out


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_terminal(routes_verb, folders: dict[str, Path], prompts: Path) -> None:
    shown = routes_verb(folders["letters"], folders["stuck"], "--prompts", prompts, "--quiet")
    assert (shown.code, shown.err) == (0, "")
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert "(1 stories, 2 maths, 3 combined)" in lines
    assert "abc stories 1 → 1 2/2 1 → 3 1/2" in lines
    assert "[/odd] & <one> stories 1 → 1 2/2 1 → 3 1/2" in lines
    assert "4 + maths 3 → 3 0/2 1 → 3 0/2" in lines
    assert "right 75% 25%" in lines
    assert "layer 2 sends 100% of tokens to 'stories'" in lines


def test_json_says_the_same(routes_verb, folders: dict[str, Path], prompts: Path) -> None:
    facts = routes_verb(folders["letters"], folders["stuck"], "--prompts", prompts, "--json").json()
    letters, stuck = facts["models"]
    assert [p["chosen"] for p in letters["prompts"]] == [["stories"] * 2] * 2 + [["maths"] * 2, ["combined"] * 2]
    assert letters["tallies"][0]["accuracy"] == 0.75
    assert letters["layers"][0] == {
        "name": "stages.1.layers.0.join",
        "label": "layer 2",
        "choices": ["stories", "maths", "combined"],
        "how": "router",
        "note": "",
        "top_k": 1,
        "of_paths": True,
        "inactive": [],
    }
    assert stuck["findings"][0].endswith("sends 100% of tokens to 'stories'")
    assert len(letters["verdicts"]) == 2


def test_the_folder(written: Path) -> None:
    out = written
    tables = {"summary", "decisions", "layers", "shares", "prompt_shares", "typical", "tokens"}
    assert {path.name for path in out.iterdir()} == {f"{name}.csv" for name in tables} | {
        "routes.html",
    }
    decisions = [row for row in rows(out / "decisions.csv") if row["model"] == "letters"]
    assert len(decisions) == 8
    assert [row["right"] for row in decisions] == ["true"] * 6 + ["false"] * 2
    assert decisions[2]["prompt"] == "[/odd] & <one>"
    assert {row["read_by"] for row in rows(out / "decisions.csv")} == {"router", "cosine"}
    parts: dict[tuple[str, ...], float] = {}
    for row in rows(out / "shares.csv"):
        key = tuple(row[name] for name in ("model", "counted", "layer", "domain"))
        parts[key] = parts.get(key, 0.0) + float(row["share"])
    assert all(total == pytest.approx(1.0, abs=1e-5) for total in parts.values())
    tokens = [row for row in rows(out / "tokens.csv") if row["text"] == "4 +" and row["model"] == "letters"]
    assert [(row["token"], row["chosen"]) for row in tokens[:3]] == [
        ("4", "maths"),
        (" ", "combined"),
        ("+", "combined"),
    ]
    assert set(charts_of(out / "routes.html")) == {"shares", "information"}


def test_the_page(written: Path) -> None:
    page = (written / "routes.html").read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "[/odd] &amp; &lt;one&gt;" in page
    assert '<span class="chip right" title="stories, stages.1.layers.0.join">1</span>' in page
    assert '<span class="chip wrong" title="stories, stages.1.layers.0.join">1</span>' in page
    assert '<span class="chip neither" title="combined, stages.1.layers.1.join">3</span>' in page
    assert '<span class="c1" title="stories">a</span>' in page
    assert '<span class="c2" title="maths">1</span>' in page
    assert '<span class="grey" title="combined"> </span>' in page
    assert "Layer 3 sends 100% of tokens to &#x27;combined&#x27;." in page
    assert page.count('<figure class="picture">') == 2  # shares, information
    assert "by chance" in page


def test_one_model_names_its_choices(routes_verb, folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "report"
    shown = routes_verb(folders["linear"], "--out", out)
    assert (shown.code, shown.out.splitlines()[-1]) == (0, f"{out}/routes.html")
    page = (out / "routes.html").read_text(encoding="utf-8")
    assert '<span class="chip right" title="stories, stages.1.layers.0.join">stories</span>' in page
    assert "Without a router, the path is named whose output is closest in cosine to the joined output." in page


def test_prompts_without_domains(routes_verb, folders: dict[str, Path], tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("abc\n12\n")
    out = tmp_path / "report"
    shown = routes_verb(folders["letters"], "--prompts", plain, "--out", out, "--quiet")
    assert shown.code == 0
    assert "right by chance" not in shown.out
    assert "information" not in charts_of(out / "routes.html")
    assert "The texts have no domains" in (out / "routes.html").read_text(encoding="utf-8")


def test_folders_of_other_files_are_refused(
    routes_verb, folders: dict[str, Path], prompts: Path, written: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(written, tmp_path / "a"))
    (out / "thesis.tex").write_text("x")
    shown = routes_verb(folders["letters"], "--prompts", prompts, "--out", out)
    assert (shown.code, shown.out) == (2, "")
    assert "this exists already and is not a report of `braid routes`" in shown.err
    assert routes_verb(folders["letters"], "--prompts", prompts, "--out", prompts).code == 2


def test_data_domains_and_paths(routes_verb, folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "sums.txt").write_text("12\n\n345\n")
    options = ("--data", f"sums={tmp_path / 'sums.txt'}", "--domains", "sums=maths", "--paths", "maths", "stories")
    facts = routes_verb(folders["letters"], *options, "--tokens", 4, "--device", "cpu", "--json").json()
    data = facts["models"][0]["data"][0]
    assert (data["path"], data["tokens"], data["shares"][0]["maths"]) == ("maths", 4, 1.0)
    assert facts["models"][0]["domains"] == {"sums": "maths"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prompts", "none.jsonl"], "none.jsonl: there is no such file of prompts"),
        (["--data", "x"], "--data: expected NAME=VALUE, got 'x'"),
        (["--data", "a=x", "a=y"], "--data: 'a' is given twice"),
        (["--domains", "stories=poems"], "no model has a path 'poems'. There are: maths, stories."),
        (["--domains", "poems=maths"], "no prompt or data set has the domain 'poems'. There are: maths, stories."),
        (["--device", "toaster"], "there is no device 'toaster' here"),
        (["--paths", "poems"], "the model has no path 'poems'"),
    ],
)
def test_wrong_arguments(routes_verb, folders: dict[str, Path], arguments: list[str], text: str) -> None:
    shown = routes_verb(folders["letters"], *arguments)
    assert (shown.code, shown.out) == (2, "")
    assert text in shown.err


def test_models_that_cannot_be_looked_at(routes_verb, folders: dict[str, Path], tmp_path: Path) -> None:
    shown = routes_verb(folders["letters"], folders["dense"])
    assert (shown.code, shown.out) == (2, "")
    assert (
        f"{folders['dense']}: this model has no parallel stage and no experts; there is nothing to choose between"
        in shown.err
    )
    assert "there is no such folder" in routes_verb(tmp_path / "none").err


def test_what_is_read_of_data_needs_data(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--tokens", "30"], ["--held-out", "0.1"]):
        assert main(["routes", str(folders["letters"]), *option]) == 2
        assert f"{option[0]}: this is how much of the data is read, and there is none" in capsys.readouterr().err
    assert main(["routes", str(folders["letters"])]) == 0
    assert "No text was named: these are PaPaformer's 20 prompts" in capsys.readouterr().out


def test_prompts_that_nobody_named_need_not_fit_the_paths(tmp_path: Path) -> None:
    folder = saved(path_model(paths=["stories_owner", "code_owner"]), tmp_path / "m")
    assert routes(folder, device="cpu").models[0].domains == {"stories": None, "maths": None}
    with pytest.raises(BraidError, match="the domain 'stories' is no path of this model"):
        routes(folder, [Prompt("ab", "stories")])
