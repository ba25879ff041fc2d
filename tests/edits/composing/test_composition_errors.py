"""Bad input to compose: a clear error before anything is read in full, and nothing written."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.data.tokenizing.tokenizer import SpecialTokens
from braidlm.edits.compose import compose
from braidlm.opening.braid import OpenedBraid
from tests.edits.composed_paths import GPT2, TOKENIZER, blocks, saved_path
from tests.tiny_models import tiny_model


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Two models that fit, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("stories", "maths")):
        saved_path(Path(name), seed)
    return tmp_path


def refused(*sources, **options) -> str:
    """The error of composing these; nothing is left behind."""
    before = sorted(map(str, Path().rglob("*")))
    with pytest.raises(BraidError) as caught:
        compose(sources, options.pop("out", "made"), **options)
    assert sorted(map(str, Path().rglob("*"))) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("sources", "text"),
    [
        (["stories"], "composing takes at least two models"),
        (["stories", "nowhere"], "nowhere: there is no such folder"),
        (["stories", "."], "neither a model folder (no config.json) nor a run folder (no recipe.yaml)"),
        (["stories", "maths", "./stories"], "stories: this path is listed twice"),
    ],
)
def test_wrong_sources(home, sources, text):
    assert text in refused(*sources)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"out": None}, "give the folder to write"),
        ({"out": "maths"}, "maths: this folder exists already"),
        ({"join": "shared_liner"}, "join: unknown join 'shared_liner'. Did you mean 'shared_linear'?"),
        (
            {"join": {"kind": "gumbel_v1", "temprature": 2}},
            "join: unknown key 'temprature'. Did you mean 'temperature'?",
        ),
        ({"join": {"kind": "gumbel_v1", "losses": {"balance": 1}}}, "unknown routing loss 'balance'"),
        ({"join": {"kind": "concat", "to": 40}}, "join: unknown key 'to'"),
        ({"join": {"kind": "gumbel_v1", "temperature": 0}}, "join.temperature: expected a number above 0"),
        ({"join": 3}, "join: expected a join name or a mapping, got 3"),
        ({"freeze": ["path"]}, "'path' cannot be frozen. Did you mean 'paths'?"),
        ({"start": "medium"}, "there is no start 'medium'. There are: mean, random."),
        ({"layers": 0}, "layers: expected a whole number from 1 to 1000, got 0"),
        ({"blocks": -1}, "blocks: expected a whole number from 0 to 1000, got -1"),
        ({"names": ["a", "a"]}, "two paths are called 'a': stories and maths"),
        ({"names": ["a"]}, "1 names were given for 2 paths"),
        (
            {"names": ["a", "b.c"]},
            "a path's name is made of letters, digits, - and _, and does not begin with a digit, got 'b.c'",
        ),
        ({"names": ["a", "items"]}, "a path cannot be called 'items': torch reserves that name"),
        ({"names": ["a", "combined"], "join": "gumbel_v2"}, "a path cannot be called 'combined' here"),
    ],
)
def test_wrong_options(home, options, text):
    assert text in refused("stories", "maths", **options)


def test_other_tokenizers_are_refused_before_a_tensor_is_read(home, monkeypatch):
    def never(self, *arguments):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(OpenedBraid, "check_editable", never)
    other = bytes_tokenizer(SpecialTokens(eos="<end>", bos="<end>", order=("<end>", "<|pad|>")))
    save_model(tiny_model(vocab_size=258), "code", other, {})
    said = refused("stories", "maths", "code")
    assert (
        "'stories' and 'code' have different tokenizers: id 256 is '<|endoftext|>' in one and '<end>' in the other"
        in said
    )
    assert "braid prepare SOURCE --tokenizer DIR" in said
    longer = bytes_tokenizer()
    longer.backend.add_special_tokens([AddedToken("<more>", special=True)])
    save_model(tiny_model(vocab_size=259), "more", longer, {})
    assert "the vocabularies have 258 and 259 tokens" in refused("stories", "more")


def test_a_model_without_a_tokenizer(home):
    save_model(tiny_model(vocab_size=258), "bare", None, {})
    assert "bare: this model has no tokenizer" in refused("stories", "bare")


def test_other_vocabularies_and_positions(home):
    saved_path(Path("padded"), vocab_size=320)
    saved_path(Path("learned"), **GPT2)
    saved_path(Path("slower"), positions={"kind": "rope", "theta": 500.0})
    said = refused("stories", "padded", "learned")
    assert "the vocabularies differ in size: 'stories' has 258, 'padded' has 320, 'learned' has 258 rows" in said
    assert "positions differ: 'stories' has rope (theta 10000.0, pairs half, scaling None)" in said
    assert "'learned' has learned" in said
    assert "'slower' has rope (theta 500.0, pairs half, scaling None)" in refused("stories", "slower")


def test_models_that_cannot_be_a_path(home):
    saved_path(Path("composed"), stages=[{"project": {"to": 16}}, "block"])
    saved_path(Path("uneven"), stages=["block", {"block": {"attention": {"window": 4}}}])
    assert "composed: a path is made of `block` stages only, and here stage 0 is 'project'" in refused(
        "stories", "composed"
    )
    said = refused("stories", "uneven")
    assert (
        "uneven: this model cannot be a path: the blocks of stage 1 have another attention than those of stage 0"
        in said
    )


def test_blocks_written_in_two_ways_are_equal(home):
    saved_path(Path("spelled"), stages=["block", {"block": {"attention": {"head_dim": 4, "kv_heads": 4}}}])
    assert compose(["stories", "spelled"], None, dry_run=True) is None


def test_folders_that_are_no_models(home):
    for name, config in (("list", []), ("kindless", {}), ("mamba", {"model_type": "mamba"})):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config))
    assert "list/config.json: expected an object, found a list" in refused("stories", "list")
    assert "kindless: this is not a model folder (its config.json has no model_type)" in refused("stories", "kindless")
    assert "mamba: this folder holds a 'mamba' model; Braid reads braid, gpt2, llama" in refused("stories", "mamba")
    Path("maths", "model.safetensors").unlink()
    assert "maths: the folder has no model.safetensors" in refused("stories", "maths")


def test_weights_that_do_not_fit_their_configuration(home):
    saved_path(Path("deeper"), 5, **blocks(3))
    Path("maths", "model.safetensors").write_bytes(Path("deeper", "model.safetensors").read_bytes())
    assert "maths: the weights do not fit the configuration" in refused("stories", "maths")


def test_a_run_without_a_checkpoint(home):
    Path("run").mkdir()
    Path("run", "recipe.yaml").write_text("name: run")
    assert "run: this run has no checkpoint yet" in refused("stories", "run")


def test_two_runs_of_one_name(home):
    for folder in ("one", "two"):
        saved_path(Path(folder, "same"))
    said = refused(Path("one", "same"), Path("two", "same"))
    assert "two paths are called 'same'" in said
    assert "--names" in said


def test_a_dry_run_writes_nothing_and_needs_no_folder(home, capsys):
    before = sorted(map(str, Path().rglob("*")))
    assert compose(["stories", "maths"], None, dry_run=True) is None
    assert compose(["stories", "maths"], "made", dry_run=True) is None
    assert sorted(map(str, Path().rglob("*"))) == before
    assert capsys.readouterr().out.count("Compose stories + maths") == 2
    assert "this folder exists already" in refused("stories", "maths", out="maths", dry_run=True)


def test_a_disk_that_fills_up_leaves_nothing(home, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(TOKENIZER), "save", full)
    assert "made: the disk is full; nothing was written" in refused("stories", "maths")
