"""A budget larger than the data: the message before the training, and the training itself."""

from pathlib import Path

import pytest

from braidlm.data.loading.streams import TokenStream
from braidlm.data.packing.packed_data import PackedData
from braidlm.training.train import train
from tests.training.tiny_runs import records, tiny_recipe


def test_a_corpus_smaller_than_an_epoch_is_reported_and_trained_all_the_same(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = TokenStream(PackedData(stories)).words
    recipe = tiny_recipe({"stories": stories}, tmp_path / "run", training={"budget": f"{2 * words} words", "batch": 64})
    recipe["data"]["chunking"] = {"kind": "windows", "stride": 32, "words_per_epoch": 10 * words}
    recipe["checkpoints"] = recipe["validation"] = {"every": f"{words} words"}
    run = train(recipe)
    output = capsys.readouterr()
    assert f"and an epoch should show {10 * words:,}: epochs repeat sooner." in output.err
    assert "The budget is " in output.out
    assert output.out.index("epochs repeat") < output.out.index("validation bits per byte"), "before the training"
    assert run.progress.words == 2 * words
    assert records(tmp_path / "run", "train")[-1]["epochs"]["stories"] > 2
    assert (tmp_path / "run" / "checkpoints" / f"chck_{words}").is_dir()
