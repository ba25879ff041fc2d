"""What lowers what a model gives away of its training text: `braid eval MODEL memorisation` on the built-in stories.

python benchmarks/memorisation.py --seeds 1 2 3           # tiny models, a CPU, each training under a minute
"""

import argparse
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from measure import record

from braidlm.core import console
from braidlm.data.corpora.builtin import documents
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.open_data import open_data
from braidlm.data.packing.prepare import prepare
from braidlm.evals.evaluate import evaluate
from braidlm.evals.evaluated_model import Settings
from braidlm.model.config.strict import decode
from braidlm.training.train import train

STORIES, REPEATED, TIMES, CANARIES, LENGTH = 64, 16, 4, 8, 128
BLOCK = {"norm": "rms", "attention": {"heads": 4}, "feed": "swiglu"}
MODEL = {"width": 64, "context": 256, "positions": "rope", "block": BLOCK, "stages": [{"block": {"layers": 2}}]}
AVERAGE = {"average": {"kind": "last", "share": 0.3}}
PRIVATE = {"privacy": {"epsilon": 8, "delta": 1e-3}, "batch": 36, "optimizer": {"lr": 1e-2}}
WAYS: dict[str, dict[str, Any]] = {
    "reference": {"text": "reference", "epochs": 3},
    "10 epochs": {},
    "2 epochs": {"epochs": 2},
    "deduplicated": {"data": {"duplicates": "exact"}},
    "weight decay 1.0": {"training": {"optimizer": {"lr": 1e-2, "weight_decay": 1.0}}},
    "averaged": {"training": AVERAGE},
    "student": {"text": "reference", "teacher": "10 epochs"},
    "deduplicated, 2 epochs": {"epochs": 2, "data": {"duplicates": "exact"}},
    "DP-SGD": {"data": {"duplicates": "exact"}, "chunking": "single", "training": PRIVATE},
}


def write(path: Path, texts: Iterable[str]) -> None:
    path.write_text("\n\n".join(texts), encoding="utf-8")


def stories(seed: int, part: int) -> list[str]:
    return [text.replace("\n\n", "\n") for text in documents("stories", 1000 * seed + part, count=STORIES)]


def make_texts(home: Path, seed: int) -> None:
    """The owner's stories, of which some stand there several times as the canaries do, and those of others."""
    rng, own = random.Random(seed), stories(seed, 0)
    canaries = [f"the code of {name} is {rng.randrange(10**8):08d}" for name in "abcdefgh"[:CANARIES]]
    texts = [*own, *(TIMES - 1) * own[:REPEATED], *TIMES * canaries]
    rng.shuffle(texts)
    write(home / "owner.txt", texts)
    write(home / "others.txt", stories(seed, 1))
    write(home / "reference.txt", stories(seed, 2))
    (home / "canaries.txt").write_text("\n".join(canaries), encoding="utf-8")
    prepare("stories", home / "public", documents=1000, tokenizer="bpe", vocab_size=512, workers=1)


def trained(home: Path, seed: int, name: str, way: dict[str, Any], device: str) -> Path:
    """The model folder of one way."""
    own = {"source": str(home / f"{way.get('text', 'owner')}.txt"), "holdout": 0.0}
    sets = {"text": own | way.get("data", {})}
    chunking = {"chunking": way["chunking"]} if "chunking" in way else {}
    tokenizer = {"kind": str(home / "public" / "tokenizer")}
    length = 256 if chunking else LENGTH
    data = {"sets": sets, "length": length, "tokenizer": tokenizer, "cache": str(home / "cache"), **chunking}
    training: dict[str, Any] = {"batch": 8, "optimizer": {"lr": 1e-2}, "warmup": "20 steps", **way.get("training", {})}
    if "teacher" in way:
        teacher = str(home / way["teacher"].replace(" ", "-"))
        training["distill"] = {"teachers": [teacher], "weight": 0.9}
    training["budget"] = budget(data, training, way.get("epochs", 10))
    recipe = {"name": "memorisation", "seed": seed, "model": MODEL, "data": data, "training": training}
    recipe |= {"out": str(home / name.replace(" ", "-")), "log": {"every": 50}, "validation": {"every": "100k steps"}}
    return train(recipe | {"checkpoints": {"every": "100k steps"}}, device=device).model


def budget(data: dict[str, Any], training: dict[str, Any], epochs: int) -> str:
    """So many epochs in steps."""
    config = decode(DataConfig, data)
    opened = open_data(config)
    loader = Loader(opened.train, chunkings.build(config.chunking), config.length, training["batch"])
    return f"{max(1, round(epochs / max(loader.rates.values())))} steps"


def scores(home: Path, model: Path, device: str) -> dict[str, float]:
    texts = {"owner": home / "owner.txt", "others": home / "others.txt"}
    settings = Settings(canaries=str(home / "canaries.txt"), reference=str(home / "reference"), samples=0)
    found = evaluate([model], "memorisation", data_of=texts, settings=settings, device=device)
    task = found.models[0].tasks["memorisation"]
    bits = evaluate([model], "bits_per_byte", data_of={"bits_per_byte": home / "others.txt"}, device=device)
    against = "membership by loss against the reference's,"
    return {
        "bits_of_others": bits.models[0].tasks["bits_per_byte"].score,
        "passages_reproduced": task.score,
        "of_others": task.parts.get("others, prefix 64", task.parts[min(task.parts)]).score,
        "membership_auc": task.also[f"{against} AUC"],
        "true_positives": task.also[f"{against} true positives at 0.1% false ones, %"],
        "exposure_bits": next(value for key, value in task.also.items() if key.startswith("mean exposure")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    console.set_quiet(True)
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            make_texts(home, seed)
            for name, way in WAYS.items():
                model = trained(home, seed, name, way, options.device)
                rows.append({"way": name, "seed": seed, **scores(home, model, options.device)})
                print(rows[-1], flush=True)
        record("memorisation", torch.device(options.device), rows)


if __name__ == "__main__":
    main()
