"""`braid convert` end to end: the plan, the tokenizer, the Hub, and errors with exit code 2."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from braidlm.bridges.formats.llama import LlamaBridge
from braidlm.cli import main as command
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_config, load_lineage, save_model
from braidlm.core.models.runs import trained_length
from braidlm.data.tokenizing.build import bytes_tokenizer, load_tokenizer
from braidlm.edits.edit import edit
from braidlm.opening import names
from braidlm.opening.convert import convert
from braidlm.opening.open import open_model
from tests.bridges.checkpoints import braid, gpt2, llama, saved
from tests.opening.random_decoders import tiny_decoder, token_ids
from tests.tiny_decoders import save_gates

LLAMA = {"block": {"attention": {"heads": 4}}, "stages": ["block"]}
TEXT = "Once upon a time there was a naïve cat."


@pytest.fixture(autouse=True)
def _this_verb_alone(monkeypatch):
    """No other verb need exist, or be imported, for this one."""
    monkeypatch.setattr(command, "VERBS", ("convert",))


def braid_command(*words: object) -> int:
    """`braid convert ...` in this process; the exit code."""
    return command.main(["convert", *map(str, words)])


@pytest.fixture
def checkpoint(tmp_path):
    """A GPT-2 with a tokenizer."""
    gpt2(vocab_size=300).save_pretrained(tmp_path / "hf")
    bytes_tokenizer().save(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_there_and_back_with_the_tokenizer(tmp_path, kind, capsys):
    theirs = {"gpt2": gpt2, "llama": llama}[kind](vocab_size=300)
    theirs.save_pretrained(tmp_path / "hf")
    bytes_tokenizer().save(tmp_path / "hf")
    assert braid_command(tmp_path / "hf", "--from", kind, "--out", tmp_path / "braid") == 0
    assert braid_command(tmp_path / "braid", "--to", kind, "--out", tmp_path / "back") == 0
    captured = capsys.readouterr()
    assert f"written: {tmp_path / 'back'}" in captured.out
    assert captured.err == ""
    source = load_tokenizer(tmp_path / "hf")
    for folder in (tmp_path / "braid", tmp_path / "back"):
        assert load_tokenizer(folder).identity() == source.identity()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == source.encode(TEXT)
        assert tokenizer.eos_token_id == source.eos_id
    config = load_config(tmp_path / "braid")
    assert (config.eos_token_id, config.pad_token_id) == (source.eos_id, source.pad_id)
    assert load_lineage(tmp_path / "braid")["tokenizer"] == source.fingerprint
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")  # no remote code
    assert back.config.model_type == kind
    assert back.config.eos_token_id == source.eos_id
    assert not list((tmp_path / "back").glob("*.py"))


def test_both_continue_a_text_alike(tmp_path, checkpoint):
    convert(checkpoint, tmp_path / "braid")
    prompt = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    folders = (checkpoint, tmp_path / "braid")
    models = [AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True) for folder in folders]
    texts = [model.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0).tolist() for model in models]
    assert texts[0] == texts[1]


def test_dry_run_shows_the_plan_and_writes_nothing(tmp_path, checkpoint, capsys):
    assert braid_command(checkpoint, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "GPT-2 to Braid: 28 tensors of theirs, 28 of ours, 35,840 parameters" in out
    assert "2 x transformer.h.*.attn.c_attn.weight -> model.stages.*.layers.*.attention.qkv.weight (transposed)" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_conversion_says_a_summary_and_with_verbose_every_tensor(tmp_path, checkpoint, capsys):
    for more, is_shown in ((), False), (("--verbose",), True):
        assert braid_command(checkpoint, "--out", tmp_path / f"braid{len(more)}", *more) == 0
        out = capsys.readouterr().out
        assert "GPT-2 to Braid: 28 tensors of theirs" in out
        assert ("transformer.h.*.attn.c_attn.weight -> " in out) is is_shown


def test_the_plan_of_an_export(tmp_path, capsys):
    saved(braid({"positions": {"pairs": "interleaved"}, **LLAMA}), tmp_path / "braid")
    plan = convert(tmp_path / "braid", to="llama", dry_run=True)
    assert (plan.tensors, len(plan.mappings)) == (11, 8)
    qkv = "1 x model.stages.*.layers.*.attention.qkv.weight -> model.layers.*.self_attn.{q_proj,k_proj,v_proj}.weight"
    assert f"{qkv} (split in 3, rows reordered)" in capsys.readouterr().out


def test_a_source_without_tokenizer_is_a_warning(tmp_path, capsys):
    gpt2().save_pretrained(tmp_path / "hf")
    assert braid_command(tmp_path / "hf", "--out", tmp_path / "braid") == 0
    assert "no tokenizer.json (nor vocab.json with merges.txt); the result has no tokenizer" in capsys.readouterr().err
    config = load_config(tmp_path / "braid")
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)


def test_a_tokenizer_larger_than_the_model(tmp_path, capsys):
    gpt2(vocab_size=257).save_pretrained(tmp_path / "hf")
    bytes_tokenizer().save(tmp_path / "hf")
    assert braid_command(tmp_path / "hf", "--out", tmp_path / "braid") == 2
    assert "the tokenizer has 258 tokens, the model only 257 rows for them" in capsys.readouterr().err
    assert not (tmp_path / "braid").exists()


def _pickle_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _no_weights(folder):
    (folder / "model.safetensors").unlink()


def _bad_json(folder):
    (folder / "config.json").write_text("{")


def _no_config(folder):
    (folder / "config.json").unlink()


def _bad_index(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    ("spoil", "texts"),
    [
        (_pickle_only, ["the weights are a pickle (pytorch_model.bin)", "save_pretrained('NEW_FOLDER')"]),
        (_truncated, ["model.safetensors: this file is damaged", "Download or copy it again."]),
        (_no_weights, ["there are no weights here"]),
        (_bad_json, ["config.json: this is not valid JSON"]),
        (_no_config, ["neither a model folder (no config.json)"]),
        (_bad_index, ["expected an object, found a list"]),
    ],
)
def test_broken_sources(tmp_path, checkpoint, capsys, spoil, texts):
    spoil(checkpoint)
    assert braid_command(checkpoint, "--from", "gpt2", "--out", tmp_path / "braid") == 2
    err = capsys.readouterr().err
    assert [text for text in texts if text not in err] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_wrong_commands(tmp_path, checkpoint, capsys):
    (tmp_path / "there").mkdir()
    saved(braid({"stages": ["block"]}), tmp_path / "ours")
    out = ["--out", tmp_path / "new"]
    for words, text in (
        ([checkpoint, "--from", "gpt3", *out], "unknown format 'gpt3'. Did you mean 'gpt2'?"),
        ([checkpoint, "--from", "gpt2"], "give the folder to write"),
        ([checkpoint, "--from", "gpt2", "--out", tmp_path / "there"], "there: this folder exists already"),
        ([checkpoint, "--from", "llama", *out], "this folder holds a 'gpt2' model, not a 'llama' model"),
        ([checkpoint, "--to", "gpt2", *out], "this folder holds a 'gpt2' model, not a Braid model"),
        ([tmp_path / "ours", *out], "this is a Braid model already"),
        ([tmp_path / "nowhere", *out], "nowhere: there is no such folder"),
        ([checkpoint / "config.json", *out], "this is a file; give the folder"),
    ):
        assert braid_command(*words) == 2, text
        assert text in capsys.readouterr().err
    with pytest.raises(BraidError, match="give either `--from` or `--to`"):
        convert(checkpoint, tmp_path / "new", from_="gpt2", to="gpt2")
    assert not (tmp_path / "new").exists()


def test_quiet_shows_errors_only(tmp_path, checkpoint, capsys):
    assert braid_command(checkpoint, "--out", tmp_path / "braid", "--quiet") == 0
    assert capsys.readouterr() == ("", "")
    assert braid_command(checkpoint, "--dry-run", "--quiet") == 0
    assert "GPT-2 to Braid" in capsys.readouterr().out
    assert braid_command(checkpoint, "--out", tmp_path / "braid", "--quiet") == 2
    assert "exists already" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing(tmp_path, checkpoint, monkeypatch, capsys):
    from safetensors import SafetensorError
    from transformers import GPT2LMHeadModel

    def fill_the_disk(self, folder, **options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    convert(checkpoint, tmp_path / "braid")
    monkeypatch.setattr(GPT2LMHeadModel, "save_pretrained", fill_the_disk)
    assert braid_command(tmp_path / "braid", "--to", "gpt2", "--out", tmp_path / "back") == 2
    assert "the disk is full; nothing was written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["braid", "hf"]


def test_a_name_on_the_hub(tmp_path, checkpoint, monkeypatch):
    requested = []

    def download(name, **options):
        requested.append(name)
        return str(checkpoint)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    convert("someone/gpt2", tmp_path / "braid")
    assert requested == ["someone/gpt2"]
    assert load_lineage(tmp_path / "braid")["sources"][0]["path"] == "someone/gpt2@hf"
    assert not any(pattern.endswith((".bin", ".py")) for pattern in names.DOWNLOADED)


def test_the_hub_out_of_reach(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # conftest has put the Hub's library offline
    assert braid_command("openai-community/gpt2", "--from", "gpt2", "--out", "braid") == 2
    err = capsys.readouterr().err
    assert "there is no folder 'openai-community/gpt2', and the Hub cannot be reached" in err
    assert "download the model where there is a connection" in err


def _with_lora(base, folder, targets):
    """A LoRA adapter with random factors on a decoder, as peft writes it; the decoder with it, not merged."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=targets, fan_in_fan_out=targets == ["c_attn"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(("name", "targets"), [("phi3", ["qkv_proj", "down_proj"]), ("gpt2", ["c_attn"])])
def test_lora_and_gates_become_one_folder(tmp_path, name, targets):
    pytest.importorskip("peft")
    base, ids = tmp_path / "home" / "base", token_ids(2, 7)
    tiny_decoder(name, vocab_size=300).save_pretrained(base)
    bytes_tokenizer().save(base)
    adapted = _with_lora(base, tmp_path / "lora", targets)
    assert braid_command(tmp_path / "lora", "--to", "transformers", "--out", tmp_path / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")  # no remote code
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=0, atol=1e-5)

    save_gates(tmp_path / "lora", tmp_path / "gates", moved=0.3)
    convert(tmp_path / "gates", tmp_path / "whole", to="transformers")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", trust_remote_code=True)
    assert torch.equal(whole(ids).logits, open_model(tmp_path / "gates").load()(ids).logits)
    layers = whole.base_model.layers if name == "phi3" else whole.base_model.h
    layers[1].gate.is_off = layers[2].gate.is_off = layers[3].gate.is_off = True
    torch.testing.assert_close(whole(ids).logits, adapted(ids).logits, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "whole")(TEXT)["input_ids"] == load_tokenizer(base).encode(TEXT)
    texts = [path.read_text() for path in (tmp_path / "whole").iterdir() if path.suffix in (".json", ".md", ".py")]
    assert not any(str(tmp_path) in text for text in (*texts, (tmp_path / "gates" / "README.md").read_text()))


def test_a_whole_folder_keeps_the_type_of_its_base_and_its_name_on_the_hub(tmp_path):
    from huggingface_hub.constants import HF_HUB_CACHE

    cache, revision = Path(HF_HUB_CACHE, "models--org--tiny"), "0" * 40
    tiny_decoder("llama", vocab_size=300, dtype=torch.bfloat16).save_pretrained(cache / "snapshots" / revision)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(revision)
    edit("gate", cache / "snapshots" / revision, tmp_path / "gates")
    convert(tmp_path / "gates", tmp_path / "whole", to="transformers")
    shutil.rmtree(cache)
    assert json.loads((tmp_path / "gates" / "gate_config.json").read_text())["base"] == "org/tiny"
    assert "for the model org/tiny, which" in (tmp_path / "gates" / "README.md").read_text()
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert (config["dtype"], config["model_type"]) == ("bfloat16", "gated_llama")
    assert 'base_model: ["org/tiny"]' in (tmp_path / "whole" / "README.md").read_text()


def test_what_is_whole_already_is_refused(tmp_path, checkpoint, capsys):
    saved(braid({"stages": ["block"]}), tmp_path / "ours")
    for source, what in ((checkpoint, "a decoder without adapters"), (tmp_path / "ours", "a Braid model")):
        assert braid_command(source, "--to", "transformers", "--out", tmp_path / "new") == 2
        assert f"this is {what}, a whole folder that transformers opens already" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_converted_model_is_read_in_the_windows_that_it_was_trained_at(tmp_path):
    """`bits_per_byte` reads as many tokens at once as in training: without that length a window is the context."""
    save_model(braid(LLAMA), tmp_path / "braid", None, {"recipe": {"data": {"length": 7}}})
    convert(tmp_path / "braid", tmp_path / "there", to="llama")
    convert(tmp_path / "there", tmp_path / "back")
    assert [trained_length(load_lineage(tmp_path / each)) for each in ("there", "back")] == [7, 7]


def test_an_export_that_is_not_exact_is_refused(tmp_path, monkeypatch, capsys):
    saved(braid(LLAMA), tmp_path / "braid")
    monkeypatch.setattr(LlamaBridge, "pairs", "interleaved")
    assert braid_command(tmp_path / "braid", "--to", "llama", "--out", tmp_path / "out") == 2
    assert "an export changes no logit by more than" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["braid"]
