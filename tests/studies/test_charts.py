"""One colour for each model and one scale of bits in all charts of a study."""

import pytest

pytest.importorskip("matplotlib")

from braidlm.core.report.figure_style import COLOURS, INK
from braidlm.studies.charts import (
    bar_limit,
    comparison_chart,
    curve_limits,
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
    bars = comparison_chart(results, results.models, {"trigram": {"stories": 0.6, "maths": 0.8}}).axes[0]
    names = [text.get_text() for text in bars.get_legend().get_texts()]
    drawn = {name: handle.get_facecolor() for name, handle in zip(names, bars.get_legend().get_patches(), strict=True)}
    assert drawn.keys() == colours.keys() | {"trigram"}
    for domain in results.domains:
        chart = learning_chart(results, domain)
        assert chart is not None
        lines = chart.axes[0].lines
        # Made-up paths have scores on both domains, so every model has a line in both charts.
        assert [line.get_color() for line in lines] == list(colours.values())
        assert INK not in colours.values()


def test_every_model_has_a_point_for_what_it_reaches_on_both_domains(results: StudyResults) -> None:
    assert joins_models_of_two_domains(results)
    chart = plane_chart(results)
    names = [text.get_text() for text in chart.axes[0].texts]
    assert set(names) == set(results.names())
    drawn = {(line.get_xdata()[0], line.get_ydata()[0]): line.get_color() for line in chart.axes[0].lines}
    colours = model_colours(results)
    # The composed and the dense model of these results are at the same place.
    assert drawn == {(m.bits["stories"], m.bits["maths"]): colours[m.name] for m in results.models}


def test_where_nothing_is_joined_there_is_no_plane(results: StudyResults) -> None:
    results.models[:] = [model for model in results.models if model.kind != "composed"]
    assert not joins_models_of_two_domains(results)


def test_learning_charts_of_all_domains_have_one_scale(results: StudyResults) -> None:
    limits = {learning_chart(results, domain).axes[0].get_ylim() for domain in results.domains}  # type: ignore[union-attr]
    assert len(limits) == 1


def test_scales_are_the_same_for_what_is_alike() -> None:
    assert curve_limits([0.4, 3.0]) == curve_limits([0.26, 3.9]) == (0.25, 4.0)
    assert curve_limits([0.2, 5.0, float("nan")]) == (0.125, 8.0)
    assert curve_limits([1.05, 1.9]) == curve_limits([1.0]) == (1.0, 2.0), "no room for what no model reaches"
    assert curve_limits([]) == (1.0, 2.0)
    assert bar_limit([0.5, 0.8]) == bar_limit([]) == 1.0
    assert bar_limit([0.95]) == 2.0
    assert bar_limit([5.0]) == 8.0


def test_without_validations_there_is_no_learning_chart(results: StudyResults) -> None:
    for model in results.models:
        model.curve = []
    assert learning_chart(results, "stories") is None
