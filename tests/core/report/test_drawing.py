"""Charts as PNG files: what is drawn."""

import itertools
import re
import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.text import Text

from braidlm.core.errors import BraidError
from braidlm.core.report.axis_labels import spread
from braidlm.core.report.drawing import draw, to_png
from braidlm.core.report.report import COLOURS, Bars, HeatMap, HeatMaps, Lines, Points, StackedShares

STEPS = list(range(1, 101))
LOSS = [5 / step + 1 for step in STEPS]


def texts(figure: Figure) -> list[str]:
    """Everything that is written in a figure."""
    assert to_png(figure).startswith(b"\x89PNG")
    return [text.get_text() for text in figure.findobj(Text) if text.get_visible() and text.get_text()]


def chart() -> Lines:
    return Lines({"train": (STEPS, LOSS)}, "step", "bits per byte", "Loss", {"unigram": 4.0, "trigram": 1.5})


def test_a_line_chart_names_its_lines_levels_and_axes() -> None:
    found = texts(draw(chart()))
    assert {"train", "unigram", "trigram", "step", "bits per byte", "Loss"} <= set(found)


def test_points_have_their_names_beside_them_and_apart() -> None:
    points = {"base": (1.0, 2.0), "other": (1.0, 2.0), "third": (1.0, 2.01), "far": (9.0, 2.0), "low": (1.0, 1.0)}
    figure = draw(Points(points, "old", "new", colours=dict.fromkeys(points, "#123456")))
    figure.canvas.draw()
    names = {text.get_text(): text for text in figure.axes[0].texts}
    assert set(names) == set(points)
    with_line = {name for name, text in names.items() if text.arrow_patch is not None}
    assert with_line == {"base", "other", "third"}, "a name beside its point needs none"
    for text in names.values():
        text.arrowprops = text.arrow_patch = None  # a box is the name's alone
    boxes = [text.get_window_extent() for text in names.values()]
    for at, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:at])
        assert box.y0 >= figure.axes[0].get_window_extent().y0
    assert {line.get_color() for line in figure.axes[0].lines} == {"#123456"}
    with pytest.raises(BraidError, match="nothing to draw"):
        Points({}, "old", "new")


def test_points_on_logarithmic_axes() -> None:
    axes = draw(Points({"a": (0.5, 8.0), "b": (4.0, 0.5)}, "old", "new", log=True)).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_a_name_keeps_the_colour_and_the_scale_that_it_is_given() -> None:
    series = {"a": ([1, 2], [1, 2]), "b": ([1, 2], [2, 1])}
    lines = draw(Lines(series, "x", "y", colours={"b": "#123456"}, y_limits=(0, 9)))
    assert [line.get_color() for line in lines.axes[0].lines] == [COLOURS[0], "#123456"]
    assert lines.axes[0].get_ylim() == (0, 9)
    bars = draw(Bars({"g": {"a": 1.0, "b": 2.0}}, "v", colours={"a": "#123456"}, limit=4.0))
    assert bars.axes[0].get_xlim() == (0, 4)
    assert bars.axes[0].patches[0].get_facecolor()[:3] == pytest.approx((0x12 / 255, 0x34 / 255, 0x56 / 255))


def test_lines_of_one_colour_are_told_apart() -> None:
    lines = {name: ([1.0, 2.0], [1.0, 2.0]) for name in ("path", "other", "dense")}
    figure = draw(Lines(lines, "x", "y", colours=dict.fromkeys(("path", "dense"), COLOURS[0])))
    first, *_, last = figure.axes[0].lines
    assert first.get_color() == last.get_color()
    assert first.get_linestyle() != last.get_linestyle()


def test_groups_of_bars_have_no_holes_and_follow_the_order_of_colours() -> None:
    groups = {"x": {"a": 1.0, "c": 3.0}, "y": {"b": 2.0, "c": 3.0}}
    axes = draw(Bars(groups, "v", colours=dict.fromkeys("abc", "#123456"))).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b", "c"]
    a, b, *c = sorted(axes.patches, key=lambda bar: bar.get_width())
    assert b.get_y() - a.get_y() == pytest.approx(1.0), "the first bar of each group"
    assert c[0].get_y() - a.get_y() == pytest.approx(0.4)


def test_shares_have_one_scale_with_numbers() -> None:
    for share in (0.1, 1.0):
        figure = draw(StackedShares({"": {("group", "row"): {"a": share}}}, ["a"]))
        assert figure.axes[0].get_xlim() == (0, 1)
        assert {"0%", "50%", "100%"} <= set(texts(figure))


def test_names_of_users_are_drawn_as_they_are() -> None:
    names = ["_private", "$5 & <$6>", 'id="x"']
    figure = draw(Lines({name: ([0, 1], [i, i]) for i, name in enumerate(names)}, "x", "y"))
    assert set(names[:2]) <= set(texts(figure))
    assert set(names[:2]) <= set(texts(draw(Bars({"g": dict.fromkeys(names, 1.0)}, "v"))))


SIGHT = {
    "usual": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
"""How linear RGB is seen: Machado, Oliveira and Fernandes (2009), full severity."""
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b*, in which distances are about what an eye sees."""
    x, y, z = np.cbrt(TO_XYZ @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("paper", ["#ffffff", "#16171a"])
def test_colours_stand_out_on_light_and_dark(paper: str) -> None:
    for colour in COLOURS:
        darker, lighter = sorted((TO_XYZ @ linear(c))[1] for c in (colour, paper))
        assert (lighter + 0.05) / (darker + 0.05) >= 3, colour


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_told_apart(sight: str) -> None:
    seen = [lab(np.array(SIGHT[sight]) @ linear(colour)) for colour in COLOURS]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20


def test_names_that_would_overlap_move_apart() -> None:
    assert spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert spread([0.5, 0.5, 0.52], 0.1) == pytest.approx([0.40667, 0.50667, 0.60667], abs=1e-4)
    heights = spread(sorted(np.random.default_rng(0).random(12)), 0.05)
    assert min(np.diff(heights)) >= 0.05 - 1e-9


@pytest.mark.parametrize(("low", "high"), [(1e-3, 1e6), (1.2, 1.9), (3, 40)])
def test_logarithmic_axes_have_plain_round_ticks(low: float, high: float) -> None:
    xs = list(np.geomspace(low, high, 30))
    found = texts(draw(Lines({"a": (xs, xs)}, "x", "y", log_x=True, log_y=True)))
    ticks = [text for text in found if re.fullmatch(r"[\d.]+[kM]?", text)]
    assert len(ticks) >= 6, found


def test_holes_in_the_data_are_holes() -> None:
    gaps = {"a": ([1, 2, 3], [1.0, float("nan"), 0.0]), "none": ([1], [float("nan")])}
    assert "a" in texts(draw(Lines(gaps, "x", "y", log_y=True)))


def test_bars_carry_their_values() -> None:
    plain = texts(draw(Bars({"unigram": 2.4119, "model": 0.5}, "bits", digits=3, highlight="model")))
    assert {"unigram", "model", "2.412", "0.500", "bits"} <= set(plain)
    grouped = texts(draw(Bars({"g1": {"a": 1.0, "b": -2.0}, "g2": {"b": 1234.5}}, "v", "Title")))
    assert {"g1", "g2", "a", "b", "1.00", "-2.00", "1,234.50", "Title"} <= set(grouped)


def test_what_cannot_be_drawn_is_explained() -> None:
    with pytest.raises(BraidError, match="nothing to draw"):
        Lines({}, "x", "y")
    with pytest.raises(BraidError, match="nothing to draw"):
        Bars({}, "v")
    with pytest.raises(BraidError, match="line 'a': 2 xs but 1 ys"):
        Lines({"a": ([1, 2], [1])}, "x", "y")


def test_an_x_can_be_marked_and_fall() -> None:
    lines = {"a": ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])}
    marked = draw(Lines(lines, "x", "y", mark=(2.0, "best: 2"), falling_x=True))
    assert "best: 2" in texts(marked)
    low, high = marked.axes[0].get_xlim()
    assert low > high


def test_heat_maps_have_titles_and_labels() -> None:
    one = HeatMap("stories", ["1", "2"], ["a", "b"], [[0.5, 1.5], [1.0, 1.0]])
    assert {"stories", "1", "2", "a", "b", "load"} <= set(texts(draw(HeatMaps([[one], [one]], "load"))))
    with pytest.raises(BraidError, match="nothing to draw"):
        HeatMaps([], "load")


def test_a_chart_of_shares() -> None:
    shares = {("layer 1", "stories"): {"a": 0.75, "b": 0.25}, ("layer 1", "maths"): {"mix": 1.0}}
    panels = {"one": shares, "two": {("layer 2", "stories"): {"a": 1.0}}}
    found = set(texts(draw(StackedShares(panels, ["a", "b", "mix"], ["mix"]))))
    assert {"layer 1", "layer 2", "stories", "maths", "75%", "25%", "100%", "one", "two", "a", "b", "mix"} <= found
    assert "one" not in texts(draw(StackedShares({"one": shares}, ["a", "b", "mix"])))
    with pytest.raises(BraidError, match="nothing to draw"):
        StackedShares({"one": {}}, ["a"])


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BraidError, match=re.escape("pip install 'braidlm[plot]'")):
        draw(chart())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("panels", [1, 3])
@pytest.mark.parametrize("names", [2, 6, 20, 40])
def test_a_single_row_of_shares_stays_readable(panels: int, names: int) -> None:
    """However many names its legend has; where a layout leaves no room, matplotlib warns."""
    shares = {("layer 3", "stories"): {f"expert_{n}": 1 / names for n in range(names)}}
    drawn = draw(StackedShares({f"model {n}": shares for n in range(panels)}, list(shares["layer 3", "stories"])))
    to_png(drawn)
    assert all(0.55 < axes.get_position().height * drawn.get_figheight() < 1.1 for axes in drawn.axes)
