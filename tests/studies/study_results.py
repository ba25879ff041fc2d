"""Results of a study with numbers made up, for what is said and drawn of them."""

from pathlib import Path
from typing import Any

from braidlm.studies.decoding import decode_study
from braidlm.studies.results import Bits, ModelResult, Point, StudyResults
from braidlm.studies.study import Role
from tests.studies.toy_study import DENSE, PATHS, composed, toy_study


def model(name: str, kind: Role, stories: float, maths: float, **changes: Any) -> ModelResult:
    bits = {"stories": stories, "maths": maths}
    facts: dict[str, Any] = {
        "seed": 1,
        "folder": Path("model"),
        "run_folder": Path("run"),
        "parameters": 1000,
        "active_parameters": 1000,
        "flops_per_token": 1000,
        "tokens": 5000,
        "words": 3000,
        "seconds": 10.0,
        "wall_seconds": 12.0,
        "curve": [Point(1000, 600, 1.0, {d: 2 * b for d, b in bits.items()}), Point(5000, 3000, 0.5, bits)],
    }
    return ModelResult(name=name, kind=kind, bits=bits, **(facts | changes))


def made_up_results(joined: Bits, silenced: dict[str, Bits], dense: Bits) -> StudyResults:
    """Two paths, 0.6 and 0.5 on their own domain, with a composed and a dense model of these scores."""
    study = decode_study(toy_study(Path("out"), Path("data"), steps=PATHS | {"joined": composed()} | DENSE))
    return StudyResults(
        study,
        [
            model("stories", "path", 0.6, 5.0),
            model("maths", "path", 5.5, 0.5),
            model("joined", "composed", **joined, silenced=silenced, seconds=30.0),
            model("dense", "whole", **dense, seconds=50.0),
        ],
    )
