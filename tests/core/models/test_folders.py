"""Model folders: what is in them, and what is said of those that are broken."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from braidlm import __version__
from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models import folders
from braidlm.core.models.folders import load_config, load_lineage, load_model, save_model
from braidlm.core.reading import read_json
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.tiny_models import ToyTokenizer, models_built, random_ids, tiny_config, tiny_model


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lineage = {"made_by": "a test", "training": {"tokens": 123_456}, "sources": [{"folder": "x", "sha256": "y"}]}
    return save_model(tiny_model(), tmp_path_factory.mktemp("good") / "toy", ToyTokenizer(), lineage)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(good, tmp_path / "toy"))


def refused(folder: Path) -> str:
    with pytest.raises(BraidError) as caught:
        load_model(folder)
    return str(caught.value)


def test_a_folder_holds_what_the_format_says(good: Path) -> None:
    names = {path.name for path in good.iterdir() if path.suffix != ".py"}
    assert names == {
        "config.json",
        "generation_config.json",
        "lineage.json",
        "model.safetensors",
        "README.md",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = read_json(good / "config.json")
    assert config["model_type"] == "braid"
    assert config["architecture"]["stages"][0]["block"]["attention"]["kind"] == "softmax"
    assert "braidlm" not in json.dumps(config)  # registry names, never import paths
    assert read_json(good / "generation_config.json")["eos_token_id"] == 36
    assert list(good.rglob("*.bin")) == list(good.rglob("*.pt")) == list(good.rglob("*.pkl")) == []


def test_a_folder_says_where_it_came_from(good: Path) -> None:
    lineage = load_lineage(good)
    assert lineage is not None
    assert lineage["format"] == 1
    assert lineage["made_by"] == "a test"
    assert lineage["sources"] == [{"folder": "x", "sha256": "y"}]
    assert lineage["tokenizer"] == "toy-36"
    assert lineage["weights"] == {"file": "model.safetensors", "sha256": sha256_of(good / "model.safetensors")}
    assert lineage["versions"]["braidlm"] == __version__
    assert lineage["versions"]["torch"] == torch.__version__
    assert lineage["created"].endswith("+00:00")
    assert load_lineage(good.parent) is None


def test_the_card_states_the_facts(good: Path) -> None:
    card = (good / "README.md").read_text()
    model = load_model(good)
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "\n# toy\n" in card
    assert "a test." in card
    assert f"| parameters | {sum(p.numel() for p in model.parameters()):,} |" in card
    assert "| stages | block x 1, block x 1 |" in card
    assert "| vocabulary | 37 |" in card
    assert '"tokens": 123456' in card
    assert "trust_remote_code=True" in card


def test_a_model_comes_back_in_evaluation_and_in_its_type(tmp_path: Path) -> None:
    model = tiny_model(dropout=0.3).to(torch.bfloat16).train()
    loaded = load_model(save_model(model, tmp_path / "m", None, {}))
    assert not loaded.training
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.head.weight, model.head.weight)
    assert loaded.head.weight is loaded.model.embedding.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_what_transformers_opens(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    config = tiny_config(tie_embeddings=tied, stages=[{"block": {"layers": 3, "share": "feeds"}}])
    config.frozen = ["embedding", "head"]
    folder = save_model(BraidForCausalLM(config).to(dtype), tmp_path / "m", ToyTokenizer(), {})
    model, reference = load_model(folder), BraidForCausalLM.from_pretrained(folder)
    ours, theirs = (dict(one.named_parameters(remove_duplicate=False)) for one in (model, reference))
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name])
        assert (parameter.dtype, parameter.requires_grad) == (theirs[name].dtype, theirs[name].requires_grad)
    assert all(ours[own] is ours[saved] for own, saved in model.tied.items())
    assert (bool(model.tied), model.training) == (True, reference.training)
    assert model.config.to_dict() == reference.config.to_dict()
    assert (model.name_or_path, model.config.name_or_path) == (str(folder), str(folder))
    assert model.generation_config.to_dict() == reference.generation_config.to_dict()


def test_the_configuration_decides_the_type_as_in_transformers(folder: Path) -> None:
    data = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(data | {"dtype": "bfloat16"}))
    assert load_model(folder).dtype == BraidForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_opening_builds_a_model_once(good: Path) -> None:
    with models_built() as built:
        load_model(good)
    assert len(built) == 1


def test_a_configuration_that_is_given_stays_as_it_is(tmp_path: Path) -> None:
    paths = {"stages": [{"parallel": {"paths": ["a", "b"], "join": "add"}}]}
    folder = save_model(tiny_model(**paths), tmp_path / "m", None, {})
    config = load_config(folder)
    assert load_model(folder, paths=["a"], config=config).config.paths == ["a"]
    assert config.paths is None


def test_a_padding_token_is_always_named(good: Path) -> None:
    config = load_config(good)
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == (36, None, 36)


@pytest.mark.parametrize(
    ("given", "tokenizer", "kept"),
    [
        ((None, None, None), (36, 35, 34), (36, 35, 34)),  # missing: the tokenizer's
        (([30, 36], 35, 34), (36, 35, 34), ([30, 36], 35, 34)),  # several ends, the tokenizer's among them
        (([30, 31], 1, 2), (36, 35, 34), (36, 35, 34)),  # of another tokenizer
        ((30, 31, 32), (None, None, None), (30, 31, 32)),  # a tokenizer without roles takes nothing away
        (([30, 31], None, None), (None, None, None), ([30, 31], None, 30)),  # a padding token is always named
        ((50_256, 50_256, None), (None, None, None), (None, None, None)),  # outside of the vocabulary
        (([30, 50_256], None, 5), (30, None, None), (30, None, 5)),
    ],
)
def test_ids_of_special_tokens(tmp_path: Path, given: tuple, tokenizer: tuple, kept: tuple) -> None:
    model, toy = tiny_model(), ToyTokenizer()
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    for name, value in zip(names, given, strict=True):
        setattr(model.config, name, value)
    toy.eos_id, toy.bos_id, toy.pad_id = tokenizer
    folder = save_model(model, tmp_path / "m", toy, {})  # type: ignore[arg-type]
    config = load_config(folder)
    assert tuple(getattr(config, name) for name in names) == kept
    assert read_json(folder / "generation_config.json").get("eos_token_id") == kept[0]


def test_a_pause_is_never_generated(tmp_path: Path) -> None:
    """Also by plain transformers: its weights would choose it."""
    model, toy = tiny_model(tie_embeddings=False), ToyTokenizer()
    toy.pause_id = 7
    with torch.no_grad():
        model.head.weight[7] *= 9
    loaded = BraidForCausalLM.from_pretrained(save_model(model, tmp_path / "m", toy, {}))  # type: ignore[arg-type]
    ids = random_ids(8, 5)
    assert 7 in loaded(ids).logits[:, -1].argmax(-1)
    assert 7 not in loaded.generate(ids, max_new_tokens=12, do_sample=False)[:, 5:]


def test_weights_are_one_file_whatever_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    save = BraidForCausalLM.save_pretrained

    def spy(self: Any, folder: Any, **options: Any) -> None:
        asked.update(options)
        save(self, folder, **options)

    monkeypatch.setattr(BraidForCausalLM, "save_pretrained", spy)
    save_model(tiny_model(), tmp_path / "m", None, {})
    assert asked == {"max_shard_size": "1000TB"}


def test_plain_transformers_reads_it(good: Path) -> None:
    ids = random_ids(1, 5)
    assert torch.equal(BraidForCausalLM.from_pretrained(good)(ids).logits, load_model(good)(ids).logits)


def test_a_folder_is_not_overwritten_unless_asked(folder: Path) -> None:
    with pytest.raises(BraidError, match="this folder exists already"):
        save_model(tiny_model(), folder, None, {})
    save_model(tiny_model(seed=5), folder, None, {"made_by": "another"}, replace=True)
    assert not (folder / "tokenizer.json").exists()
    assert load_lineage(folder)["made_by"] == "another"  # type: ignore[index]


def test_what_is_no_model_folder_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"{tmp_path}: this is not a model folder (no config.json)"
    assert refused(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: this is not a model folder (no config.json)"


def test_a_configuration_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert refused(tmp_path) == f"{tmp_path}: this is not a model folder (its config.json has no model_type)"
    (tmp_path / "config.json").write_text("[1]")
    assert refused(tmp_path) == f"{tmp_path / 'config.json'}: expected an object, found a list"


def test_another_kind_of_model_is_sent_to_convert(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    text = refused(tmp_path)
    assert text.startswith(f"{tmp_path}: this folder holds a 'gpt2' model, not a Braid model\n")
    assert f"braid convert {tmp_path} --from gpt2 --out DIR" in text
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert "\nBraid imports models of type gpt2, llama, " in refused(tmp_path)


def test_what_convert_reads_is_known_here() -> None:
    from braidlm.opening.convert import folder_formats

    assert folder_formats() == folders.IMPORTABLE


@pytest.mark.parametrize(
    ("name", "nearest"), [("banana", "There are: geglu, mlp, swiglu."), ("mlp2", "Did you mean 'mlp'?")]
)
def test_a_part_of_another_package_is_asked_for(folder: Path, name: str, nearest: str) -> None:
    path = folder / "config.json"
    config = read_json(path)
    config["architecture"]["stages"][1]["block"]["feed"] = {"kind": name}
    path.write_text(json.dumps(config))
    text = refused(folder)
    assert f"stages[1].block.feed: unknown feed-forward '{name}'. {nearest}" in text
    assert text.count("needs that package installed (entry point 'braidlm.parts')") == 1


def test_a_broken_configuration_is_named_with_its_file(folder: Path) -> None:
    path = folder / "config.json"
    config = read_json(path)
    config["architecture"]["stages"][1]["block"]["attention"]["haeds"] = 4
    path.write_text(json.dumps(config))
    text = refused(folder)
    assert text.startswith(f"{path}: this configuration cannot be read:\n")
    assert text.endswith("stages[1].block.attention: unknown key 'haeds'. Did you mean 'heads'?")
    path.write_text('{"model_type": ')
    assert "this is not valid JSON" in refused(folder)


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refused(folder) == f"{folder}: the folder has no model.safetensors"


@pytest.mark.parametrize("damage", ["empty", "truncated", "no header"])
def test_damaged_weights_are_recognised(folder: Path, damage: str) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "truncated": whole[:-10], "no header": b"\xff" * 200}[damage])
    text = refused(folder)
    assert text.startswith(f"{folder}: model.safetensors is damaged (")
    assert text.endswith("Use another copy.")


QKV = "model.stages.0.layers.0.attention.qkv.weight"


def change(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(QKV))
    assert refused(folder) == (
        f"{folder}: the weights do not fit the configuration: missing {QKV} [48, 16]\n"
        "config.json and model.safetensors must come from the same model."
    )


def test_a_left_over_tensor_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update(extra=torch.zeros(2, 3)))
    assert "the weights do not fit the configuration: left over extra [2, 3]" in refused(folder)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({QKV: torch.zeros(40, 16)}))
    assert f"{QKV} is [40, 16], the configuration says [48, 16]" in refused(folder)


def test_many_problems_are_counted(folder: Path) -> None:
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors)[1:]])
    text = refused(folder)
    assert text.count("missing") == 5
    assert "; and " in text
    assert " more\n" in text


def test_a_checkpoint_of_another_shape_is_refused(folder: Path, tmp_path: Path) -> None:
    other = save_model(tiny_model(width=32), tmp_path / "other", None, {})
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    assert "the weights do not fit the configuration: model.embedding.weight is [37, 32]" in refused(folder)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(BraidError) as caught:
        save_model(tiny_model(), tmp_path / "m", ToyTokenizer(words=50), {})
    assert str(caught.value) == (
        "m: the model has a vocabulary of 37, the tokenizer has 51 tokens\n"
        "Leave out model.vocab_size (it is taken from the tokenizer), or use the tokenizer the model was made for."
    )
    assert list(tmp_path.iterdir()) == []
    save_model(tiny_model(), tmp_path / "padded", ToyTokenizer(words=20), {})


FULL = {
    "weights": (
        "save_pretrained",
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ),
    "other files": ("save_pretrained", OSError(28, "No space left on device")),
    "lineage": ("write_json", OSError(28, "No space left on device")),
}


@pytest.mark.parametrize("stage", FULL)
@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacing"])
def test_a_full_disk_while_saving_is_explained_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, existing: bool
) -> None:
    name, error = FULL[stage]
    target = tmp_path / "m"
    if existing:
        save_model(tiny_model(), target, None, {"made_by": "before"})

    def full(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(BraidForCausalLM if name == "save_pretrained" else folders, name, full)
    with pytest.raises(BraidError) as caught:
        save_model(tiny_model(seed=1), target, ToyTokenizer(), {}, replace=existing)
    assert str(caught.value) == (
        f"{target}: the disk is full; nothing was written\nFree some space and run the same command again."
    )
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == ([target] if existing else [])
    if existing:
        assert load_lineage(target)["made_by"] == "before"  # type: ignore[index]
        load_model(target)


def test_another_error_of_safetensors_is_not_disguised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("something else")

    monkeypatch.setattr(BraidForCausalLM, "save_pretrained", broken)
    with pytest.raises(SafetensorError, match="something else"):
        save_model(tiny_model(), tmp_path / "m", None, {})
    assert list(tmp_path.iterdir()) == []
