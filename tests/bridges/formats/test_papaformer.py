"""The PaPaformer authors' checkpoints of any structure: the logits of their code, from safetensors and .pt files."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from braidlm.bridges.bridge import bridges
from braidlm.bridges.model_info import ModelInfo
from braidlm.cli import main as command
from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.folders import load_config, load_lineage, load_model
from braidlm.model.routing.losses import load_balance_as_coded, token_entropy_as_coded
from braidlm.opening.convert import convert
from tests.bridges.papaformer_models import Tensors, dense_tensors, reference_logits, whole_tensors
from tests.reference import REFERENCE
from tests.without_braid import run_without_braid

VARIANTS = {"share-linear": "shared_linear", "gumbel-v1": "gumbel_v1", "gumbel-v2": "gumbel_v2"}
TOLERANCE = 1e-4
STRUCTURE = {
    "dim": 24,
    "n_heads": 3,
    "path_dim": 8,
    "path_heads": 2,
    "parallel_layers": 2,
    "paths": 3,
    "ffn_multiplier": 3,
}
IDS = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(1))

SCRIPT = """
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

reference, out = map(Path, sys.argv[1:3])
found = {}
for name in sys.argv[3:]:
    model = AutoModelForCausalLM.from_pretrained(out / name, trust_remote_code=True)
    ids = load_file(reference / f"papaformer-{name}.io.safetensors")["input_ids"]
    with torch.no_grad():
        found[name + ".logits"] = model(ids).logits.contiguous()
    for cached in (True, False):
        prompt = {"input_ids": ids[:1, :4], "attention_mask": torch.ones(1, 4, dtype=torch.long)}
        text = model.generate(**prompt, max_new_tokens=8, do_sample=False, use_cache=cached)
        found[f"{name}.generated.{cached}"] = text
assert not any(module.split(".")[0] == "braidlm" for module in sys.modules)
save_file(found, out / "found.safetensors")
"""


@pytest.fixture(autouse=True)
def _this_verb_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "VERBS", ("convert",))


def braid_convert(*words: object) -> int:
    """`braid convert ...` in this process; the exit code."""
    return command.main(["convert", *map(str, words)])


def saved(folder: Path, tensors: Tensors, config: dict | None = None, pickled: object = None) -> list[object]:
    """A checkpoint as files, and the words of the command that imports it to `folder`/out."""
    folder.mkdir(exist_ok=True)
    path = folder / ("x.weights.safetensors" if pickled is None else "x.pt")
    save_file(tensors, path) if pickled is None else torch.save(pickled, path)
    words: list[object] = [path, "--from", "papaformer", "--out", folder / "out"]
    if config is not None:
        (folder / "x.config.json").write_text(json.dumps(config))
        words += ["--config", folder / "x.config.json"]
    return words


@torch.no_grad()
def largest_difference(folder: Path, tensors: Tensors, heads: int, path_heads: int = 1) -> tuple[float, set[int]]:
    """The largest difference between the logits of a folder and of the slow reference, and the routers' choices."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    logits, chosen = [], set()
    for text in IDS:
        found, choices = reference_logits(tensors, text, heads, path_heads)
        logits.append(found)
        chosen |= set(choices)
    expected = torch.stack(logits)
    assert expected.abs().max() > 1, "logits near zero would prove nothing"
    return (model(IDS).logits - expected).abs().max().item(), chosen


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three models of the reference, each imported by the command."""
    out = tmp_path_factory.mktemp("papaformer")
    for name in VARIANTS:
        start = REFERENCE / f"papaformer-{name}"
        words = [f"{start}.weights.safetensors", "--from", "papaformer", "--config", f"{start}.config.json"]
        assert braid_convert(*words, "--out", out / name) == 0
    return out


def test_the_authors_logits_where_braid_is_not_installed(fixtures: Path) -> None:
    run_without_braid(SCRIPT, REFERENCE, fixtures, *VARIANTS)
    found = load_file(fixtures / "found.safetensors")
    for name in VARIANTS:
        expected = load_file(REFERENCE / f"papaformer-{name}.io.safetensors")["logits"]
        assert (found[f"{name}.logits"] - expected).abs().max() <= TOLERANCE, name
        cached, uncached = found[f"{name}.generated.True"], found[f"{name}.generated.False"]
        assert cached.shape[1] > 4
        assert cached.tolist() == uncached.tolist(), name


@pytest.mark.parametrize("name", ["gumbel-v1", "gumbel-v2"])
@torch.no_grad()
def test_the_authors_auxiliary_losses(fixtures: Path, name: str) -> None:
    io = load_file(REFERENCE / f"papaformer-{name}.io.safetensors")
    routings = load_model(fixtures / name)(io["input_ids"]).routings
    assert len(routings) == 3
    real = torch.ones_like(io["input_ids"])
    for loss, total in ((token_entropy_as_coded, "entropy_total"), (load_balance_as_coded, "load_total")):
        assert sum(loss(routing, real) for routing in routings).item() == pytest.approx(io[total].item(), abs=1e-5)
    assert io["load_total"] > 0.1, "routers that choose one thing only would prove little"


@pytest.mark.parametrize(("name", "join"), VARIANTS.items())
def test_what_is_written(fixtures: Path, name: str, join: str) -> None:
    config = load_config(fixtures / name)
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id) == (83, 82, None)
    kinds = [next(iter(stage)) for stage in config.architecture["stages"]]
    assert kinds == ["block", "project", "parallel", "block"]
    parallel = config.architecture["stages"][2]["parallel"]
    assert [path["name"] for path in parallel["paths"]] == ["path_1", "path_2"]
    assert parallel["join"]["kind"] == join
    weights = REFERENCE / f"papaformer-{name}.weights.safetensors"
    lineage = load_lineage(fixtures / name)
    assert lineage["made_by"] == "convert from papaformer"
    assert lineage["sources"][0]["weights"] == [{"file": weights.name, "sha256": sha256_of(weights)}]
    assert lineage["tokenizer"] is None


@pytest.mark.parametrize("name", VARIANTS)
def test_mappings_lead_back_to_the_same_bits(fixtures: Path, name: str) -> None:
    info = ModelInfo(load_config(fixtures / name))
    ours = load_file(fixtures / name / "model.safetensors")
    back = {
        theirs: part
        for mapping in bridges["papaformer"]().checked_mappings(info)
        for theirs, part in mapping.to_foreign(ours[mapping.braid]).items()
    }
    theirs = load_file(REFERENCE / f"papaformer-{name}.weights.safetensors")
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)


STRUCTURES = {
    "three paths": {},
    "one layer": {"parallel_layers": 1, "ffn_multiplier": 2},
    "paths as wide as the stream": {"path_dim": 24, "path_heads": 4},
    "four heads": {"dim": 32, "n_heads": 4, "path_dim": 12, "path_heads": 1, "paths": 2, "parallel_layers": 4},
}


@pytest.mark.parametrize("join", VARIANTS.values())
@pytest.mark.parametrize("changes", STRUCTURES.values(), ids=STRUCTURES)
def test_any_structure(tmp_path: Path, join: str, changes: dict) -> None:
    structure = STRUCTURE | changes
    sizes = {"dim": structure["dim"], "path_dim": structure["path_dim"], "paths": structure["paths"]}
    tensors = whole_tensors(join, **sizes, layers=structure["parallel_layers"], multiplier=structure["ffn_multiplier"])
    assert braid_convert(*saved(tmp_path, tensors, structure)) == 0
    difference, chosen = largest_difference(tmp_path / "out", tensors, structure["n_heads"], structure["path_heads"])
    assert difference <= TOLERANCE
    assert join == "shared_linear" or len(chosen) > 1, "a router that never chooses would prove little"
    assert load_config(tmp_path / "out").pad_token_id is None


def test_one_path(tmp_path: Path) -> None:
    tensors = whole_tensors("shared_linear", paths=1)
    assert braid_convert(*saved(tmp_path, tensors, {"n_heads": 3, "path_heads": 2})) == 0
    assert largest_difference(tmp_path / "out", tensors, 3, 2)[0] <= TOLERANCE
    gumbel = saved(tmp_path / "gumbel", whole_tensors("gumbel_v1", paths=1), {"n_heads": 3, "path_heads": 2})
    with pytest.raises(BraidError, match="the tensors do not tell which Gumbel join this is"):
        convert(gumbel[0], tmp_path / "no", from_="papaformer", config=gumbel[-1])


def test_other_constants_are_taken_over(tmp_path: Path) -> None:
    constants = {"rms_eps": 0.01, "rope_theta": 500.0, "vocab_size": 31, "pad_id": 30}
    assert braid_convert(*saved(tmp_path, whole_tensors("gumbel_v2"), STRUCTURE | constants)) == 0
    config = load_config(tmp_path / "out")
    assert config.pad_token_id == 30
    positions = {"kind": "rope", "theta": 500.0, "pairs": "interleaved", "scaling": None}
    assert config.architecture["positions"] == positions
    assert config.architecture["norm"]["eps"] == config.architecture["stages"][2]["parallel"]["paths"][2]["norm"]["eps"]
    assert config.architecture["norm"]["eps"] == 0.01


def _wrapped(tensors: Tensors) -> Tensors:
    return {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()}


PICKLED = {
    "a state dict": lambda tensors: tensors,
    "of parameters": lambda tensors: {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()},
    "of data parallel training": _wrapped,
    "under model_state_dict": lambda tensors: {
        "epoch": 3,
        "ema": tensors,
        "model_state_dict": _wrapped(tensors),
        "optimizer_state_dict": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
    },
    "under state_dict": lambda tensors: {"state_dict": tensors, "best": 1.5},
    "under model": lambda tensors: {"model": tensors, "ema": tensors},
    "under a key of its own": lambda tensors: {"weights": tensors, "note": "the best one"},
}


@pytest.mark.parametrize("pickled", PICKLED.values(), ids=PICKLED)
def test_paths_from_pt_files(tmp_path: Path, pickled) -> None:
    tensors = dense_tensors()
    assert braid_convert(*saved(tmp_path, tensors, {"n_heads": 2}, pickled(tensors))) == 0
    assert largest_difference(tmp_path / "out", tensors, 2)[0] <= TOLERANCE
    stages = load_config(tmp_path / "out").architecture["stages"]
    assert [list(stage) for stage in stages] == [["block"]]
    assert stages[0]["block"]["layers"] == 3
    assert load_lineage(tmp_path / "out")["sources"][0]["weights"][0]["sha256"] == sha256_of(tmp_path / "x.pt")


DENSE_CONFIGS = {
    "heads of a path": {"path_heads": 4},
    "its own": {"dim": 16, "n_heads": 4, "n_layers": 3, "ffn_multiplier": 2.5, "vocab_size": 31},
    "that of the model it is a path of": {
        "dim": 32,
        "n_heads": 2,
        "path_dim": 16,
        "path_heads": 4,
        "parallel_layers": 3,
        "paths": 2,
    },
    "of a path alone": {"path_dim": 16, "path_heads": 4},
    "both alike": {"n_heads": 4, "path_heads": 4},
}


@pytest.mark.parametrize("config", DENSE_CONFIGS.values(), ids=DENSE_CONFIGS)
def test_configurations_of_paths(tmp_path: Path, config: dict) -> None:
    assert braid_convert(*saved(tmp_path, dense_tensors(), config, dense_tensors())) == 0
    assert largest_difference(tmp_path / "out", dense_tensors(), 4)[0] <= TOLERANCE


def test_a_whole_model_from_a_pt_file_in_half_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in whole_tensors("gumbel_v2").items()}
    assert braid_convert(*saved(tmp_path, tensors, STRUCTURE, {"model": tensors})) == 0
    captured = capsys.readouterr()
    assert "note: the weights are bfloat16; they are written as float32" in captured.out
    assert "x.pt: a file of weights has no tokenizer; the result has no tokenizer" in captured.err
    assert largest_difference(tmp_path / "out", tensors, 3, 2)[0] <= TOLERANCE


def test_a_head_that_shares_memory_with_the_embedding(tmp_path: Path) -> None:
    tensors = dense_tensors()
    tensors["Linear.linear.weight"] = tensors["embeddings.weight"]
    assert braid_convert(*saved(tmp_path, tensors, {"n_heads": 2}, tensors)) == 0
    assert largest_difference(tmp_path / "out", tensors, 2)[0] <= TOLERANCE


def test_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = saved(tmp_path, whole_tensors("gumbel_v1"), STRUCTURE)
    assert braid_convert(*words, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "PaPaformer to Braid: 85 tensors of theirs, 37 of ours, 21,280 parameters" in out
    assert (
        "2 x layers.*.blocks.{0,1,2}.attention.{Q,K,V}.linear.weight -> "
        "model.stages.*.layers.*.stack.*.attention.qkv.weight (3 stacked, for each of 3 members)"
    ) in out
    assert "1 x layers.*.out_linear.linear.weight -> model.stages.*.layers.*.join.out.weight" in out
    assert "note: the files do not say how long texts may be; 256 tokens, the paper's length, are written" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.config.json", "x.weights.safetensors"]


class Evil:
    """What a pickle can do to those who open it."""

    def __reduce__(self):
        return os.mkdir, ("opened",)


class Settings:
    """Something harmless that a training script saved along."""


def _torch_saved(content: object):
    return lambda path: torch.save(content, path)


BAD_FILES = {
    "evil": (
        _torch_saved({"model_state_dict": dense_tensors(), "extra": Evil()}),
        ["x.pt: this pickle holds objects other than tensors (", ".mkdir), which may run any code when opened"],
    ),
    "a class": (
        _torch_saved({"model_state_dict": dense_tensors(), "config": Settings()}),
        [".Settings), which may run any code when opened; Braid does not open it", "save its state dict alone"],
    ),
    "a module": (_torch_saved(torch.nn.Linear(2, 2)), ["(torch.nn.modules.linear.Linear)"]),
    "text": (lambda path: path.write_text("hello"), ["x.pt: this file is damaged, or torch.save did not write it"]),
    "cut off": (
        lambda path: path.write_bytes(_cut(path)),
        ["x.pt: this file is damaged, or torch.save did not write it", "Download or copy it again."],
    ),
    "no tensors": (
        _torch_saved({"epoch": 3, "optimizer": {"lr": 0.1}}),
        ["which tensors are the model's is not clear in this file: it holds 'epoch' (int), 'optimizer' (dict)"],
    ),
    "a list": (_torch_saved([torch.ones(2)]), ["it holds one list"]),
    "two models": (
        _torch_saved({"first": dense_tensors(), "second": dense_tensors()}),
        ["it holds 'first' (dict), 'second' (dict)", "Save the model's state dict alone, or under 'model_state_dict'."],
    ),
    "two names": (
        _torch_saved(dense_tensors() | {"module.norm.weight": torch.ones(16)}),
        ["x.pt: two tensors are called 'norm.weight'"],
    ),
    "whole numbers": (
        _torch_saved(dense_tensors() | {"norm.weight": torch.ones(16, dtype=torch.int64)}),
        ["norm.weight is of type int64, not a plain floating point type"],
    ),
    "another model": (
        _torch_saved({"wte.weight": torch.ones(4, 4)}),
        ["x.pt: this is not a PaPaformer checkpoint: it has no embeddings.weight; its tensors are wte.weight"],
    ),
}


def _cut(path: Path) -> bytes:
    torch.save(dense_tensors(), path)
    return path.read_bytes()[:-300]


@pytest.mark.parametrize(("write", "texts"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_pt_files(tmp_path: Path, monkeypatch, capsys, write, texts: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = saved(tmp_path, {}, {"n_heads": 2}, {})
    write(tmp_path / "x.pt")
    assert braid_convert(*words) == 2
    err = capsys.readouterr().err
    assert [text for text in texts if text not in err] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.config.json", "x.pt"]


def _without(name: str):
    return lambda tensors: tensors.pop(name)


def _with(name: str, *shape: int):
    return lambda tensors: tensors.update({name: torch.ones(shape)})


BAD_TENSORS = {
    "left over": (
        _with("layers.1.extra.weight", 2, 3),
        [
            "the weights are not those of a PaPaformer of 2 parallel layers with 3 paths, joined by gumbel_v2:",
            "left over layers.1.extra.weight [2, 3]",
            "Weights and configuration must come from the same model.",
        ],
    ),
    "missing": (_without("layers.2.blocks.1.norm_2.weight"), ["missing layers.2.blocks.1.norm_2.weight [8]"]),
    "no end": (_without("layers.2.out_linear.linear.weight"), ["missing layers.2.out_linear.linear.weight [24, 8]"]),
    "misshaped": (_with("layers.0.block.feedforward.beta", 72), ["beta is [72], expected [1, 72]"]),
    "mixed joins": (
        _with("layers.2.MoE.router.weight", 4, 8),
        ["layers.2.MoE.router.weight is [4, 8], expected [4, 24]"],
    ),
    "no join": (
        _with("layers.1.MoE.router.weight", 4, 9),
        ["x.weights.safetensors: layers.1.MoE.router.weight is [4, 9]: it reads neither the combination of the paths"],
    ),
    "no vocabulary": (
        _without("embeddings.weight"),
        ["this is not a PaPaformer checkpoint: it has no embeddings.weight"],
    ),
    "a vector": (_with("embeddings.weight", 31), ["embeddings.weight is [31], not a matrix"]),
}


@pytest.mark.parametrize(("spoil", "texts"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors(tmp_path: Path, capsys, spoil, texts: list[str]) -> None:
    tensors = whole_tensors("gumbel_v2")
    spoil(tensors)
    assert braid_convert(*saved(tmp_path, tensors, STRUCTURE)) == 2
    err = capsys.readouterr().err
    assert [text for text in texts if text not in err] == []
    assert not (tmp_path / "out").exists()


BAD_CONFIGS = {
    "unknown key": ({"n_head": 3}, ["x.config.json: unknown key 'n_head'. Did you mean 'n_heads'?"]),
    "wrong type": ({"dim": "24"}, ["x.config.json: dim: expected a whole number from 1 to"]),
    "everything": (
        {"dim": 32, "path_dim": 16, "paths": 2, "parallel_layers": 3, "vocab_size": 30, "ffn_multiplier": 4},
        [
            "x.config.json: this configuration contradicts the tensors of x.weights.safetensors:",
            "dim is 32, the tensors say 24",
            "path_dim is 16, the tensors say 8",
            "paths is 2, the tensors say 3",
            "parallel_layers is 3, the tensors say 2",
            "vocab_size is 30, the tensors say 31",
            "ffn_multiplier is 4, the tensors have 72 channels inside for a width of 24",
        ],
    ),
    "dense": ({"n_layers": 8}, ["n_layers is 8, the tensors are those of a PaPaformer of 2 parallel layers"]),
    "pad": ({"pad_id": 31}, ["pad_id is 31, the embedding has 31 rows"]),
    "no heads": ({"n_heads": None}, ["the tensors do not say how many heads attention has (n_heads)", "32 channels"]),
    "odd heads": ({"path_heads": 8}, ["path_heads is 8: a width of 8 does not divide into heads of an even size"]),
    "zero heads": ({"n_heads": 0}, ["n_heads: expected a whole number from 1 to 1024, got 0"]),
    "output": ({"attention_output_projection": True}, ["attention_output_projection is true; PaPaformer's"]),
    "positions": ({"rope_style": "half"}, ["rope_style: 'half' is not one of interleaved pairs"]),
}


@pytest.mark.parametrize(("changes", "texts"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_bad_configurations(tmp_path: Path, capsys, changes: dict, texts: list[str]) -> None:
    assert braid_convert(*saved(tmp_path, whole_tensors("shared_linear"), STRUCTURE | changes)) == 2
    err = capsys.readouterr().err
    assert [text for text in texts if text not in err] == []
    assert not (tmp_path / "out").exists()


BAD_DENSE_CONFIGS = {
    "no configuration": (None, "x.pt: the tensors do not say how many heads attention has (n_heads)"),
    "without heads": ({"dim": 16}, "x.config.json: the tensors do not say how many heads attention has (n_heads)"),
    "of a whole model": ({"dim": 16, "paths": 2}, "paths is 2, the tensors are those of a path or dense model of 3"),
    "of another path": ({"dim": 32, "path_dim": 8, "path_heads": 2}, "path_dim is 8, the tensors say 16"),
    "without the path's heads": (
        {"dim": 32, "n_heads": 4, "path_dim": 16},
        "how many heads attention has (path_heads)",
    ),
    "of another depth": ({"n_heads": 2, "n_layers": 5}, "n_layers is 5, the tensors say 3"),
    "of two meanings": ({"n_heads": 2, "path_heads": 4}, "n_heads and path_heads differ, and no width says which"),
    "a list": ([1], "x.config.json: expected an object, found a list"),
}


@pytest.mark.parametrize(("config", "text"), BAD_DENSE_CONFIGS.values(), ids=BAD_DENSE_CONFIGS)
def test_bad_configurations_of_paths(tmp_path: Path, capsys, config, text: str) -> None:
    assert braid_convert(*saved(tmp_path, {}, config, dense_tensors())) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_wrong_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, *_ = saved(tmp_path, dense_tensors(), {"n_heads": 2})
    config, out = tmp_path / "x.config.json", ["--out", tmp_path / "out"]
    imported = ["--from", "papaformer", *out]
    for words, text in (
        ([weights, *out], "say of which format with `--from`"),
        ([weights, "--from", "llama", *out], "this is a file; give the folder that holds config.json"),
        ([tmp_path, *imported], "this is a folder; give the file of the weights"),
        ([tmp_path / "none.pt", *imported], "none.pt: there is no such file"),
        ([config, *imported], "this is no file of weights that Braid reads (.safetensors, .pt, .pth, .bin, .ckpt)"),
        ([weights, *imported, "--config", tmp_path / "none.json"], "none.json: this file does not exist"),
        ([weights, *imported, "--config", weights], "x.weights.safetensors: this is not UTF-8 text"),
        ([tmp_path, "--from", "gpt2", *out, "--config", config], "goes with `--from` moduleformer, papaformer only"),
        ([weights, "--to", "papaformer", *out], "Braid reads PaPaformer and does not write it; it writes gguf, gpt2"),
    ):
        assert braid_convert(*words) == 2, text
        assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
