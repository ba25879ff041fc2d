"""Who won, by how much and how sure, in words."""

import math

from braidlm.core.report.verdicts import ranking


def test_the_lowest_wins_and_seeds_say_how_sure_that_is() -> None:
    text = ranking({"b": [0.80, 0.82, 0.81], "a": [0.71, 0.72, 0.70], "c": [1.0, 1.0, 1.0]}, "models", "bits")
    assert text == (
        "a is the best of 3 models, with 0.7100 ± 0.0100 bits, 12.3% less than the next, b (0.8100 ± 0.0100).\n\n"
        "How sure: over 3 seeds the difference is 0.1000 ± 0.0082 (standard error): clear."
    )
    assert ranking({"a": [0.7, 0.78], "b": [0.71, 0.79]}, "models") == (
        "No clear winner of 2 models: a has 0.7400 ± 0.0566 bits per byte, 1.3% less than the next, b (0.7500 ± "
        "0.0566).\n\nHow sure: over 2 seeds the difference is 0.0100 ± 0.0566 (standard error), which may be chance."
    )
    assert "over 2 and 3 seeds" in ranking({"a": [0.7, 0.78], "b": [0.71, 0.79, 0.8]}, "models")


def test_one_seed_is_said_to_be_one() -> None:
    close, far = ranking({"a": [0.99], "b": [1.0]}, "models"), ranking({"a": [1.0], "b": [2.0]}, "models")
    assert close.startswith("No clear winner of 2 models: a has 0.9900")
    assert close.endswith("How sure: one seed each, and another could turn it round.")
    assert far.startswith("a is the best of 2 models, with 1.0000 bits per byte, 50.0% less")
    assert far.endswith("How sure: one seed each, so how far seeds move scores is not known.")
    assert "one of the two has one seed" in ranking({"a": [1.0], "b": [2.0, 2.1]}, "models")


def test_what_is_not_known_is_left_out() -> None:
    assert ranking({"a": [1.0], "b": [math.nan], "c": []}, "models") == (
        "a has 1.0000 bits per byte; there is nothing to compare it with."
    )
    assert ranking({}, "models") == "No bits per byte are known; there is nothing to compare it with."
