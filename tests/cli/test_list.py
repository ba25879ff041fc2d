"""`braid list`, and what must not be imported to answer it."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import braidlm
from braidlm.core.catalogue import attribute_docs, list_options
from braidlm.model.attention.attention import SoftmaxAttention
from braidlm.model.config.registry import PARTS
from braidlm.model.dropout import BlockDropout
from braidlm.model.stages import BlockStage


def test_recipes(braid):
    names = [row["name"] for row in braid("list", "recipes", "--json").json()]
    assert "models/gpt2-28m" in names
    assert "models/stlm-50m" in braid("list", "recipes").out


def test_papers_lead_to_a_recipe_and_a_page(braid):
    rows = braid("list", "papers", "--json").json()
    known = [row["name"] for row in braid("list", "recipes", "--json").json() if row["name"].startswith("papers/")]
    assert [row["command"].removeprefix("braid train ") for row in rows] == known
    assert all((Path(__file__).parents[2] / row["page"]).is_file() for row in rows)
    shown = braid("list", "papers").out
    assert "docs/papers/self-moe.md" in shown


def test_parts_are_all_that_is_registered(braid):
    rows = braid("list", "parts", "--json").json()
    assert {(r["kind"], r["name"]) for r in rows} == {(kind, name) for kind, reg in PARTS.items() for name in reg}
    assert all(row["about"] for row in rows)
    rope = next(row for row in rows if row["name"] == "rope")
    assert rope["options"][0] == {
        "name": "theta",
        "default": 10000.0,
        "required": False,
        "about": "Base of the wavelengths.",
    }
    shown = braid("list", "parts").out
    assert "kv_heads" in shown
    assert "Query heads." in shown


def test_help_text_comes_from_under_the_attributes():
    docs = attribute_docs(SoftmaxAttention.Config)
    assert docs["heads"] == "Query heads."
    inherited = {option["name"]: option for option in list_options(BlockStage.Config)}
    assert inherited["layers"]["about"] == "Number of blocks in a row."
    assert inherited["norm"] == {
        "name": "norm",
        "default": "rms",
        "required": False,
        "about": "Before attention and before feed-forward.",
    }
    assert inherited["dropout"]["default"]["attention"] == 0.0
    assert inherited["dropout"]["default"].keys() == {field.name for field in fields(BlockDropout)}


def test_data(braid):
    rows = {row["name"]: row for row in braid("list", "data", "--json").json()}
    assert rows["stories"]["kind"] == rows["maths"]["kind"] == "corpus"
    assert ".jsonl" in rows["jsonl"]["files"]
    assert "hub:NAME" in braid("list", "data").out


@pytest.mark.parametrize(
    ("what", "text"),
    [("recipe", "Did you mean 'recipes'?"), ("xyz", "There are: data, papers, parts, recipes, tasks.")],
)
def test_unknown_lists(braid, what: str, text: str):
    shown = braid("list", what)
    assert shown.code == 2
    assert f"there is no list of '{what}'. {text}" in shown.err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["list", "recipes"], ["list", "data"], ["show", "--help"], ["eval", "--help"]]
)
def test_light_commands_import_no_torch(arguments: list[str]):
    code = (
        "import sys, contextlib, braidlm, braidlm.cli.main as command\n"
        "command.VERBS = ('eval', 'generate', 'show', 'list')\n"
        f"with contextlib.suppress(SystemExit): command.main({arguments})\n"
        "heavy = {'torch', 'transformers', 'hydra', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_tasks_are_listed_without_torch(tmp_path: Path):
    (tmp_path / "blimp").mkdir()
    code = (
        "import sys, braidlm.cli.main as command\n"
        f"command.main(['list', 'tasks', '--json', '--data', {str(tmp_path)!r}])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'scipy', 'lm_eval'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}: import it where it is needed' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["blimp"]["data"] == str(tmp_path / "blimp")
    assert rows["blimp_fast"]["data"] is None
    assert rows["blimp_fast"]["suites"] == ["babylm_fast"]
    assert "osf.io" in rows["blimp_fast"]["fetch"]
    assert "osf -p ryjfm clone DATA" in rows["blimp_fast"]["fetch"]
    for row in rows.values():
        assert all(row[fact] for fact in ("description", "size", "licence", "metric"))


def test_tasks_for_people(braid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "blimp").mkdir()
    monkeypatch.setenv("BRAID_DATA", str(tmp_path))
    shown = " ".join(braid("list", "tasks").out.split())
    assert "blimp here BLiMP as published: is the grammatical sentence" in shown
    assert "blimp_fast not here a fifth of BLiMP" in shown
    assert "67 sets of 200 pairs; licence: CC BY 4.0 (BLiMP), Apache 2.0 (BabyLM's files); in babylm_fast" in shown
    assert "bits_per_byte yours" in shown
    assert "babylm_fast (7 tasks)" in shown
    assert "`braid eval MODEL TASK` says how to get what is missing" in shown
    assert "--data is for `braid list tasks`, not for parts" in braid("list", "parts", "--data", tmp_path).err


ABSENT = {
    "compose A B --out x": "A: there is no such folder",
    "edit prune ./A --keep 0.5": "A: there is no such folder",
    "eval A/B bits_per_byte": "A/B: there is no such folder",
    "eval A bits_per_byte": "there is no model folder and no task 'A'",
    "routes A": "A: there is no such folder",
    "generate A text": "A: there is no such folder",
    "generate --models A --prompts file": "A: there is no such folder",
    "serve A": "A: there is no such folder",
    "chat A": "A: there is no such folder",
    "compare A B": "there is no recipe 'A'.",
    "compare A B --text file": "A: there is no such folder",
    "convert ./A --to gguf --out x": "A: there is no such folder",
    "push A name": "A: there is no such folder",
    "show A": "there is no recipe and no folder 'A'.",
    "show tiny/llama A": "there is no recipe and no folder 'A'.",
    "train A": "there is no recipe 'A'.",
    "train A lr=1,2 --multirun": "there is no recipe 'A'.",
    "train tiny/llama [": "Overrides are written key=value",
    "prepare A --out x": "A: there is no such file, folder or corpus.",
}
"""Commands that name something that is not there, with what they say."""


RUNS_MODELS = {"transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "sympy", "scipy"}
"""What takes seconds to import, and what only reads and counts has no need of."""


def test_verbs_import_what_they_need_when_they_need_it(tmp_path: Path, run_folder: Path):
    code = (
        "import contextlib, io, sys, braidlm.cli.main as command\n"
        f"for line, message in {ABSENT}.items():\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "        assert command.main(line.split()) == 2, line\n"
        "    assert message in said.getvalue(), (line, said.getvalue())\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), f'{line} imports what it does not need'\n"
        f"for name in ('tiny/llama', {str(run_folder)!r}, {str(run_folder / 'checkpoints/step-9')!r}):\n"
        "    assert command.main(['show', name]) == 0\n"
        "    from torch import version\n"
        f"    heavy = ({RUNS_MODELS} | (set() if version.cuda or version.hip else {{'triton'}})) & set(sys.modules)\n"
        "    assert not heavy, f'show {name} imports {heavy}'\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_package_knows_its_verbs():
    code = (
        "import sys, braidlm\n"
        "assert 'torch' not in sys.modules and 'show' in dir(braidlm)\n"
        "assert callable(braidlm.load_tokenizer) and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(map(callable, (braidlm.generate, braidlm.show, braidlm.load_model)))
    with pytest.raises(AttributeError, match="nothing"):
        _ = braidlm.nothing
