"""What is found in served folders, and what is never read: links, pipes, pages of others, paths of requests."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.report.rendering import write
from braidlm.core.report.report import Report
from braidlm.serving.inspect import folders as module
from braidlm.serving.inspect.folders import ServedFolders
from braidlm.serving.models import NotFound
from tests.inspection.path_models import path_model, saved
from tests.serving.inspect.client import Ask, with_app

OURS = '<!DOCTYPE html><head><meta name="generator" content="Braid 1"><title>{}</title></head><p>{}</p>'


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY", 0.0)


def make_run(folder: Path, steps: int = 3, model: bool = False) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("training: {budget: 3 steps}\n")
    rows = [{"kind": "train", "step": step, "loss": 1.0 / (step + 1)} for step in range(1, steps + 1)]
    rows.append({"kind": "sample", "step": steps, "prompt": "<script>", "text": "alert(1)"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if model:
        (folder / "checkpoints").mkdir()
        saved(path_model("gumbel_v2"), folder / "checkpoints" / "step-000003")
    return folder


def test_runs_and_reports_of_a_folder_over_http(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/mine", model=True)
    write(Report("Routes", "a"), tmp_path / "runs/mine/routes", "routes")
    page = OURS.format("A &lt;b&gt;", '<a href="mine/routes/routes.html#x">r</a> <a href="other.html">o</a>')
    (tmp_path / "runs/report.html").write_text(page)

    async def work(ask: Ask) -> Any:
        index = await ask("/braid/runs")
        (run,) = index["runs"]
        told = [await ask(f"/braid/runs/{run['id']}/{what}") for what in ("metrics", "samples")]
        pages = {report["title"]: await ask(report["url"], raw=True) for report in index["reports"]}
        models = (await ask("/braid/models"))["models"]
        (tmp_path / "runs/new").mkdir()
        (tmp_path / "runs/new/recipe.yaml").write_text("")
        return index, *told, pages, models, await ask("/braid/runs")

    index, metrics, samples, pages, models, later = with_app(tmp_path / "runs", work)
    (run,) = index["runs"]
    assert (run["name"], run["state"], run["step"], run["model"]) == ("runs/mine", "done", 3, "mine")
    assert run["budget"] == "3 steps"
    assert [row[0] for row in metrics["rows"]] == [1, 2, 3]
    assert metrics["done"]
    assert samples["samples"] == [{"step": 3, "prompt": "<script>", "text": "alert(1)"}]
    assert models[0]["run"] == run["id"]
    ids = {report["title"]: report["id"] for report in index["reports"]}
    assert set(pages) == {"Routes", "A <b>"}
    page = pages["A <b>"]
    assert f'<a href="/reports/{ids["Routes"]}#x">' in page.text
    assert '<a href="other.html">' in page.text
    policy = page.headers["content-security-policy"]
    assert "sandbox" in policy
    assert "default-src 'none'" in policy
    assert "allow-same-origin" not in policy
    assert {run["state"] for run in later["runs"]} == {"done", "waiting"}


def test_a_request_names_ids_alone(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/mine", model=True)
    (tmp_path / "secret.html").write_text(OURS.format("Secret", ""))

    async def work(ask: Ask) -> Any:
        for name in ("../secret", "..%2Fsecret.html", "secret", "mine", "%00", "a" * 5000, "/etc/passwd"):
            await ask(f"/reports/{name}", 404)
            await ask(f"/braid/runs/{name}/metrics", 404)
        return await ask("/braid/runs/x/metrics?after=" + "9" * 100, 400)

    assert with_app(tmp_path / "runs", work)["error"]["param"] == "after"


def test_links_pipes_and_pages_of_others_are_left_out(tmp_path: Path) -> None:
    outside = make_run(tmp_path / "outside")
    (outside / "report.html").write_text(OURS.format("Outside", ""))
    root = tmp_path / "runs"
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "report.html").symlink_to(outside / "report.html")
    (root / "loop").symlink_to(root)
    (root / "other.html").write_text("<title>Somebody's page</title>")
    (root / ".hidden.html").write_text(OURS.format("Hidden", ""))
    os.mkfifo(root / "pipe.html")
    (root / "half.html").write_bytes(OURS.format("Half \xff", "").encode("latin-1")[:70])
    (root / os.fsdecode(b"odd \xff\n name.html")).write_text(OURS.format("Odd", ""))
    found = ServedFolders(root).found
    assert found.runs == {}
    assert {report.title for report in found.reports.values()} == {"Odd", "half"}
    odd = next(report for report in found.reports.values() if report.title == "Odd")
    assert "�" in odd.name
    assert odd.id.isascii()
    assert "Odd" in ServedFolders(root).report(odd.id)
    odd.path.unlink()
    with pytest.raises(NotFound):
        ServedFolders(root).report(odd.id)


def test_a_page_that_became_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("secret")
    page = tmp_path / "runs/report.html"
    page.parent.mkdir()
    page.write_text(OURS.format("Mine", ""))
    served = ServedFolders(tmp_path / "runs")
    (report,) = served.found.reports.values()
    monkeypatch.setattr(module, "LOOK_EVERY", 1e9)
    page.unlink()
    page.symlink_to(tmp_path / "secret")
    with pytest.raises(NotFound, match="a moment ago"):
        served.report(report.id)


def test_looking_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path.joinpath("runs", *"abcdefgh")
    make_run(deep)
    make_run(tmp_path / "runs/z")
    for number in range(30):
        (tmp_path / f"runs/{number}.txt").write_text("")
    assert [run.name for run in ServedFolders(tmp_path / "runs").found.runs.values()] == ["runs/z"]
    monkeypatch.setattr(module, "MAX_ENTRIES", 5)
    assert len(ServedFolders(tmp_path / "runs").found.runs) <= 1
    monkeypatch.setattr(module, "MAX_REPORT", 10)
    (tmp_path / "runs/large.html").write_text(OURS.format("Large", ""))
    assert ServedFolders(tmp_path / "runs").found.reports == {}


def test_what_names_stand_for(tmp_path: Path) -> None:
    make_run(tmp_path / "study/seed-1/mine", model=True)
    assert len(ServedFolders([tmp_path / "study/mine"]).found.runs) == 1
    assert len(ServedFolders(str(tmp_path / "study")).found.runs) == 1
    assert ServedFolders(["org/name", str(tmp_path / "nothing")]).found.runs == {}
    (tmp_path / "link").symlink_to(tmp_path / "study")
    assert len(ServedFolders(tmp_path / "link").found.runs) == 1, "the user named it"


def test_a_lineage_is_found_by_the_hash_of_the_weights(tmp_path: Path) -> None:
    made = saved(path_model("gumbel_v2"), tmp_path / "models/a")
    lineage = json.loads((made / "lineage.json").read_text())
    served = ServedFolders(tmp_path / "models")
    assert served.lineage_of(lineage["weights"]["sha256"]) == lineage
    assert served.lineage_of("another") is None
    (made / "lineage.json").write_text("{")
    os.utime(made / "lineage.json", ns=(1, 1))
    assert served.lineage_of(lineage["weights"]["sha256"]) is None
