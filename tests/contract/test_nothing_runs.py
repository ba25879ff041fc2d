"""Folders and recipes of a stranger: whatever code they bring along, none of it is run."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from braidlm.cli.main import main
from braidlm.core.files import write_json
from braidlm.core.models.folders import save_model
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.build import bytes_tokenizer
from tests.tiny_models import tiny_model

USES = {
    "show": ("show", "{}"),
    "generate": ("generate", "{}", "a", "--max-tokens", "2", "--device", "cpu"),
    "eval": ("eval", "{}", "bits_per_byte", "--device", "cpu", "--data", "bits_per_byte={}/README.md"),
    "convert": ("convert", "{}", "--out", "{}-out"),
    "compose": ("compose", "{}", "{}", "--out", "{}-out"),
    "routes": ("routes", "{}", "--device", "cpu"),
}


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that exists only if something of the input was run."""
    return tmp_path / "ran"


@pytest.fixture
def code(canary: Path) -> str:
    return f"open({str(canary)!r}, 'w').close()\n"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    tokenizer = bytes_tokenizer()
    return save_model(tiny_model(vocab_size=tokenizer.vocab_size), tmp_path / "ours", tokenizer, {"made_by": "a test"})


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of transformers."""
    tokenizer = bytes_tokenizer()
    config = GPT2Config(vocab_size=tokenizer.vocab_size, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs")
    (tmp_path / "theirs" / "README.md").write_text("Some text to look at.\n")
    return tmp_path / "theirs"


class Runs:
    """Opens a file when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple:
        return open, (str(self.canary), "w")


def bring_modules(folder: Path, code: str, canary: Path) -> None:
    """Modules that auto_map names, and that have the names of those the folder is opened with."""
    for name in ("evil", "modeling_braid", "configuration_braid", "torch", "tokenizers"):
        (folder / f"{name}.py").write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        auto = {auto: f"evil.{auto}" for auto in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")}
        write_json(
            folder / name, read_json(folder / name) | {"auto_map": auto, "custom_pipelines": {"x": {"impl": "evil.X"}}}
        )


def bring_a_template(folder: Path, code: str, canary: Path) -> None:
    """A chat template that reaches for Python's modules."""
    template = "{{ cycler.__init__.__globals__.os.system('touch " + str(canary) + "') }}"
    path = folder / "tokenizer_config.json"
    write_json(path, read_json(path) | {"chat_template": template, "tokenizer_class": "evil.Tokenizer"})
    (folder / "chat_template.jinja").write_text(template)


def bring_pickles(folder: Path, code: str, canary: Path) -> None:
    """Weights as pickles beside the safetensors, and in their place."""
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Runs(canary)))
    torch.save(Runs(canary), folder / "model.bin")


def bring_only_pickles(folder: Path, code: str, canary: Path) -> None:
    bring_pickles(folder, code, canary)
    (folder / "model.safetensors").unlink()


def bring_a_prompt(folder: Path, code: str, canary: Path) -> None:
    """Names in the lineage and the configuration that a shell or a template would run."""
    command = f"$(touch {canary})`touch {canary}`; touch {canary}; {{{{ 1 }}}} ${{oc.env:HOME}}"
    path = folder / "lineage.json"
    lineage = read_json(path) if path.is_file() else {}
    write_json(path, lineage | {"made_by": command, "recipe": {"_target_": "os.system", "command": command}})


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "bring",
    [bring_modules, bring_a_template, bring_pickles, bring_only_pickles, bring_a_prompt],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_a_model_folder_runs_nothing(
    kind: str,
    bring: Callable[[Path, str, Path], None],
    use: str,
    request: pytest.FixtureRequest,
    code: str,
    canary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder: Path = request.getfixturevalue(kind)
    bring(folder, code, canary)
    monkeypatch.chdir(folder)
    assert main([word.replace("{}", str(folder)) for word in USES[use]]) in (0, 2)
    assert not canary.exists()


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.mkdir ['{}']\n",
        "a: !!python/object/new:os.mkdir ['{}']\n",
        "hydra: {{callbacks: {{x: {{_target_: os.mkdir, path: '{}'}}}}}}\n",
        "hydra: {{searchpath: ['pkg://evil']}}\n",
        "_target_: os.mkdir\npath: '{}'\n",
        "name: ${{oc.env:HOME}}\n",
        "name: $(mkdir {})\n",
        "model: {{stages: [block], head: {{kind: os.mkdir, path: '{}'}}}}\n",
    ],
)
@pytest.mark.parametrize("verb", ["show", "train"])
def test_a_recipe_runs_nothing(
    text: str, verb: str, canary: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "evil.py").write_text(code)
    (folder / "mine.yaml").write_text(text.format(canary))
    before = sorted(folder.iterdir())
    monkeypatch.chdir(folder)
    assert main([verb, "mine.yaml"]) == 2
    assert not canary.exists()
    assert sorted(folder.iterdir()) == before


def test_a_tokenizer_folder_runs_nothing(ours: Path, tmp_path: Path, code: str, canary: Path) -> None:
    bring_modules(ours, code, canary)
    bring_a_template(ours, code, canary)
    shutil.copy(ours / "README.md", tmp_path / "text.txt")
    out = tmp_path / "packed"
    assert main(["prepare", str(tmp_path / "text.txt"), "--tokenizer", str(ours), "--out", str(out)]) == 0
    assert not canary.exists()
