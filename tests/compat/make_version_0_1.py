"""Writes the folders in `version_0_1.tar.xz`: run once, with version 0.1.0, and kept to say how they were made.

    PYTHONPATH=src python tests/compat/make_version_0_1.py OUT

OUT gets parts/NAME (a model of every registered part), edited/NAME (what edits and compositions made), runs/NAME (each
stopped in the middle, with the weights that version 0.1.0 reached at its end), a study and packed data. `expected`
files hold the logits of the same tokens.
"""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from braidlm.cli.main import main
from braidlm.core.models.folders import load_model, save_model
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.registry import PARTS, import_files
from braidlm.model.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.contract.part_variants import architecture
from tests.tiny_models import randomised

BLOCK = {"norm": "rms", "attention": {"heads": 2}, "feed": {"kind": "swiglu", "hidden": 16}}
MODEL: dict[str, Any] = {
    "width": 16,
    "context": 32,
    "positions": "rope",
    "block": BLOCK,
    "stages": [{"block": {"layers": 2}}],
}
EXPERTS = BLOCK | {
    "feed": {"kind": "mlp", "hidden": 8, "experts": {"names": 4, "router": {"top_k": 2, "losses": {"switch": 0.1}}}}
}
MODULES = MODEL | {
    "block": EXPERTS | {"attention": {"kind": "stick_breaking", "heads": 2, "experts": {"names": 3, "keys": "shared"}}}
}
PATHS = MODEL | {
    "stages": [
        "block",
        {"project": {"to": 8}},
        {
            "parallel": {
                "layers": 2,
                "paths": ["stories", "maths"],
                "attention": {"heads": 2},
                "join": "gumbel_v1",
                "to": 16,
            }
        },
    ]
}
MOEP = MODEL | {
    "stages": [
        "block",
        {"project": {"to": 8, "bias": True, "experts": {"names": 3}}},
        {"parallel": {"layers": 2, "paths": 3, "attention": {"heads": 2}, "join": {"kind": "routed", "top_k": 2}}},
        {"project": {"to": 16, "bias": True, "experts": {"names": 3}}},
    ]
}
RUNS: dict[str, dict[str, Any]] = {
    "dense": {
        "model": MODEL,
        "training": {"average": {"kind": "ema", "rate": 0.9}, "lengths": [{"length": 16, "until": 0.5}]},
    },
    "other": {"model": MODEL, "seed": 4, "training": {"optimizer": {"kind": "muon", "lr": 1e-2}}},
    "moep": {
        "model": MOEP | {"dropout": {"residual": 0.1}},
        "training": {"dropout": "linear", "average": {"kind": "last", "share": 0.5}},
    },
    "paths": {"model": PATHS, "training": {"temperature": {"kind": "linear", "final": 0.5}}},
    "memory": {"model": MODEL, "training": {"memory": 16}, "data": {"chunking": {"kind": "consecutive"}}},
    "modules": {"model": MODULES},
    "losses": {
        "model": MODEL | {"dropout": {"layer": 0.1}, "stages": [{"block": {"layers": 3}}]},
        "training": {"losses": [{"early_exit": {}}, {"next_sentence": {}}]},
    },
    "pauses": {"model": MODEL, "data": {"pauses": 0.1}},
    "masked": {"model": MODEL, "training": {"losses": [{"masked": {}}]}},
}
STUDY: dict[str, Any] = {
    "name": "study",
    "out": "study",
    "domains": {
        "stories": {"source": "stories", "documents": 40, "holdout": 0.1},
        "maths": {"source": "maths", "documents": 40, "holdout": 0.1},
    },
    "data": {"length": 32, "tokenizer": {"kind": "bytes"}, "cache": "cache"},
    "epochs": 0.05,
    "paths": {"model": MODEL, "share": 0.5, "epochs": 0.05},
    "composed": {"both": {"join": "gumbel_v1"}},
    "whole": {"dense": {"model": MODEL}},
    "variants": {"grown": {"start": "dense", "domains": ["maths"]}},
    "averages": {"together": {"members": ["dense", "grown"], "seeds": "each"}},
    "training": {"batch": 8, "optimizer": {"lr": 3e-3}},
    "validation": {"every": "5 steps", "tokens": 500},
}
HALF, WHOLE = 3, 6
TOKENS = torch.arange(24).reshape(2, 12) % 7 + 97


def braid(*words: str) -> None:
    assert main([*words]) == 0, words


def expect(folder: Path) -> None:
    """Keep the logits of a model folder beside its weights, and drop the code, which is the same in all."""
    (folder / "modeling_braid.py").unlink(missing_ok=True)
    (folder / "README.md").unlink(missing_ok=True)
    model = load_model(folder)
    with torch.no_grad():
        logits = model(TOKENS % model.config.vocab_size).logits
    save_file({"logits": logits.float().contiguous()}, folder / "expected.safetensors")


def parts(out: Path) -> None:
    import_files("braidlm.model")
    for noun, registry in PARTS.items():
        for kind in registry:
            base = {"width": 16, "context": 32, "block": {"attention": {"heads": 2}}, "stages": ["block"]}
            with contextlib.suppress(BraidError, KeyError):
                small = {"width": 8, "layers": 1, "heads": 2, "piece": 4} if "bytes" in kind else {}
                config = BraidConfig(base | architecture(noun, kind, small), vocab_size=40)
                model = randomised(BraidForCausalLM(config)).eval()
                folder = out / f"{noun.replace(' ', '-')}-{kind}"
                save_model(model, folder, None, {"made_by": "tests"})
                expect(folder)


def recipe(out: Path, name: str, **changes: Any) -> Path:
    base: dict[str, Any] = {
        "name": name,
        "seed": 3,
        "out": str(out),
        "data": {"length": 32, "sets": {"stories": {"path": "data/stories", "holdout": 0.2}}},
        "training": {"budget": f"{WHOLE} steps", "batch": 4, "warmup": "2 steps", "optimizer": {"lr": 1e-2}},
        "checkpoints": {"every": f"{HALF} steps", "keep": None},
        "validation": {"every": f"{HALF} steps", "tokens": 300},
        "log": {"every": 1},
    }
    for key, value in changes.items():
        base[key] = base[key] | value if isinstance(value, dict) and key in base else value
    Path("recipes").mkdir(exist_ok=True)
    path = Path("recipes") / f"{name}.yaml"
    path.write_text(yaml.safe_dump(base, sort_keys=False))
    return path


def run(name: str, **changes: Any) -> None:
    """A run to its end, whose second half is then taken away but for the weights it reached."""
    folder = Path("runs") / name
    braid("train", str(recipe(folder, name, **changes)), "--quiet")


def halve(name: str) -> None:
    folder = Path("runs") / name
    last, first = (folder / "checkpoints" / f"step-{steps:06d}" for steps in (WHOLE, HALF))
    for weights in last.glob("*.safetensors"):
        shutil.move(weights, folder / f"expected_{weights.name}")
    shutil.rmtree(last)
    for state in (folder / "states").glob(f"*{WHOLE:06d}*"):
        shutil.rmtree(state)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("step", 0) <= HALF]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept))
    for file in ("modeling_braid.py", "README.md"):
        (first / file).unlink(missing_ok=True)


def write_all() -> None:
    parts(Path("parts"))
    braid(
        "prepare",
        "stories",
        "--documents",
        "40",
        "--tokenizer",
        "bytes",
        "--special",
        "eos=<|endoftext|>",
        "--special",
        "pad=<|pad|>",
        "--special",
        "mask=<mask>",
        "--special",
        "<pause>",
        "--out",
        "data/stories",
        "--quiet",
    )
    braid("prepare", "maths", "--documents", "40", "--tokenizer", "data/stories", "--out", "data/maths", "--quiet")
    for name, changes in RUNS.items():
        run(name, **changes)
    braid("edit", "insert", "runs/modules", "--modules", "2", "--router", "rows", "--out", "edited/insert")
    run("inserted", start_from="edited/insert", training={"opening": 0.5})
    run("lora", start_from="runs/dense", training={"lora": {"rank": 2}})
    run("taught", model=MODEL, training={"distill": {"teachers": [{"model": "runs/dense"}], "weight": 0.5}})
    text = ("--text", "data/stories", "--tokens", "500")
    braid("compose", "runs/dense", "runs/other", "--join", "gumbel_v1", "--out", "edited/compose-gumbel")
    for join in ("average", "mixture", "posterior"):
        braid("compose", "runs/dense", "runs/other", "--join", join, "--out", f"edited/compose-{join}")
    braid("edit", "withdraw", "edited/compose-average", "--paths", "other", "--out", "edited/withdraw")
    braid("edit", "gate", "runs/dense", "--out", "edited/gate")
    run("gated", start_from="edited/gate", training={"train": "gates"})
    braid("edit", "prune", "runs/modules", *text, "--keep", "0.7", "--out", "edited/prune")
    braid("edit", "share", "runs/dense", "--what", "feeds", "--lora", "2", "--out", "edited/share")
    braid("edit", "upcycle", "runs/dense", "--experts", "2", "--out", "edited/upcycle")
    braid("edit", "factorize", "runs/dense", "--energy", "0.9", "--out", "edited/factorize")
    braid("edit", "quantize", "runs/dense", "--out", "edited/quantize")
    braid("edit", "sparsify", "runs/dense", "--share", "0.5", "--out", "edited/sparsify")
    Path("recipes/study.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))
    braid("train", "recipes/study.yaml", "--quiet")
    for folder in Path("edited").iterdir():
        expect(folder)
    for name in sorted(path.name for path in Path("runs").iterdir()):
        halve(name)
    shutil.rmtree("cache")
    for path in Path("study").rglob("*"):
        if path.name in ("modeling_braid.py", "README.md") or path.suffix in (".html", ".png"):
            path.unlink()
    for states in Path("study").rglob("states"):
        shutil.rmtree(states)


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    os.chdir(target)
    torch.set_num_threads(1)
    write_all()
