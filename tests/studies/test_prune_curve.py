"""Curves of quality against remaining parameters: one calibration, pruned in memory, scored as `braid edit prune`."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import braidlm
from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import save_model
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.criteria import PruningOptions
from braidlm.studies import prune_curve
from tests.report_pages import charts_of
from tests.tiny_models import tiny_model

TEXT = "The cat sat on the mat. A dog ran after the ball, and the ball ran on. " * 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one block with modules, a dense one, a calibration text and a text to score."""
    root = tmp_path_factory.mktemp("curves")
    (root / "calibration.txt").write_text(TEXT)
    (root / "dev.txt").write_text(TEXT[:90])
    experts = {"names": 5, "router": {"top_k": 2, "renormalise": False}}
    block = {"attention": {"heads": 2, "experts": {"keys": "shared", **experts}}, "feed": {"kind": "mlp", "hidden": 12}}
    block["feed"]["experts"] = experts
    for name, stages in {"one": [{"block": block}], "two": [{"block": block}], "dense": ["block"]}.items():
        torch.manual_seed(len(name))
        model = tiny_model(stages=stages, vocab_size=bytes_tokenizer().vocab_size, context=32).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        save_model(model, root / name, bytes_tokenizer(), {"made_by": "test"})
    return root


def options(root: Path, **other: Any) -> PruningOptions:
    return PruningOptions(str(root / "calibration.txt"), tokens=200, **other)


def curves_of(
    root: Path, models: list[str], pruning: PruningOptions, out: Path | None = None
) -> prune_curve.PruningCurves:
    data = {"bits_per_byte": root / "dev.txt"}
    folders = [root / name for name in models]
    return braidlm.prune_curve(folders, "bits_per_byte", pruning, data_of=data, out=out, device="cpu")


def test_points_are_what_prune_and_eval_give(root: Path, tmp_path: Path) -> None:
    curves = curves_of(root, ["one"], options(root, thresholds=(0.0, 0.6), keep=(0.7,)))
    points = curves.curves["one"]
    assert points[0].pruned == "as it is"
    assert sorted(point.pruned for point in points) == ["as it is", "keep 0.7", "threshold 0", "threshold 0.6"]
    assert [point.parameters for point in points] == sorted((p.parameters for p in points), reverse=True)
    for point in points:
        folder = root / "one"
        if point.pruned != "as it is":
            chosen = {"keep": point.keep} if point.threshold is None else {"threshold": point.threshold}
            folder = tmp_path / point.pruned.replace(" ", "-")
            braidlm.edit("prune", root / "one", folder, text=str(root / "calibration.txt"), tokens=200, **chosen)
        size = sum(p.numel() for p in braidlm.load_model(folder).parameters())
        assert point.parameters == size
        assert point.share == size / points[0].parameters
        scored = braidlm.eval(folder, "bits_per_byte", data_of={"bits_per_byte": root / "dev.txt"}, device="cpu")
        assert point.scores["bits_per_byte"] == pytest.approx(scored.models[0].tasks["bits_per_byte"].score, abs=1e-9)
        assert curves.metrics == {"bits_per_byte": "bits per byte"}


def test_models_criteria_and_curves_beside(root: Path) -> None:
    pruning = options(
        root,
        thresholds=(0.5,),
        criterion=("frequency", "output_norm"),
        normalise=("max", "sum"),
        beside=(f"before={root / 'two'},{root / 'dense'}",),
    )
    with pytest.raises(BraidError, match=r"one, frequency, sum, threshold 0.5: no module of .* reaches"):
        curves_of(root, ["one"], pruning)
    pruning = options(
        root, keep=(0.8,), criterion=("frequency", "output_norm"), normalise=("max", "sum"), beside=pruning.beside
    )
    curves = curves_of(root, ["one", "two"], pruning).curves
    kinds = [f"{criterion}, {by}" for criterion in ("frequency", "output_norm") for by in ("max", "sum")]
    assert list(curves) == [*(f"{name}, {kind}" for name in ("one", "two") for kind in kinds), "before"]
    assert [point.modules for point in curves["before"]] == [10, 0]
    assert all(point.pruned == "as it is" for point in curves["before"])


def test_files_and_going_on(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured and scored before an interruption is not measured or scored again."""
    out, pruning = tmp_path / "curve", options(root, thresholds=(0.0, 0.6))
    scored: list[str] = []
    pruned, interrupted = prune_curve._pruned, [True]

    def counted(source: Any, name: str, plan: Any) -> Any:
        model = pruned(source, name, plan)
        load = model.loader

        def load_and_count(device: Any) -> Any:
            if scored and interrupted:
                raise KeyboardInterrupt
            scored.append(name)
            return load(device)

        model.loader = load_and_count
        return model

    monkeypatch.setattr(prune_curve, "_pruned", counted)
    with pytest.raises(KeyboardInterrupt):
        curves_of(root, ["one"], pruning, out)
    interrupted.clear()
    monkeypatch.setattr(prune_curve, "measure_usage", None)
    curves = curves_of(root, ["one"], pruning, out)
    assert scored == ["one, threshold 0", "one, threshold 0.6"]
    files = {path.name for path in out.iterdir()}
    assert {"pruning.html", "pruning.json", "pruning.csv", "results.html"} <= files
    assert {"pruning-bits_per_byte", "pruning-thresholds"} <= charts_of(out / "pruning.html").keys()
    assert json.loads((out / "pruning.json").read_text()) == json.loads(json.dumps(curves.facts()))
    with open(out / "pruning.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["pruned"] for row in rows] == ["as it is", "threshold 0", "threshold 0.6"]
    assert float(rows[2]["bits_per_byte"]) == pytest.approx(curves.points[2].scores["bits_per_byte"], rel=1e-4)
    assert "What a threshold leaves" in (out / "pruning.html").read_text()


def test_the_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curve"
    words = ["eval", root / "one", "bits_per_byte", "--data", f"bits_per_byte={root / 'dev.txt'}", "--out", out]
    words += ["--prune-text", root / "calibration.txt", "--prune-tokens", 200, "--prune-keep", 0.9, 0.7]
    assert main(list(map(str, words))) == 0
    shown = capsys.readouterr().out
    assert "keep 0.7" in shown
    assert f"{out}/pruning.html" in shown
    assert [point["keep"] for point in read_json(out / "pruning.json")["points"]] == [None, 0.9, 0.7]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prune-keep", "0.5"], "this needs --prune-text, the text that modules are used on: --prune-keep"),
        (["--prune-text", "CALIBRATION", "--without", "expert_1"], "--prune-text cannot be combined with --without"),
        (["--prune-text", "CALIBRATION", "--prune-thresholds", "1.5"], "1.5"),
        (["--prune-text", "EMPTY"], "EMPTY"),
        (["--prune-text", "MISSING"], "MISSING"),
        (["--prune-text", "CALIBRATION", "--prune-beside", "x"], "expected another NAME=FOLDER,FOLDER, got 'x'"),
        (["--prune-text", "CALIBRATION", "--prune-keep", "0.01"], "with one module in every layer"),
    ],
)
def test_what_is_refused_before_anything_is_scored(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "EMPTY").write_text("")
    names = {"CALIBRATION": str(root / "calibration.txt"), "EMPTY": str(tmp_path / "EMPTY")}
    first = ["eval", str(root / "one"), "bits_per_byte", "--data", f"bits_per_byte={root / 'dev.txt'}"]
    try:
        code = main([*first, "--out", str(tmp_path / "out"), *(names.get(word, word) for word in words)])
    except SystemExit as stopped:  # argparse's own
        code = int(stopped.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_model_without_modules(root: Path) -> None:
    with pytest.raises(BraidError, match="no experts in its blocks"):
        curves_of(root, ["dense"], options(root))
