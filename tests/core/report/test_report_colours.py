"""The colours of names: seen on both papers, by everyone, and those that charts and tokens name."""

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

from braidlm.core.report.report import COLOURS

TOKENS = files("braidlm.core.report").joinpath("tokens.css").read_text(encoding="utf-8")
PALETTE = re.findall(r"--c\d: (#\w{6});", TOKENS)
PAPERS = re.findall(r"--paper: light-dark\((#\w{6}), (#\w{6})\)", TOKENS)[0]


def test_every_colour_is_a_token() -> None:
    assert tuple(f"var(--c{n})" for n in range(1, len(PALETTE) + 1)) == COLOURS


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


@pytest.mark.parametrize("paper", ["#ffffff", *PAPERS])
def test_colours_stand_out_on_light_and_dark(paper: str) -> None:
    for colour in PALETTE:
        darker, lighter = sorted((TO_XYZ @ linear(c))[1] for c in (colour, paper))
        assert (lighter + 0.05) / (darker + 0.05) >= 3, colour


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_told_apart(sight: str) -> None:
    seen = [lab(np.array(SIGHT[sight]) @ linear(colour)) for colour in PALETTE]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20
