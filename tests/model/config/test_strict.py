"""Strict decoding: every problem at once, each with its path and the nearest name; and back again."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.model.config.registry import Choice, Registry
from braidlm.model.config.strict import PartOf, decode, encode

shapes = Registry("shape")


@shapes.register("circle")
class Circle:
    @dataclass
    class Config:
        radius: float = 1.0


@shapes.register("box")
class Box:
    @dataclass
    class Config:
        sides: tuple[int, int] = (1, 1)
        label: str | None = None

        def __post_init__(self) -> None:
            if min(self.sides) < 1:
                raise BraidError(f"sides must be positive, got {self.sides}")


@dataclass
class Size:
    """With a short form: `3x4`."""

    rows: int = 1
    columns: int = 1

    @classmethod
    def from_shorthand(cls, text: Any) -> dict[str, int]:
        try:
            rows, columns = map(int, str(text).split("x"))
        except ValueError:
            raise BraidError(f"'{text}' is not like 3x4.", todo="Write ROWSxCOLUMNS.") from None
        return {"rows": rows, "columns": columns}


@dataclass
class Drawing:
    name: str
    scale: float = 1.0
    copies: int = 1
    bold: bool = False
    ink: Literal["red", "green", "blue"] = "red"
    depth: int | None = None
    pen: int | str = 0
    size: Size = field(default_factory=Size)
    shape: Annotated[Choice, PartOf(shapes, "circle")] = "circle"  # type: ignore[assignment]
    extra: Annotated[Choice, PartOf(shapes)] | None = None
    parts: list[Annotated[Choice, PartOf(shapes, by_key=True)]] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    points: tuple[int, ...] = ()
    free: Any = None


def problems(data: Any, where: str = "drawing") -> list[str]:
    with pytest.raises(BraidError) as caught:
        decode(Drawing, data, where)
    return str(caught.value).split("\n")


def test_defaults_are_decoded_too() -> None:
    drawing = decode(Drawing, {"name": "a"})
    assert drawing == Drawing("a", shape=Choice("circle", Circle.Config()))


def test_every_problem_is_named_at_once() -> None:
    messages = problems(
        {
            "scael": 2,
            "copies": 1.5,
            "ink": "gren",
            "size": {"rows": "x"},
            "shape": {"kind": "box", "side": [1, 2]},
            "parts": ["circle", {"box": {"sides": [1, 2, 3]}}, {"blob": {}}],
            "weights": {"a": [1]},
        }
    )
    assert sorted(messages) == sorted(
        [
            "drawing: unknown key 'scael'. Did you mean 'scale'?",
            "drawing.name: missing; it has no default",
            "drawing.copies: expected a whole number, got 1.5",
            "drawing.ink: 'gren' is not one of red, green, blue. Did you mean 'green'?",
            "drawing.size.rows: expected a whole number, got 'x'",
            "drawing.shape: unknown key 'side'. Did you mean 'sides'?",
            "drawing.parts[1].box.sides: expected 2 values, got 3",
            "drawing.parts[2]: unknown shape 'blob'. There are: box, circle.",
            "drawing.weights.a: expected a number, got [1]",
        ]
    )


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("name", 3, "drawing.name: expected text, got 3"),
        ("scale", "wide", "drawing.scale: expected a number, got 'wide'"),
        ("scale", True, "drawing.scale: expected a number, got True"),
        ("scale", None, "drawing.scale: expected a number, got None"),
        ("copies", True, "drawing.copies: expected a whole number, got True"),
        ("copies", "1e6", "drawing.copies: expected a whole number, got '1e6'"),
        ("bold", 1, "drawing.bold: expected true or false, got 1"),
        ("bold", "yes", "drawing.bold: expected true or false, got 'yes'"),
        ("ink", 3, "drawing.ink: 3 is not one of red, green, blue."),
        ("ink", "zzz", "drawing.ink: 'zzz' is not one of red, green, blue."),
        ("depth", "x", "drawing.depth: expected a whole number, got 'x'"),
        ("pen", [1], "drawing.pen: expected a whole number or text, got [1]"),
        ("size", "3by4", "drawing.size: '3by4' is not like 3x4. Write ROWSxCOLUMNS."),
        ("shape", 3, "drawing.shape: expected a shape name or a mapping, got 3"),
        ("shape", "circel", "drawing.shape: unknown shape 'circel'. Did you mean 'circle'?"),
        ("shape", {"kind": "box", "sides": [0, 2]}, "drawing.shape: sides must be positive, got (0, 2)"),
        ("extra", {"radius": 2}, "drawing.extra: no kind of shape is given. There are: box, circle."),
        ("parts", "circle", "drawing.parts: expected a list, got 'circle'"),
        ("parts", [{"circle": {}, "box": {}}], "drawing.parts[0]: expected one shape name with its options, got"),
        ("parts", [None], "drawing.parts[0]: expected a shape name or a mapping, got None"),
        ("parts", [{"circle": 3}], "drawing.parts[0].circle: expected a mapping, got 3"),
        ("weights", [1], "drawing.weights: expected a mapping, got [1]"),
        ("points", 3, "drawing.points: expected a list, got 3"),
        ("points", [1, "b"], "drawing.points[1]: expected a whole number, got 'b'"),
        ("points", ["x" * 100], "drawing.points[0]: expected a whole number, got 'xxxxxxxxxxxxxxxxxxxxxxxx"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(key: str, value: Any, text: str) -> None:
    (message,) = problems({"name": "a", key: value})
    assert message.startswith(text)
    assert len(message) < 120


def test_without_a_path_there_is_no_colon_before_the_problem() -> None:
    assert problems([1], where="") == ["expected a mapping, got [1]"]
    assert problems({"name": "a", "nme": 1}, where="") == ["unknown key 'nme'. Did you mean 'name'?"]
    assert problems({1: 2, "name": "a"})[0].startswith("drawing: unknown key '1'.")


def test_a_part_is_written_by_name_by_mapping_and_by_key() -> None:
    drawing = decode(
        Drawing,
        {
            "name": "a",
            "shape": {"radius": 2},
            "extra": "box",
            "parts": ["circle", {"circle": None}, {"box": {"sides": [2, 3], "label": "b"}}],
        },
    )
    assert drawing.shape == Choice("circle", Circle.Config(2.0))
    assert drawing.extra == Choice("box", Box.Config())
    assert drawing.parts[:2] == [Choice("circle", Circle.Config())] * 2
    assert drawing.parts[2] == Choice("box", Box.Config((2, 3), "b"))


def test_numbers_are_read_as_yaml_leaves_them() -> None:
    drawing = decode(Drawing, {"name": "a", "scale": "3e-4", "weights": {"b": 2}})
    assert drawing.scale == 3e-4
    assert drawing.weights == {"b": 2.0}
    assert isinstance(drawing.weights["b"], float)


def test_a_short_form_and_a_finished_value_are_accepted() -> None:
    assert decode(Drawing, {"name": "a", "size": "3x4"}).size == Size(3, 4)
    assert decode(Drawing, {"name": "a", "size": Size(5, 6)}).size == Size(5, 6)
    assert decode(Drawing, {"name": "a", "size": None}).size == Size()
    assert decode(Drawing, {"name": "a", "shape": Choice("box", Box.Config())}).shape.kind == "box"


def test_a_union_takes_the_first_arm_that_fits() -> None:
    assert decode(Drawing, {"name": "a", "pen": 3}).pen == 3
    assert decode(Drawing, {"name": "a", "pen": "ball"}).pen == "ball"


integers = st.integers(-(2**63) + 1, 2**63 - 1)
sides = st.tuples(st.integers(1, 9), st.integers(1, 9))
choices = st.builds(lambda r: Choice("circle", Circle.Config(r)), st.floats(0, 9)) | st.builds(
    lambda s, label: Choice("box", Box.Config(s, label)), sides, st.none() | st.text(max_size=4)
)
drawings = st.builds(
    Drawing,
    name=st.text(max_size=5),
    scale=st.floats(allow_nan=False, allow_infinity=False),
    copies=integers,
    bold=st.booleans(),
    ink=st.sampled_from(["red", "green", "blue"]),
    depth=st.none() | integers,
    pen=integers | st.text(max_size=3),
    size=st.builds(Size, integers, integers),
    shape=choices,
    extra=st.none() | choices,
    parts=st.lists(choices, max_size=3),
    weights=st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    points=st.lists(integers, max_size=3).map(tuple),
    free=st.none() | st.integers() | st.lists(st.text(max_size=2), max_size=2),
)


@settings(max_examples=25)
@given(drawings)
def test_what_is_encoded_decodes_to_the_same(drawing: Drawing) -> None:
    plain = encode(drawing)
    assert decode(Drawing, plain) == drawing
    assert decode(Drawing, json.loads(json.dumps(plain))) == drawing
    assert encode(decode(Drawing, plain)) == plain


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from([*Drawing.__dataclass_fields__, "nmae"])


@given(st.dictionaries(keys, anything, max_size=4) | anything)
def test_whatever_is_written_either_decodes_or_is_explained(data: Any) -> None:
    try:
        explained = isinstance(decode(Drawing, data, "x"), Drawing)
    except BraidError as error:
        explained = str(error).startswith("x")
    assert explained
