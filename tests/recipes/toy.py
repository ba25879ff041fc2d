"""Any recipe at toy size: its mechanisms as they are, on little text, with narrow models and trainings of two steps."""

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

VOCABULARY, LENGTH, STEPS = 400, 32, "2 steps"
HEAD_DIM = 4
"""Of every attention head: widths are divided by what that takes."""
MOST_LAYERS = 4
"""Sharing the interior layers needs as many."""
CORPORA = ("stories", "maths")
TEXT: dict[str, Any] = {"documents": 60, "holdout": 0.2}


def toy(recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A composed recipe, shrunk. Two recipes that differ in sizes and texts alone become equal but for their names."""
    data = deepcopy(recipe)
    data["data"] |= {"length": LENGTH, "cache": str(folder / "cache"), "tokenizer": _tokenizer(data["data"])}
    _shrink_windows(data["data"])
    data["training"] |= {"batch": 2, "accumulation": 1, "warmup": "1 steps"}
    if data["training"].get("lengths"):
        data["training"]["lengths"] = [{"until": 0.7, "length": 8}]
    data["validation"] = {"every": "1000 steps", "tokens": 200}
    data |= {"out": str(folder / "out"), "checkpoints": {"every": "1000 steps"}}
    if "domains" in data:
        data["domains"] = {name: _text(spec, at) for at, (name, spec) in enumerate(data["domains"].items())}
        data |= {"seeds": [1], "epochs": 1, "tasks": None, "models": {n: _model(m) for n, m in data["models"].items()}}
        data["steps"] = {name: _step(step) for name, step in data["steps"].items()}
        return data
    data["data"]["sets"] = {name: _text(spec, at) for at, (name, spec) in enumerate(data["data"]["sets"].items())}
    data["training"]["budget"] = STEPS
    if data.get("model"):
        data["model"] = _model(data["model"])
    return data


def references(step: dict[str, Any]) -> list[str]:
    """The steps and the models that a step reads."""
    teacher, model = (step.get("distil") or {}).get("teacher"), step.get("model")
    named = (step.get("of"), teacher, model if isinstance(model, str) else None)
    return [*(step.get("compose") or []), *(step.get("average") or []), *filter(None, named)]


def with_what_they_read(steps: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """These of the steps of a study and all steps before them that they need, in the order of the study."""
    wanted = [*wanted]
    for step in wanted:
        wanted += [read for read in references(steps[step]) if read in steps and read not in wanted]
    return {step: steps[step] for step in steps if step in wanted}


def kind(study: dict[str, Any], name: str) -> str:
    """What a step does and what it reads, whatever the numbers, the domains and the names of other steps."""
    models = study.get("models") or {}
    if name in models:
        return json.dumps(words(models[name]), sort_keys=True)
    step = study["steps"][name]
    own = alike(step, {*study["domains"], *references(step)})
    reads = [kind(study, read) for read in references(step)]
    return json.dumps([own, words(study["training"]), reads], sort_keys=True)


def alike(part: Any, names: set[str]) -> Any:
    """What a step has in common with those that differ from it in numbers and in these names alone."""
    if isinstance(part, dict):
        return {"?" if key in names else key: alike(value, names) for key, value in part.items() if key != "series"}
    if isinstance(part, list):
        return [alike(value, names) for value in part]
    if isinstance(part, bool) or not isinstance(part, float | int):
        return "?" if part in names else part
    return "a number"


def words(part: Any) -> Any:
    """The kinds and switches of a model or a training, without its numbers and the keys that have no other value."""
    if isinstance(part, dict):
        kept = {key: word for key, value in part.items() if (word := words(value)) not in (None, [])}
        return kept["kind"] if kept.keys() == {"kind"} else kept
    if isinstance(part, list):
        return [word for word in map(words, part) if word is not None]
    return part if isinstance(part, bool | str) and not str(part)[:1].isdigit() else None


def _tokenizer(data: dict[str, Any]) -> dict[str, Any]:
    given = data.get("tokenizer")
    special = (
        {"special_tokens": given["special_tokens"]} if isinstance(given, dict) and "special_tokens" in given else {}
    )
    return {"kind": "bpe", "vocab_size": VOCABULARY, **special}


def _shrink_windows(data: dict[str, Any]) -> None:
    chunking = data.get("chunking")
    if isinstance(chunking, dict) and chunking.get("stride"):
        data["chunking"] = chunking | {"stride": 16}
    if isinstance(chunking, dict) and chunking.get("words_per_epoch"):
        data["chunking"] |= {"words_per_epoch": 1000}


def _text(spec: dict[str, Any], at: int) -> dict[str, Any]:
    """A built-in corpus in place of files and of the Hub; questions stay questions."""
    if spec.get("answer"):
        return {"source": "arithmetic", "fields": ["question"], "answer": "answer", **TEXT}
    return {"source": CORPORA[at % len(CORPORA)], **TEXT}


def _model(model: dict[str, Any]) -> dict[str, Any]:
    attention = model["block"]["attention"]
    factor = (attention.get("head_dim") or model["width"] / attention["heads"]) / HEAD_DIM
    return _narrowed(model, factor) | {"vocab_size": VOCABULARY, "context": LENGTH}


def _narrowed(part: Any, factor: float) -> Any:
    if isinstance(part, list):
        return [_narrowed(each, factor) for each in part]
    if not isinstance(part, dict):
        return part
    narrow = {key: _narrowed(value, factor) for key, value in part.items()}
    for key, value in narrow.items():
        if key in ("width", "hidden", "to", "shared", "head_dim", "lora") and isinstance(value, int):
            narrow[key] = math.ceil(value / factor)
        if key == "layers" and isinstance(value, int):
            narrow[key] = min(value, MOST_LAYERS)
    return narrow


def _step(step: dict[str, Any]) -> dict[str, Any]:
    small = deepcopy(step)
    if any(small.get(key) for key in ("train", "model", "distil")):
        small["train"] = (small.get("train") or {}) | {"epochs": None, "budget": STEPS}
        lora = small["train"].get("lora")
        small["train"] |= {"lora": lora | {"rank": 2}} if lora else {}
    for edit in small.get("edit") or []:
        for kind, options in edit.items() if isinstance(edit, dict) else ():
            edit[kind] = options | {key: value for key, value in _SMALL_EDITS.items() if key in options}
    return small


_SMALL_EDITS = {"tokens": 300, "before": 3}
