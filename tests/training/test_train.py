"""A run as a value."""

from pathlib import Path

from braidlm.training.amounts import Progress
from braidlm.training.train import Run


def test_a_notebook_shows_the_last_records_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "validation", "step": 2, "bits_per_byte": 1.5}\n')
    html = Run(tmp_path, tmp_path / "model", Progress(steps=2), finished=True)._repr_html_()
    assert "<td>bits per byte</td><td>1.5</td>" in html
    assert "<td>steps</td><td>2</td>" in html
