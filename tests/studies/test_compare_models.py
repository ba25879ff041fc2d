"""`braid compare --text`: trained, edited and foreign models in one table of size, speed and bits per byte."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.errors import BraidError
from braidlm.core.files import LockedError, locked_folder
from braidlm.core.report.report import Picture, Points
from braidlm.edits.edit import edit
from braidlm.edits.matrices import bits_per_byte
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.formats.held_out_text import read_text
from braidlm.opening.convert import convert
from braidlm.opening.open import open_model
from braidlm.studies.compare_models import compare_models, models_report, models_table, not_surpassed
from tests.edits.small_models import model_folder, text_file


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    whole = model_folder(
        folder / "whole", norm="rms", block={"norm": "rms", "attention": {"heads": 2}, "feed": "swiglu"}
    )
    edit("quantize", whole, folder / "int8")
    convert(whole, to="llama", out=folder / "llama")
    return {name: folder / name for name in ("whole", "int8", "llama")} | {"text": text_file(folder)}


def test_a_comparison_of_another_process_is_let_be(folders: dict[str, Path], tmp_path: Path) -> None:
    with locked_folder(tmp_path), pytest.raises(LockedError, match="another `braid compare` is at work here"):
        compare_models([folders["whole"], folders["int8"]], folders["text"], tmp_path, device="cpu")


def test_models_of_any_kind(folders: dict[str, Path], tmp_path: Path, braid: Callable[..., Any]) -> None:
    names = [str(folders[name]) for name in ("whole", "int8", "llama")]
    shown = braid("compare", *names, "--text", folders["text"], "--max-bytes", 300, "--out", tmp_path / "out", "--json")
    models = {one["name"]: one for one in shown.json()["models"]}
    assert list(models) == ["whole", "int8", "llama"]
    sizes = {name: (folders[name] / "model.safetensors").stat().st_size for name in models}
    assert {name: one["disk_bytes"] for name, one in models.items()} == sizes
    assert sizes["int8"] < sizes["whole"]
    text = read_text(str(folders["text"]), Settings(max_bytes=300))
    for name, one in models.items():
        opened = open_model(folders[name])
        assert one["bits_per_byte"] == pytest.approx(bits_per_byte(opened.load(), opened, text).score)
        assert min(one["reading"], one["writing"]) > 0
    assert models["whole"]["parameters"] == models["int8"]["parameters"] == models["llama"]["parameters"]
    rows = list(csv.DictReader((tmp_path / "out/models.csv").read_text().splitlines()))
    assert [int(row["disk_bytes"]) for row in rows] == list(sizes.values())
    assert "MB on disk" in (tmp_path / "out/models.html").read_text()


def test_size_against_quality(folders: dict[str, Path], tmp_path: Path) -> None:
    compared = compare_models([folders["whole"], folders["int8"]], folders["text"], tmp_path / "out", device="cpu")
    report = models_report(compared)
    drawn = [part.chart for part in report.parts if isinstance(part, Picture)]
    assert all(isinstance(chart, Points) for chart in drawn)
    assert drawn[0].points == {one.name: (one.disk_bytes / 1e6, one.bits_per_byte) for one in compared.models}
    assert "active" not in models_table(compared.models).columns  # dense models use all
    points = {"small": (1.0, 3.0), "large": (4.0, 1.0), "worse": (4.0, 2.0), "between": (2.0, 2.0), "twin": (2.0, 2.0)}
    assert not_surpassed(points) == ["small", "between", "twin", "large"]


def test_what_is_refused(folders: dict[str, Path], tmp_path: Path, braid: Callable[..., Any]) -> None:
    whole, text = folders["whole"], folders["text"]
    with pytest.raises(BraidError, match="at least two models"):
        compare_models([whole], text, tmp_path / "out")
    assert "models are measured as they are" in braid("compare", whole, whole, "seed=2", "--text", text).err
    assert "`--text FILE` compares models" in braid("compare", whole, "--out", tmp_path / "out").err
    assert "there is none" in braid("compare", whole, "--max-bytes", 3).err
