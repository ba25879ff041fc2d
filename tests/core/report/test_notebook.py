"""Tables for notebooks."""

from pathlib import Path

from braidlm.core.report.notebook import html_table
from braidlm.evals.results import Evaluation, ModelResults, TaskResult
from braidlm.routes.report import ModelRoutes, RoutingReport
from braidlm.training.monitoring.progress import Progress
from braidlm.training.train import Run


def test_cells_are_escaped_and_readable() -> None:
    html = html_table(("<a>", "b"), [(1234567, 0.123456), (None, True), ("<script>", "x")], ["a & b"])
    assert "<th>&lt;a&gt;</th>" in html
    assert "<td>1,234,567</td><td>0.1235</td>" in html
    assert "<td>–</td><td>yes</td>" in html
    assert "<script>" not in html
    assert html.endswith("<p>a &amp; b</p>")


def test_an_evaluation_names_tasks_models_and_data() -> None:
    result = TaskResult("blimp", "accuracy", 71.25, 10, 1.5)
    model = ModelResults("moep", "runs/moep", "0", tasks={"blimp": result})
    html = Evaluation([model], {"blimp": {"metric": "accuracy", "data": "data/blimp"}}, "float32", {})._repr_html_()
    assert "<th>blimp</th>" in html
    assert "<td>moep</td><td>71.25 ± 1.50</td>" in html
    assert "data data/blimp" in html


def test_routes_show_their_models() -> None:
    model = ModelRoutes("moep", "runs/moep", ["a"], ["a"], {}, [], findings=["layer 1 never takes 'a'"])
    html = RoutingReport([model])._repr_html_()
    assert "<th>moep</th>" in html
    assert "layer 1 never takes" in html


def test_a_run_shows_its_last_records(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "validation", "step": 2, "bits_per_byte": 1.5}\n')
    html = Run(tmp_path, tmp_path / "model", Progress(steps=2), finished=True)._repr_html_()
    assert "<td>bits per byte</td><td>1.5</td>" in html
    assert "<td>steps</td><td>2</td>" in html
