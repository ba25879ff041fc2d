"""The rows of the MoEP paper's Table 1: their averages are those that are printed, and columns can be chosen."""

from statistics import fmean

import pytest

from braidlm.evals.babylm.averages import PUBLISHED, published_rows

PRINTED = {
    "GPT-2 (BabyLM)": 46.60,
    "GPT-BERT causal": 54.10,
    "GPT-BERT focus-causal": 53.65,
    "GPT-BERT mixed-causal": 52.40,
}
OF_THEIR_COLUMNS = {"GPT-2 28M (MoEP)": 51.9, "MoEP": 52.7, "MoEP-SwiGLU": 50.7}
"""Printed are 48.1, 49.0 and 47.7, which their columns do not give."""


def test_the_averages_are_those_that_are_printed() -> None:
    rows = published_rows(PUBLISHED)
    assert {*PRINTED, *OF_THEIR_COLUMNS} == set(rows)
    for name, mean in (PRINTED | OF_THEIR_COLUMNS).items():
        assert fmean(rows[name].values()) == pytest.approx(mean, abs=0.06), name


def test_some_columns_alone() -> None:
    assert published_rows(["RTE", "BLiMP"])["GPT-BERT causal"] == {"BLiMP": 67.45, "RTE": 56.10}
