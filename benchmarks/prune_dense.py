"""What heads, channels and layers of a dense model are worth: pruned by importance and at random, and healed.

    python benchmarks/prune_dense.py [--steps 600] [--healing 100] [--seeds 3]

A model of `tiny/llama`'s kind (4 layers of width 96, 8 heads) is trained on the built-in stories, pruned by what 200
other stories use of it, and healed: trained on, on the stories of the training. Bits per byte are of 200 further
stories. Random choices have several seeds, of which the first is healed too.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from measure import record

from braidlm.core.models.folders import load_model, save_model
from braidlm.data.corpora.builtin import document
from braidlm.edits.account import SOURCE
from braidlm.edits.dense import measure_importance
from braidlm.edits.edit import assemble
from braidlm.edits.matrices import bits_per_byte
from braidlm.edits.modules import Usage, calibration_texts
from braidlm.edits.prune import Prune
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.formats.held_out_text import read_text
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.open import open_model
from braidlm.training.train import train

MODEL = {
    "width": 96,
    "context": 128,
    "positions": "rope",
    "block": {"norm": "rms", "attention": {"heads": 8}, "feed": {"kind": "swiglu", "hidden": 256}},
    "stages": [{"block": {"layers": 4}}],
}
CASES: dict[str, dict[str, int]] = {
    "4 of 8 heads": {"heads": 4},
    "128 of 256 channels": {"channels": 128},
    "3 of 4 layers": {"layers": 3},
    "6 heads, 160 channels, 3 layers": {"heads": 6, "channels": 160, "layers": 3},
}


def trained(out: Path, steps: int, lr: float, **recipe: Any) -> OpenedBraid:
    training = {"budget": f"{steps} steps", "batch": 16, "warmup": "20 steps", "optimizer": {"lr": lr}}
    data = {"length": 128, "sets": {"stories": {"source": "stories", "documents": 2000}}}
    data |= {} if "start_from" in recipe else {"tokenizer": {"kind": "bpe", "vocab_size": 512}}
    whole = {"name": out.name, "out": str(out), "data": data, "training": training, **recipe}
    whole["checkpoints"] = {"every": f"{steps} steps"}
    return opened(train(whole, device="cpu").folder)


def opened(folder: Path) -> OpenedBraid:
    model = open_model(folder, "braid")
    assert isinstance(model, OpenedBraid)
    return model


def at_random(importance: Usage, seed: int) -> Usage:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(own.shape, generator=generator) for name, own in importance.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--healing", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, corpus in (("calibration", 1), ("dev", 2)):
            stories = [document("stories", corpus, number) for number in range(200)]
            lines = (json.dumps({"text": text}) + "\n" for text in stories)
            (folder / f"{file}.jsonl").write_text("".join(lines))
        dev = read_text(str(folder / "dev.jsonl"), Settings(max_tokens=50_000))

        def bits(model: OpenedBraid) -> float:
            return bits_per_byte(load_model(model.folder), model, dev).score

        def healed(folder: Path) -> float:
            run = folder.with_name(f"{folder.name}-healed")
            return bits(trained(run, args.healing, 3e-3, start_from=str(folder)))

        source = trained(folder / "whole", args.steps, 1e-2, model=MODEL)
        texts = calibration_texts(source, str(folder / "calibration.jsonl"), 50_000)
        importance = measure_importance(source, texts)
        whole = {"parameters": source.info.parameters, "bits_per_byte": bits(source), "healed": healed(source.folder)}
        rows.append({"case": "whole", **whole})
        print(rows[-1], flush=True)

        def pruned(out: Path, numbers: dict[str, int], by: Usage) -> OpenedBraid:
            plan = Prune(str(folder / "calibration.jsonl"), **numbers).plan_numbers(source, texts, by)  # type: ignore[arg-type]
            model = assemble(plan.model, plan.account, {SOURCE: source}, seed=1)
            save_model(model, out, source.tokenizer, {"made_by": "benchmarks/prune_dense.py"})
            return opened(out)

        for case, numbers in CASES.items():
            at = folder / f"case-{len(rows)}"
            model = pruned(at, numbers, importance)
            row = {"case": case, "parameters": model.info.parameters}
            row["share"] = row["parameters"] / rows[0]["parameters"]
            row |= {"bits_per_byte": bits(model), "healed": healed(at)}
            others = []
            for seed in range(args.seeds):
                other = pruned(folder / f"{at.name}-random-{seed}", numbers, at_random(importance, seed))
                others.append(bits(other))
            row |= {"random": mean(others), "random_spread": stdev(others) if len(others) > 1 else 0.0}
            row["random_healed"] = healed(folder / f"{at.name}-random-0")
            rows.append(row)
            print(row, flush=True)
        record("prune_dense", torch.device("cpu"), rows, args.out)


if __name__ == "__main__":
    main()
