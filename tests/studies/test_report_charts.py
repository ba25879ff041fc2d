"""One colour for each model in all charts of a study."""

import pytest

from braidlm.core.report.report import COLOURS, INK
from braidlm.studies.report import (
    comparison_chart,
    joins_models_of_two_domains,
    learning_chart,
    model_colours,
    plane_chart,
)
from braidlm.studies.results import StudyResults
from tests.studies.study_results import made_up_results


@pytest.fixture
def results() -> StudyResults:
    bits = {"stories": 0.5, "maths": 0.45}
    return made_up_results(bits, {}, bits)


def test_each_model_has_its_colour_in_every_chart(results: StudyResults) -> None:
    colours = model_colours(results)
    assert list(colours.values()) == list(COLOURS[:4])
    assert [*colours][:2] == ["stories", "maths"], "the colours of the paths in routing reports"
    bars = comparison_chart(results, results.models, {"trigram": {"stories": 0.6, "maths": 0.8}})
    assert bars.colours == colours | {"trigram": INK}
    assert {name: sorted(group) for name, group in bars.values.items()} == {  # type: ignore[arg-type, union-attr]
        "stories": ["dense", "joined", "stories", "trigram"],
        "maths": ["dense", "joined", "maths", "trigram"],
    }
    for domain in results.domains:
        chart = learning_chart(results, domain)
        assert chart is not None
        # Made-up paths have scores on both domains, so every model has a line in both charts.
        assert list(chart.colours) == list(chart.series)
        assert list(chart.colours.values()) == list(colours.values())
        assert INK not in colours.values()


def test_every_model_has_a_point_for_what_it_reaches_on_both_domains(results: StudyResults) -> None:
    assert joins_models_of_two_domains(results)
    chart = plane_chart(results)
    assert chart.points == {m.name: (m.bits["stories"], m.bits["maths"]) for m in results.models}
    assert chart.colours == model_colours(results)


def test_where_nothing_is_joined_there_is_no_plane(results: StudyResults) -> None:
    results.models[:] = [model for model in results.models if model.kind != "composed"]
    assert not joins_models_of_two_domains(results)


def test_without_validations_there_is_no_learning_chart(results: StudyResults) -> None:
    for model in results.models:
        model.curve = []
    assert learning_chart(results, "stories") is None


def test_one_validation_is_no_learning(results: StudyResults) -> None:
    for model in results.models:
        model.curve = model.curve[:1]
    assert learning_chart(results, "stories") is None
