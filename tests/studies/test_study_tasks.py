"""Tasks of a study."""

from pathlib import Path
from typing import Any

import pytest

from braidlm.core.errors import BraidError
from braidlm.model.config.strict import encode
from braidlm.studies.decoding import decode_study
from braidlm.studies.report import study
from braidlm.studies.running import run_study
from braidlm.studies.study import TasksConfig
from braidlm.studies.tables import babylm, tables, task_scores
from tests.studies.study_results import made_up_results, model
from tests.studies.toy_study import DENSE, toy_study


def with_tasks(tmp_path: Path, **tasks: Any) -> dict[str, Any]:
    return toy_study(tmp_path / "out", tmp_path / "data", steps=DENSE, epochs=0.02, tasks=tasks)


def test_every_model_is_scored(tmp_path: Path) -> None:
    text = tmp_path / "texts" / "dev" / "some.txt"
    text.parent.mkdir(parents=True)
    text.write_text("Once upon a time there was a cat.\n\nIt had a hat.\n")
    data = with_tasks(tmp_path, names=["bits_per_byte"], data=str(tmp_path / "texts"), settings={"max_tokens": 10})
    made = decode_study(data)
    assert encode(decode_study(encode(made))) == encode(made)
    (model,) = study(made, device="cpu").models
    assert 0 < model.tasks["bits_per_byte"] < 20
    table = (tmp_path / "out" / "tables" / "tasks.md").read_text()
    assert f"| dense | {model.tasks['bits_per_byte']:.2f} | – |" in table, "one document tells no error"
    assert list((tmp_path / "out" / "tasks").iterdir()), "results are cached"


def test_scores_stand_with_the_error_of_their_items_and_chance() -> None:
    results = made_up_results({"stories": 0.5, "maths": 0.4}, {}, {"stories": 0.5, "maths": 0.4})
    results.models = [
        model("dense", "whole", 0.5, 0.4, seed=seed, tasks={"blimp": 70.0 + seed, "reading": 1.0}, task_errors=error)
        for seed, error in ((1, {"blimp": 0.3}), (2, {"blimp": 0.5}))
    ]
    results.chance = {"blimp": 50.0}
    table = task_scores(results)
    assert table.columns == ["model", "blimp", "blimp, standard error", "reading", "reading, standard error"]
    assert table.rows[0] == ["dense", "71.50 ± 0.71", "0.40", "1.00 ± 0.00", "–"]
    assert table.rows[1] == ["by chance", "50.00", "–", "–", "–"]


def test_an_unknown_task_is_told(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match="Did you mean 'bits_per_byte'"):
        decode_study(with_tasks(tmp_path, names=["bits_per_bite"]))


def test_missing_data_is_told_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match=r"blimp: its data is not in(.|\n)*tasks\.data=FOLDER(.|\n)*`tasks=null`"):
        run_study(decode_study(with_tasks(tmp_path, names=["blimp"], data=str(tmp_path / "none"))), device="cpu")
    assert not list(tmp_path.iterdir())


def test_the_rows_of_moep_stand_beside_those_of_a_study() -> None:
    results = made_up_results({"stories": 0.5, "maths": 0.4}, {}, {"stories": 0.5, "maths": 0.4})
    results.models = [
        model("dense", "whole", 0.5, 0.4, seed=seed, tasks={"rte": 1.0}, babylm={"BLiMP": 60.0 + seed, "RTE": 50.0})
        for seed in (1, 2)
    ]
    table = babylm(results)
    assert table.columns == ["model", "BLiMP", "RTE", "average"]
    assert table.rows[0] == ["dense", "61.50 ± 0.71", "50.00 ± 0.00", "55.75 ± 0.35"]
    assert ["GPT-BERT causal, published", "67.45", "56.10", "61.78"] in table.rows
    results.study.tasks = TasksConfig(["glue_rte"])
    assert "tables/babylm" in [one.name for one in tables(results)]
