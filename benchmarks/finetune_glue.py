"""Fine-tuning on the seven GLUE tasks of BabyLM 2025: scores beside the majority class, and the wall clock of each.

Without --model the model has random weights: the time is the same, the scores mean nothing. BoolQ and MultiRC need
training files that not every copy of the data has; --stand-in samples as many examples from the validation files, which
shows the time and nothing else.

python benchmarks/finetune_glue.py DATA [--device cuda] [--model FOLDER] [--stand-in] [--peer] [--no-replay]
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import record
from shapes import VOCABULARY, braid_model, peer_model

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.data.tokenizing.build import load_tokenizer, train_bpe
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.finetuning.data_sets import DATA_SETS, Examples, read_examples
from braidlm.evals.finetuning.labelled_task import LabelledTask
from braidlm.evals.finetuning.loop import fine_tune, hyperparameters_for, seeds_for
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.task_data import find_data
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.task import SUITES

REAL_SIZES = {"boolq": 9_427, "multirc": 27_243}
FOLDERS = ("babylm-2025/full_eval/glue_filtered", "evaluation_data/full_eval/glue_filtered", ".")


def opened(name: str, data: Path, stand_in: bool) -> tuple[LabelledTask, bool] | None:
    """A task and whether its training examples are real; None where there are none and no stand-in."""
    try:
        return TASKS[name]().open(find_data([name], data, {})[name]), True
    except BraidError as error:
        if not stand_in:
            print(f"left out: {error}")
            return None
    data_set = next(each for each in DATA_SETS if each.task == name)
    folder = next(data / each for each in FOLDERS if (data / each / data_set.files[0].valid).is_file())
    valid = read_examples(data_set, folder / data_set.files[0].valid, data_set.files[0])
    sample = np.random.default_rng(0).integers(0, len(valid), REAL_SIZES[data_set.name])
    train = Examples([valid.texts[index] for index in sample], valid.labels[sample])
    return LabelledTask(data_set, train, valid, "0" * 64), False


def loaded(args: argparse.Namespace, tasks: list[LabelledTask]) -> tuple[Any, BraidTokenizer]:
    """The model, and a tokenizer that fits it."""
    if args.model is not None:
        return load_model(args.model, args.device), load_tokenizer(args.model)
    texts = [text for task in tasks for pair in task.train.texts[:2000] for text in pair if text]
    tokenizer = BraidTokenizer(train_bpe(texts, VOCABULARY), SpecialTokens())
    torch.manual_seed(0)
    make = peer_model if args.peer else braid_model
    return make(args.family, args.size, 512).to(args.device), tokenizer


def measured(task: LabelledTask, name: str, real: bool, model: EvaluatedModel, replay: bool) -> dict[str, Any]:
    """One task, from its texts to its score."""
    _wait(model.device)
    start = time.perf_counter()
    hyperparameters = hyperparameters_for(task.data_set.name, model.settings)
    tokenized = task.tokenize(model, hyperparameters)
    encoded = time.perf_counter() - start
    seeds = seeds_for(model.settings)
    tuned = [fine_tune(model.model, tokenized, hyperparameters, seed, replay=replay) for seed in seeds]
    result = task.result(name, hyperparameters, seeds, tuned)
    _wait(model.device)
    epochs = sum(len(one.scores) for one in tuned)
    steps = epochs * (len(tokenized.train) // min(hyperparameters.batch_size, len(tokenized.train)))
    seconds = time.perf_counter() - start
    return {
        "task": name,
        "data": "real" if real else "stand-in: time only",
        "metric": result.metric,
        "score": result.score,
        "standard_error": result.standard_error,
        "constant_answer": result.chance,
        "accuracy": result.also.get("accuracy", result.score),
        "majority_class": result.notes["majority class"],
        "epochs": epochs,
        "steps": steps,
        "replayed": all(one.replayed for one in tuned),
        "encoding_seconds": encoded,
        "seconds": seconds,
        "milliseconds_per_step": 1000 * (seconds - encoded) / steps,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the data folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", type=Path, help="a model folder (random weights)")
    parser.add_argument("--family", default="gpt2", help="of random weights: gpt2, llama, moep")
    parser.add_argument("--size", default="28m")
    parser.add_argument("--peer", action="store_true", help="transformers' own model of that shape")
    parser.add_argument("--finetune", default="lora", choices=("lora", "full"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="at most (the paper's)")
    parser.add_argument("--length", type=int, help="tokens of an example (the paper's)")
    parser.add_argument("--tasks", nargs="+", default=list(SUITES["glue_babylm"]))
    parser.add_argument("--stand-in", action="store_true", help="where training files are missing")
    parser.add_argument("--no-replay", action="store_true", help="launch every step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tasks = {name: task for name in args.tasks if (task := opened(name, args.data, args.stand_in)) is not None}
    settings = Settings(
        finetune=args.finetune, seeds=args.seeds, finetune_epochs=args.epochs, finetune_length=args.length
    )
    model, tokenizer = loaded(args, [task for task, _ in tasks.values()])
    evaluated = EvaluatedModel(Scorer(model), tokenizer, settings=settings)
    rows = []
    for name, (task, real) in tasks.items():
        rows.append(measured(task, name, real, evaluated, not args.no_replay))
        print(f"{name}: {rows[-1]['score']:.2f} in {rows[-1]['seconds']:.1f} s")
    whole = dict.fromkeys(rows[0], "") | {key: sum(row[key] for row in rows) for key in ("epochs", "steps", "seconds")}
    record("finetune_glue", torch.device(args.device), [*rows, {**whole, "task": "in all"}], args.out)


if __name__ == "__main__":
    main()
