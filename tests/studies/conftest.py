"""One toy study, run once and looked at by many tests."""

import pytest

from braidlm.core import console
from braidlm.studies.decoding import decode_study
from braidlm.studies.report import study
from braidlm.studies.results import StudyResults
from tests.studies.toy_study import toy_study


@pytest.fixture(scope="session")
def toy_results(tmp_path_factory: pytest.TempPathFactory) -> StudyResults:
    folder = tmp_path_factory.mktemp("study")
    console.set_quiet(True)
    try:
        return study(decode_study(toy_study(folder / "out", folder / "data", seeds=[1, 2])), device="cpu")
    finally:
        console.set_quiet(False)
