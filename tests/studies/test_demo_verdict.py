"""What is said of a study's numbers follows from them, in whatever order they are."""

from braidlm.studies.demo import compared, findings, verdict
from tests.studies.study_results import made_up_results

TRIGRAM = {"trigram": {"stories": 0.66, "maths": 0.83}}
SILENCED = {"stories": {"stories": 3.0, "maths": 0.46}, "maths": {"stories": 0.58, "maths": 0.7}}


def answers(composed: dict[str, float], dense: dict[str, float]) -> list[str]:
    results = made_up_results(composed, SILENCED, dense)
    return list(findings(results, results.of("joined")[0], TRIGRAM).values())


def test_a_composed_model_that_is_ahead() -> None:
    owners, withdrawal, pooled = answers({"stories": 0.48, "maths": 0.45}, {"stories": 0.60, "maths": 0.45})
    assert "it has 0.48 on stories and 0.45 on maths; the owners' own models have 0.60 on stories" in owners
    assert "each on its own domain, and 5.0 to 5.5 on another's" in owners
    assert "the composed model is better on stories (by 20%) and maths (by 10%)." in owners
    assert "beside the composed model it is worse on stories (by 38%) and maths (by 84%)." in owners
    assert "Without the path stories the rest pays +0.01 bits per byte on maths" in withdrawal
    assert "stories goes from 0.48 to 3.00, so that most of it is gone" in withdrawal
    assert "maths goes from 0.45 to 0.70, so that much of it stays" in withdrawal
    assert "pooled for 50.0s (paths and composed model: 50.0s)" in pooled
    assert "it is equal on maths, worse on stories (by 25%)." in pooled


def test_a_composed_model_that_is_behind_is_said_to_be() -> None:
    owners, _, pooled = answers({"stories": 0.72, "maths": 0.45}, {"stories": 0.36, "maths": 0.30})
    assert "the composed model is better on maths (by 10%), worse on stories (by 20%)." in owners
    assert "it is better on stories (by 8%), worse on maths (by 84%)." in owners
    assert "it is better on stories (by 50%) and maths (by 33%)." in pooled


def test_small_differences_are_equal() -> None:
    assert compared({"a": 1.0, "b": 1.0}, {"a": 1.01, "b": 0.99}) == "equal on a and b"


def test_without_a_dense_model_nothing_is_said_of_one() -> None:
    results = made_up_results({"stories": 0.5, "maths": 0.5}, SILENCED, {"stories": 0.5, "maths": 0.5})
    results.models = [m for m in results.models if m.kind != "whole"]
    assert len(findings(results, results.of("joined")[0], {})) == 2
    assert "Beside its owners' models on their own text, it is" in verdict(results, results.of("joined")[0])


def test_the_verdict_says_what_was_compared_who_won_by_how_much_and_how_sure() -> None:
    results = made_up_results({"stories": 0.48, "maths": 0.45}, SILENCED, {"stories": 0.60, "maths": 0.45})
    assert verdict(results, results.of("joined")[0]) == (
        "Small models trained apart on stories and maths became one. Beside a dense model of about its size, trained "
        "on all text, it is better on stories (by 20%), equal on maths: in bits per byte it has 0.48 on stories and "
        "0.45 on maths, against 0.60 on stories and 0.45 on maths.\n\nHow sure: this is one run with one seed. "
        "Differences of less than 2% count as equal, since another seed moves scores as far."
    )
