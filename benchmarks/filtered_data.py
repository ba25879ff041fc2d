"""What duplicates cost, and what the way of holding text out changes, at toy size: bits per byte of held-out text.

    python benchmarks/filtered_data.py [--steps 120] [--seeds 3]

Duplicates: 300 made-up stories, of which 30 stand in the text 30 times more, half of these copies with one word in a
hundred changed. The text is trained on as it is, without exact and without near duplicates, for equal steps of
`tiny/llama`, and 200 other stories are validated on. The split: 5% of 600 stories are held out by documents, or by
chunks of 128 tokens, of which neighbours are trained on. The tokenizer is the same everywhere.
"""

import argparse
import contextlib
import io
import json
import random
import tempfile
from pathlib import Path
from statistics import mean, stdev

import torch
from measure import record

from braidlm.cli.main import main as braid
from braidlm.data.corpora.builtin import document
from braidlm.data.packing.prepare import prepare


def copied(text: str, rng: random.Random) -> str:
    """A copy, with one word in a hundred changed in every second one."""
    share = 0.01 if rng.random() < 0.5 else 0.0
    return " ".join(rng.choice(["red", "old", "small"]) if rng.random() < share else word for word in text.split(" "))


def bits(overrides: list[str], steps: int, seed: int, out: Path) -> float:
    """Bits per byte at the end of a training."""
    command = ["train", "tiny/llama", f"out={out}", f"seed={seed}", *overrides]
    command += [f"training.budget={steps} steps", f"validation.every={steps} steps", f"checkpoints.every={steps} steps"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert braid([*command, "--quiet", "--device", "cpu"]) == 0
    records = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    return float([each["bits_per_byte"] for each in records if each["kind"] == "validation"][-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rng, rows = random.Random(0), []
    stories = [document("stories", 0, number) for number in range(300)]
    texts = [*stories, *(copied(story, rng) for story in stories[:30] for _ in range(30))]
    rng.shuffle(texts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in (("copies", texts), ("dev", [document("stories", 1, number) for number in range(200)])):
            (folder / f"{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in content))
        clean = prepare("stories", folder / "clean", documents=600, vocab_size=512, workers=1)
        common = [f"data.tokenizer.kind={clean.tokenizer_folder}", f"data.cache={folder}/cache"]
        held_out = [f"+data.sets.stories.validation={folder}/dev.jsonl", *common]
        source = f"data.sets.stories.source={folder}/copies.jsonl"
        cases = {
            f"duplicates: {kind}": [source, f"+data.sets.stories.duplicates={kind}", *held_out]
            for kind in ("keep", "exact", "near")
        }
        split = ["data.sets.stories.documents=600", *common]
        cases |= {"split by documents": split, "split by chunks": ["+data.sets.stories.chunk_tokens=128", *split]}
        for case, overrides in cases.items():
            seeds = range(1, args.seeds + 1)
            found = [bits(overrides, args.steps, seed, folder / f"run-{len(rows)}-{seed}") for seed in seeds]
            spread = stdev(found) if len(found) > 1 else 0.0
            rows.append({"case": case, "bits_per_byte": mean(found), "spread": spread, "seeds": args.seeds})
            print(rows[-1], flush=True)
        record("filtered_data", torch.device("cpu"), rows, args.out)


if __name__ == "__main__":
    main()
