"""Learning dynamics: deviations from the mean, smoothing, the best checkpoint, several runs on one scale."""

import numpy as np
import pytest

from braidlm.core.report.report import Picture
from braidlm.evals.reports.dynamics import best_sentence, compare_runs, dynamics_report, run_dynamics, smooth
from braidlm.evals.results import Evaluation, ModelResults, TaskResult

ABOUT = {"description": "what it is", "metric": "m", "licence": "", "count": 10, "version": 1, "sha256": "0"}


def checkpoints(
    run: str, blimp: list[float], bits: list[float] | None = None, **amounts: list[int]
) -> list[ModelResults]:
    found = []
    for at, score in enumerate(blimp):
        tasks = {"blimp_fast": TaskResult("blimp_fast", "accuracy, %", score, 10, 1.0)}
        if bits is not None:
            tasks["bits_per_byte"] = TaskResult("bits_per_byte", "bits", bits[at], 3, None, higher_is_better=False)
        own = {unit: values[at] for unit, values in amounts.items()}
        found.append(ModelResults(f"{run}/c{at}", "folder", "0", run, tasks=tasks, **own))
    return found


def test_smoothing_is_a_centred_mean_of_three() -> None:
    assert smooth([0.0, 3.0, 6.0, 0.0]) == [1.5, 3.0, 3.0, 3.0]
    assert smooth([5.0]) == [5.0]
    assert smooth([1.0, 2.0, 3.0], width=1) == [1.0, 2.0, 3.0]


def test_up_is_better_and_every_task_has_one_voice() -> None:
    run = run_dynamics("r", checkpoints("r", [50, 60, 70], [3.0, 2.0, 1.0], words=[1, 2, 3]))
    step = 1.5**0.5
    assert run.deviations["blimp_fast"] == pytest.approx([-step, 0.0, step])
    assert run.deviations["bits_per_byte"] == pytest.approx([-step, 0.0, step])
    assert run.smoothed["bits_per_byte"] == pytest.approx([-step / 2, 0.0, step / 2])
    assert run.scores["bits_per_byte"] == [3.0, 2.0, 1.0]
    assert (run.unit, run.amounts, run.names) == ("words", [1.0, 2.0, 3.0], ["c0", "c1", "c2"])


def test_the_best_checkpoint_has_the_highest_mean() -> None:
    run = run_dynamics("r", checkpoints("r", [50, 61, 62, 58, 50], [3.0, 1.9, 1.5, 1.6, 2.2], steps=[1, 2, 3, 4, 5]))
    assert run.names[run.best] == "c2"
    assert run.mean[2] == max(run.mean)
    assert run.unit == "steps"
    for scores in ([50, 61], [61, 50]):  # smoothed, two checkpoints are equal
        two = run_dynamics("r", checkpoints("r", scores))
        assert two.best == scores.index(61)
    alone = run_dynamics("r", checkpoints("r", [70, 50, 50, 50]))
    assert alone.best == 0
    assert (alone.unit, alone.amounts) == ("checkpoint", [1.0, 2.0, 3.0, 4.0])


def test_a_task_that_never_moves_says_nothing() -> None:
    run = run_dynamics("r", checkpoints("r", [50, 50, 50], [3.0, 1.0, 2.0]))
    assert run.deviations["blimp_fast"] == [0.0, 0.0, 0.0]
    assert run.deviations["bits_per_byte"][1] > 0


def test_a_task_that_only_fluctuates_does_not_choose() -> None:
    still = run_dynamics("r", checkpoints("r", [50.0, 50.0, 50.0, 50.9], [2.5, 1.0, 1.5, 2.8]))
    assert still.weights == {"blimp_fast": 0.0, "bits_per_byte": 1.0}, "one document has no standard error"
    assert still.mean == still.smoothed["bits_per_byte"]
    assert still.names[still.best] == "c1", "with equal weights it would be c2"
    assert "standard errors: `blimp_fast` by 0%." in best_sentence(still)
    nothing = run_dynamics("r", checkpoints("r", [50.0, 50.5, 50.0]))
    assert "On no task do the checkpoints differ" in best_sentence(nothing)


def test_the_weight_is_the_share_of_the_variance_that_is_no_error() -> None:
    moving = run_dynamics("r", checkpoints("r", [50.0, 52.0]))
    assert moving.weights["blimp_fast"] == pytest.approx(0.0), "a variance of 1, and an error of 1"
    moving = run_dynamics("r", checkpoints("r", [50.0, 54.0]))
    assert moving.weights["blimp_fast"] == pytest.approx(0.75)


def test_checkpoints_within_the_errors_of_the_best_are_named() -> None:
    run = run_dynamics("r", checkpoints("r", [50, 60, 69.5, 70, 70, 70.5]))
    spread = float(np.std([50, 60, 69.5, 70, 70, 70.5]))
    assert run.mean_errors[0] == pytest.approx(1.0 / spread / 2**0.5), "a mean of two scores with an error of 1"
    assert run.mean_errors[2] == pytest.approx(1.0 / spread / 3**0.5)
    assert (run.names[run.best], run.as_good) == ("c5", ["c3", "c4"])
    assert "`c3` and `c4` may be as good" in best_sentence(run)
    sure = run_dynamics("r", checkpoints("r", [50, 60, 70, 80, 90, 110]))
    assert not sure.as_good
    assert "How sure" not in best_sentence(sure)
    many = run_dynamics("r", checkpoints("r", [10] + [70] * 7))
    assert "others may be as good" in best_sentence(many)


def test_of_runs_that_differ_by_noise_none_wins() -> None:
    def verdict(*seconds: float) -> str:
        models = [*checkpoints("first", [50, 60, 70]), *checkpoints("second", list(seconds))]
        return dynamics_report(Evaluation(models, {"blimp_fast": ABOUT}, "float32", {})).verdict

    assert verdict(50, 60, 69).startswith("No clear winner of 2 runs: first gets highest")
    assert verdict(50, 60, 90).startswith("Of 2 runs, second gets highest: its best checkpoint is +")


def test_scores_are_drawn_with_their_errors() -> None:
    models = checkpoints("r", [50, 60, 70], [3.0, 2.0, 1.0], words=[1, 2, 3])
    report = dynamics_report(Evaluation(models, dict.fromkeys(models[0].tasks, ABOUT), "float32", {}))
    charts = {part.name: part.chart for part in report.parts if isinstance(part, Picture)}
    assert charts["score-blimp_fast"].errors == {"r": [1.0, 1.0, 1.0]}
    assert charts["score-bits_per_byte"].errors == {}
    assert list(charts["deviation-r"].errors) == ["mean of the tasks"]


def test_several_runs_on_one_scale() -> None:
    low, high = compare_runs({"low": checkpoints("low", [50, 52]), "high": checkpoints("high", [60, 62])})
    assert max(low.mean) < 0 < min(high.mean)
    own = run_dynamics("low", checkpoints("low", [50, 52]))
    assert own.deviations["blimp_fast"] == [-1.0, 1.0]
