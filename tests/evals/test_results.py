"""The results of an evaluation as plain data."""

from braidlm.evals.results import Evaluation, ModelResults, TaskResult


def test_a_notebook_shows_tasks_models_and_data() -> None:
    result = TaskResult("blimp", "accuracy", 71.25, 10, 1.5)
    model = ModelResults("moep", "runs/moep", "0", tasks={"blimp": result})
    html = Evaluation([model], {"blimp": {"metric": "accuracy", "data": "data/blimp"}}, "float32", {})._repr_html_()
    assert '<th scope="col" class="number">blimp</th>' in html
    assert '<td>moep</td><td class="number">71.25 ± 1.50</td>' in html
    assert "data data/blimp" in html
