"""`--without`: verbs that run a model switch modules off by name."""

from pathlib import Path

import pytest

import braidlm
from braidlm.cli.main import main
from braidlm.core.models.folders import save_model
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.build import bytes_tokenizer
from tests.tiny_models import tiny_model

NAMES = ["old_1", "old_2", "german_1", "german_2"]
TEXT = "Once upon a time there was a cat. " * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One block of attention modules and feed-forward modules, and a text beside it."""
    experts = {"names": NAMES, "router": {"top_k": 2}}
    block = {"attention": {"heads": 2, "experts": experts}, "feed": {"kind": "mlp", "hidden": 8, "experts": experts}}
    model = tiny_model(stages=[{"block": block}], vocab_size=bytes_tokenizer().vocab_size, context=32)
    root = tmp_path_factory.mktemp("without")
    (root / "text.txt").write_text(TEXT)
    return save_model(model.float(), root / "modules", bytes_tokenizer(), {"made_by": "a test"})


def test_generate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"greedy": True, "max_tokens": 12, "top_next": 3}
    whole = braidlm.generate(folder, "Hello", **options)
    less = braidlm.generate(folder, "Hello", without=["german*"], **options)
    assert (whole.without, less.without) == (None, ["german*"])
    assert whole.texts[0].next != less.texts[0].next
    words = ["generate", str(folder), "Hello", "--greedy", "--max-tokens", "12", "--without"]
    assert main([*words, "german_1,german_2"]) == 0
    shown = capsys.readouterr()
    assert less.texts[0].text in shown.out
    assert "(without german_1, german_2)" in shown.out + shown.err
    assert main([*words, "germn_1"]) == 2
    assert f"{folder}: the model has no module 'germn_1'. Did you mean 'german_1'?" in capsys.readouterr().err


def test_eval_scores_and_caches_apart(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, data = tmp_path / "scores", folder.parent / "text.txt"
    words = ["eval", str(folder), "bits_per_byte", "--data", f"bits_per_byte={data}", "--out", str(out)]
    scores = []
    for options in ([], ["--without", "german*", "old_1"], []):
        assert main([*words, *options]) == 0
        (model,) = read_json(out / "results.json")["models"]
        assert model["without"] == (options[1:] or None)
        scores.append(model["tasks"]["bits_per_byte"]["score"])
    assert scores[0] == scores[2] != scores[1]
    assert main([*words, "--without", "spanish"]) == 2
    assert "the model has no module 'spanish'" in capsys.readouterr().err


def test_routes_shows_what_is_left(folder: Path) -> None:
    (found,) = braidlm.routes(folder, ["Once upon a time"], without=["german*"]).models
    for layer, tally in zip(found.layers, found.tallies[-1].read, strict=True):
        assert (layer.inactive, layer.active) == (("german_1", "german_2"), NAMES[:2])
        assert tally.load == {"old_1": 0.5, "old_2": 0.5, "german_1": 0.0, "german_2": 0.0}
    assert found.findings == []  # every token takes both that are left
    assert "layer 1 feed: without german_1, german_2" in found.notes
