"""`braid generate` and the streaming of text."""

import io
import json
from pathlib import Path

import pytest

import braidlm
from braidlm.core.decoding.decoder import Sampling
from braidlm.core.decoding.generation import TextStream, continue_text, encode_prompts, next_tokens
from braidlm.core.models.folders import load_model, save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.tiny_models import randomised


def test_greedy_is_what_transformers_generates(braid, model_folder: Path):
    import torch

    model, tokenizer = load_model(model_folder), bytes_tokenizer()
    ids = tokenizer.encode("Hello")
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    result = braid("generate", model_folder, "Hello", "--greedy", "--max-tokens", 12, "--json").json()
    text = result["texts"][0]
    assert text["prompt"] + text["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert text["tokens"] == 12
    assert text["stopped"] == "max_tokens"
    assert result["model"] == str(model_folder)
    assert result["tokens_per_second"] > 0


def test_as_many_pauses_as_no_model_was_trained_with_are_refused(braid, model_folder: Path):
    refused = braid("generate", model_folder, "Hello", "--pauses", 100_000)
    assert refused.code == 2
    assert "expected a whole number from 0 to 1000, got 100000" in refused.err


def test_printed_text_is_the_returned_text(braid, model_folder: Path):
    prompts = ["Hello there", "x", ""]
    options = ("--seed", 3, "--max-tokens", 20, "--temperature", 1.5)
    shown = braid("generate", model_folder, *prompts, *options, "--quiet").out
    pieces: list[tuple[int, str]] = []
    result = braidlm.generate(
        model_folder, prompts, max_tokens=20, temperature=1.5, seed=3, on_text=lambda n, text: pieces.append((n, text))
    )
    assert shown == "\n\n".join(text.prompt + text.text for text in result.texts) + "\n"
    for number, text in enumerate(result.texts):
        assert "".join(piece for n, piece in pieces if n == number) == text.text
    again = braidlm.generate(model_folder, prompts, max_tokens=20, temperature=1.5, seed=3)
    assert [text.text for text in again.texts] == [text.text for text in result.texts]


def test_a_run_folder_means_its_newest_checkpoint(braid, run_folder: Path):
    result = braid("generate", run_folder, "Hello", "--max-tokens", 2, "--json").json()
    assert result["model"] == str(run_folder / "checkpoints" / "step-10")


def test_top_next(braid, model_folder: Path):
    result = braid("generate", model_folder, "Hello", "--max-tokens", 1, "--greedy", "--top-next", 4, "--json").json()
    following = result["texts"][0]["next"]
    assert [token["probability"] for token in following] == sorted((t["probability"] for t in following), reverse=True)
    assert len(following) == 4
    assert result["texts"][0]["text"] in (following[0]["text"], "")
    shown = braid("generate", model_folder, "Hello", "--max-tokens", 1, "--top-next", 4).out
    assert "after 'Hello'" in shown
    assert "probability" in shown
    everything = next_tokens(load_model(model_folder), bytes_tokenizer(), ["Hello"], 1000)[0]
    assert len(everything) == 258
    assert sum(token.probability for token in everything) == pytest.approx(1.0, abs=1e-5)


def test_a_prompt_beyond_the_context_is_told_where_positions_have_no_limit(braid, tmp_path: Path):
    tokenizer = bytes_tokenizer()
    config = BraidConfig(
        {"width": 32, "context": 8, "positions": "rope", "stages": ["block"]}, vocab_size=tokenizer.vocab_size
    )
    folder = save_model(randomised(BraidForCausalLM(config)), tmp_path / "rotary", tokenizer, {"made_by": "a test"})
    told = "a prompt has 9 tokens, and the model's context is 8"
    assert told in braid("generate", folder, "x" * 9, "a", "--max-tokens", 1).err
    (tmp_path / "prompts.txt").write_text("x" * 9)
    study = braid("generate", "--models", folder, "--prompts", tmp_path / "prompts.txt", "--max-tokens", 1)
    assert told in study.err
    assert "context" not in braid("generate", folder, "x" * 8, "--max-tokens", 1).err


def test_the_end_of_text_ends_it(braid, model_folder: Path, tmp_path: Path):
    model, tokenizer = load_model(model_folder), bytes_tokenizer()
    model.head.weight.data.zero_()
    model.model.norm.bias.data.fill_(1.0)
    model.model.norm.weight.data.zero_()
    model.head.weight.data[tokenizer.eos_id] = 1.0
    pieces = list(continue_text(model, tokenizer, ["a", "bc"], 10, Sampling(0.0)))
    assert [(p.prompt, p.text, p.stopped, p.tokens) for p in pieces] == [(0, "", "end", 1), (1, "", "end", 1)]
    shown = braid("generate", save_model(model, tmp_path / "ending", tokenizer, {"made_by": "a test"}), "a").out
    assert shown.splitlines()[1] == "(ended by the model, with its token for the end of a text)"
    assert shown.splitlines()[2].startswith("(1 token in ")


def test_learned_positions_end_a_text(braid, model_folder: Path):
    shown = braid("generate", model_folder, "Hello", "--max-tokens", 100, "--greedy")
    result = braidlm.generate(model_folder, "Hello", greedy=True)
    assert result.texts[0].stopped in ("limit", "end")
    assert ("longest text this model can read" in shown.out) == (result.texts[0].stopped == "limit")


@pytest.mark.parametrize("text", ["naïve café", "日本語の話", "a 😀 b", "plain"])
def test_characters_come_whole_and_once(text: str):
    tokenizer = bytes_tokenizer()
    ids = tokenizer.encode(text)
    for cut in range(len(text)):
        begun = tokenizer.encode(text[:cut]) or [tokenizer.eos_id]
        stream = TextStream(tokenizer, begun)
        pieces = [stream.add(token) for token in ids[len(tokenizer.encode(text[:cut])) :]]
        assert "".join(pieces) + stream.finish() == text[cut:]
        assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    stream = TextStream(bytes_tokenizer(), [104, 105])
    assert [stream.add(0xE6), stream.add(0x97)] == ["", ""]
    assert stream.finish() == "\ufffd"


def test_an_empty_prompt_is_the_beginning_of_a_text():
    tokenizer = bytes_tokenizer()
    assert encode_prompts(tokenizer, ["", "a"]) == [[tokenizer.bos_id], [97]]


def test_a_prompt_begins_as_the_tokenizer_begins_texts():
    tokenizer = bytes_tokenizer()
    tokenizer.begin_texts()
    assert encode_prompts(tokenizer, ["", "a"]) == [[tokenizer.eos_id], [tokenizer.eos_id, 97]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["x" * 70], "the prompt has 70 tokens, and the model's limit is 64"),
        (["a", "--temperature", "-1"], "argument --temperature: expected a number from 0 to 1000, got -1.0"),
        (["a", "--temperature", "nan"], "argument --temperature: expected a number from 0 to 1000, got nan"),
        (["a", "--seed", str(2**63)], "argument --seed: expected a whole number from 0 to 9223372036854775807"),
        (["a", "--top-k", "0"], "argument --top-k: expected a whole number from 1 to"),
        (["a", "--top-p", "2"], "argument --top-p: expected a number above 0 and at most 1, got 2.0"),
        (["a", "--max-tokens", "0"], "argument --max-tokens: expected a whole number from 1 to"),
        (["a", "--top-next", "-1"], "argument --top-next: expected a whole number from 0 to"),
        (["a", "--device", "toaster"], "there is no device 'toaster' here"),
        (["a\udcff"], "is not valid UTF-8"),
    ],
)
def test_wrong_arguments(braid, model_folder: Path, arguments: list[str], text: str):
    shown = braid("generate", model_folder, *arguments)
    assert (shown.code, shown.out) == (2, "")
    assert text in shown.err


def test_folders_that_cannot_generate(braid, tmp_path: Path, model_folder: Path):
    assert f"{tmp_path / 'none'}: there is no such folder" in braid("generate", tmp_path / "none", "a").err
    assert "neither a model folder (no config.json) nor a run folder" in braid("generate", tmp_path, "a").err
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    assert "this run has no checkpoint yet" in braid("generate", tmp_path, "a").err
    for kind, text in {"bert": "this is an encoder ('bert')", "t5": "this is an encoder and a decoder ('t5')"}.items():
        (model_folder / "config.json").write_text(json.dumps({"model_type": kind}))
        shown = braid("generate", model_folder, "a")
        assert shown.code == 2
        assert text in shown.err


@pytest.fixture
def path_folder(tmp_path: Path) -> Path:
    """A model with two paths."""
    parallel = {"paths": ["stories", "maths"], "layers": 2, "attention": {"heads": 2}}
    tokenizer = bytes_tokenizer()
    config = BraidConfig({"width": 16, "stages": [{"parallel": parallel}]}, vocab_size=tokenizer.vocab_size)
    return save_model(randomised(BraidForCausalLM(config)), tmp_path / "paths", tokenizer, {"made_by": "a test"})


def test_only_the_chosen_paths_are_active(braid, path_folder: Path):
    options = ("--greedy", "--max-tokens", 12, "--top-next", 3, "--json")
    one = braid("generate", path_folder, "Hello", *options, "--paths", "stories").json()
    whole = braid("generate", path_folder, "Hello", *options).json()
    both = braid("generate", path_folder, "Hello", *options, "--paths", "maths", "stories").json()
    assert (one["paths"], whole["paths"], both["paths"]) == (["stories"], None, ["maths", "stories"])
    assert one["texts"] != whole["texts"] == both["texts"]
    model = load_model(path_folder, paths=["stories"])
    pieces = continue_text(model, bytes_tokenizer(), ["Hello"], 12, Sampling(0.0))
    assert one["texts"][0]["text"] == "".join(piece.text for piece in pieces)
    again = braidlm.generate(path_folder, "Hello", greedy=True, max_tokens=12, paths=["stories"])
    assert again.texts[0].text == one["texts"][0]["text"]
    shown = braid("generate", path_folder, "Hello", "--max-tokens", 2, "--paths", "stories")
    assert "(active paths: stories)" in shown.out


def test_paths_that_are_not_there(braid, path_folder: Path, model_folder: Path):
    shown = braid("generate", path_folder, "Hello", "--paths", "storis")
    assert (shown.code, shown.out) == (2, "")
    assert f"{path_folder}: the model has no path 'storis'. Did you mean 'stories'?" in shown.err
    shown = braid("generate", model_folder, "Hello", "--paths", "stories")
    assert (shown.code, shown.out) == (2, "")
    assert f"{model_folder}: this model has no paths to choose from" in shown.err


def test_options_may_stand_before_the_prompt(braid, model_folder: Path):
    after = braid("generate", model_folder, "Hello", "--greedy", "--max-tokens", 3, "--quiet").out
    assert braid("generate", model_folder, "--max-tokens", 3, "--greedy", "Hello", "--quiet").out == after
    assert braid("generate", "--greedy", "--max-tokens", 3, "--quiet", model_folder, "Hello").out == after


def test_a_dash_reads_the_prompt_from_standard_input(braid, model_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("One day\n"))
    result = braid("generate", model_folder, "-", "--max-tokens", 2, "--json").json()
    assert result["texts"][0]["prompt"] == "One day"


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers."""
    config = BraidConfig(
        {"width": 16, "context": 64, "block": {"attention": {"heads": 2}}, "stages": [{"block": {"layers": 4}}]},
        vocab_size=bytes_tokenizer().vocab_size,
    )
    folder = tmp_path_factory.mktemp("deep") / "model"
    return save_model(randomised(BraidForCausalLM(config)), folder, bytes_tokenizer(), {"made_by": "a test"})


def test_speculation_gives_the_same_text(braid, deep_folder: Path):
    prompts = ("Hello", "a much longer prompt")
    options = ("--greedy", "--max-tokens", 20, "--json")
    plain = braid("generate", deep_folder, *prompts, *options).json()
    for early in (("--speculate", 3), ("--speculate", 2, "--exit-layer", 3)):
        drafted = braid("generate", deep_folder, *prompts, *options, *early).json()
        assert drafted["texts"] == plain["texts"]
        assert 0 <= drafted["accepted"] <= 1
        assert drafted["mean_layer"] is None
    assert plain["accepted"] is None
    assert "of the drafted tokens were accepted)" in braid("generate", deep_folder, "Hello", "--speculate", 3).out


def test_early_exits_are_told(braid, deep_folder: Path):
    left = braid("generate", deep_folder, "Hello", "--greedy", "--max-tokens", 5, "--exit-layer", 2, "--top-next", 1)
    assert "(left after layer 2)" in left.out
    options = ("--greedy", "--max-tokens", 5, "--exit-layer", 2, "--top-next", 1, "--json")
    result = braid("generate", deep_folder, "Hello", *options).json()
    assert result["mean_layer"] == 2
    first = result["texts"][0]["next"][0]["text"]
    assert result["texts"][0]["text"].startswith(first), "the shown probabilities are those of the exit too"
    unsure = braid("generate", deep_folder, "Hello", "--max-tokens", 5, "--exit-confidence", 1.0, "--json").json()
    assert unsure["mean_layer"] == 4
    assert "on average)" in braid("generate", deep_folder, "Hello", "--exit-confidence", 0.05).out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--exit-layer", 5), "the model cannot be left after layer 5"),
        (("--exit-layer", 4, "--speculate", 2), "only a layer before the last"),
        (("--exit-confidence", 0.5, "--speculate", 2), "either leave early when the model is sure, or are drafts"),
    ],
)
def test_exits_that_a_model_does_not_have_are_told(braid, deep_folder: Path, tmp_path: Path, options, text: str):
    assert text in braid("generate", deep_folder, "Hello", *options).err
    (tmp_path / "prompts.txt").write_text("Hello\n")
    study = braid("generate", "--prompts", tmp_path / "prompts.txt", "--models", deep_folder, *options)
    assert (study.code, text in study.err) == (2, True)
