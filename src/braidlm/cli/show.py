"""`braid show`: what a recipe, a model folder, a run or a packed data set is and costs."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from braidlm.cli.settings import names_and_overrides, number
from braidlm.core import console
from braidlm.core.console import count, duration, table
from braidlm.model.config.ranges import Length

HELP = "look at a recipe, a model, a run, a study or packed data, or compare several: cost, stages, lineage, problems"
EPILOG = """examples:
  braid show tiny/llama model.width=128
  braid show best/average domains.english.folder=corpus tasks=null
  braid show runs/mine runs/wider
  braid show data/mine
"""
MEMORY = {
    "weights_compressed": "weights, compressed",
    "weights_float32": "weights, float32",
    "weights_bfloat16": "weights, bf16",
    "training_adamw": "training state, AdamW",
    "cache_float32": "cache of one text, float32",
}

IN_LINEAGE_ALONE = ("recipe", "recipe_sha256", "versions", "tensors", "left_out", "read_as")
"""What a source's lineage holds and its row leaves out."""
SHA_256 = re.compile(r"\b[0-9a-f]{64}\b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("x", metavar="X", help="a recipe's name or file, or a model, run, study or data folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="X|key=value",
        help="others to compare it with, and changes to recipes",
    )
    parser.add_argument(
        "--length", type=number(Length), metavar="N", help="tokens per text for FLOPs (default: the context)"
    )


def run(args: argparse.Namespace) -> None:
    from braidlm.studies.show import show

    others, overrides = names_and_overrides(args.overrides)
    facts = show([args.x, *others], overrides, args.length)
    console.show_json(facts)
    PRINTERS.get(facts["kind"], _print_model)(facts)
    if facts["notes"] or facts["problems"]:
        console.show("")
    for note in facts["notes"]:
        console.show(f"note: {note}")
    for problem in facts["problems"]:
        console.show(f"problem: {problem}")


def _print_model(facts: dict[str, Any]) -> None:
    console.show(f"{facts['kind']} {facts['name']}{': ' + facts['about'] if facts.get('about') else ''}\n")
    columns = ("stage", "layers", "parameters", "active", "FLOPs per token")
    keys = ("parameters", "active_parameters", "flops_per_token")
    rows = [(_stage_name(row), row["layers"] or "-", *(row[key] for key in keys)) for row in facts["stages"]]
    table(columns, [*rows, ("total", facts["layers"], *(facts[key] for key in keys))])
    assumed, seconds = " (assumed)" if facts["vocab_size_assumed"] else "", facts.get("expected_seconds")
    about = [
        ("width", f"{facts['width']:,}"),
        ("context", f"{facts['context']:,} tokens"),
        ("vocabulary", f"{facts['vocab_size']:,}{assumed}"),
        *_ends_row(facts["ends"]),
        ("forward FLOPs", f"{count(float(facts['flops_per_token']))} per token at {facts['length']:,} tokens"),
        *([("compression", ", ".join(facts["compression"]))] if facts["compression"] else []),
        *((text, size(facts["memory"][key])) for key, text in MEMORY.items() if key in facts["memory"]),
        (
            "training on a GPU",
            facts["kernels"]["summary"] if facts["trainable"] else "a quantised model is not trained",
        ),
        *([("expected time", f"about {duration(seconds)} on this machine")] if seconds is not None else []),
        *_run_rows(facts.get("run") or {}),
        *_lineage_rows(facts["lineage"] or {}),
        *([("tokenizer", facts["tokenizer"][:16])] if facts["tokenizer"] else []),
    ]
    table(("", ""), about)


def _ends_row(ends: dict[str, float] | None) -> list[tuple[str, str]]:
    if ends is None:
        return []
    shares = f"{ends['of_untied_tables']:.1%} of untied tables of tokens, {ends['of_tied_tables']:.1%} of a tied one"
    return [("embedding and head", f"{ends['parameters']:,} parameters: {shares}")]


def _print_study(facts: dict[str, Any]) -> None:
    from braidlm.studies.tables import kind_label

    console.show(f"study {facts['name']}{': ' + facts['about'] if facts.get('about') else ''}\n")
    keys = ("parameters", "active_parameters", "flops_per_token")
    rows = [
        (row["name"], kind_label(row["kind"]), row["layers"], row["width"], *(row[key] for key in keys))
        for row in facts["models"]
    ]
    table(("model", "", "layers", "width", "parameters", "active", "FLOPs per token"), rows, keep=1)
    console.show("")
    trained = [row for row in facts["models"] if row["training"]["epochs"]]  # an average is not
    rows = [(row["name"], row["times"], *_training_row(row["training"])) for row in trained]
    table(("training", "seeds", "words", "tokens", "epochs", "checkpoints", "expected time"), rows)
    seeds = len(facts["seeds"])
    if facts["expected_seconds"] is not None:
        times = f", {seeds} seeds" if seeds > 1 else ""
        console.show(f"all{times}: about {duration(facts['expected_seconds'])} on this machine\n")
    sources = {domain: [source] if isinstance(source, str) else source for domain, source in facts["domains"].items()}
    table(("domain", "source"), [(domain, " ".join(files)) for domain, files in sources.items()])


def _training_row(training: dict[str, Any]) -> tuple[str, ...]:
    amounts = ["-" if training[key] is None else count(float(training[key])) for key in ("words", "tokens")]
    seconds = training["seconds"]
    return (
        *amounts,
        f"{training['epochs']:g}",
        "-" if training["checkpoints"] is None else str(training["checkpoints"]),
        "-" if seconds is None else f"about {duration(seconds)}",
    )


def _print_comparison(facts: dict[str, Any]) -> None:
    """A row for each fact, a column for each model; facts that no model has are left out."""
    models, names = facts["models"], _names(facts["models"])
    rows = [(label, *(read(model) for model in models)) for label, read in COMPARED.items()]
    table(("", *names), [row for row in rows if any(cell != "-" for cell in row[1:])], keep=1)
    for name, model in zip(names, models, strict=True):
        stages = [row["name"].split(": ", 1)[1] for row in model["stages"] if ": " in row["name"]]
        console.show(f"stages of {name}: {', '.join(stages)}")


def _names(models: list[dict[str, Any]]) -> list[str]:
    """The last parts of the models' names, as many as tell them apart."""
    parts = [Path(model["name"]).parts for model in models]
    length = next(n for n in range(1, 100) if len({part[-n:] for part in parts}) == len(set(parts)))
    return ["/".join(part[-length:]) for part in parts]


def _stage_name(row: dict[str, Any]) -> str:
    name = f"{row['name']} of {', '.join(row['paths'])} ({row['join']})" if "paths" in row else row["name"]
    return f"{name}, shared: {row['shared']}" if "shared" in row else str(name)


def _run_rows(run: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("checkpoint", run["checkpoint"] or "none yet")] if run else []
    for kind in ("train", "validation"):
        numbers = {key: value for key, value in run.get(kind, {}).items() if _is_plain(value)}
        rows += [(f"last {kind} record", _described(numbers))] if numbers else []
    return rows


def _lineage_rows(lineage: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("made by", str(lineage["made_by"]))] if "made_by" in lineage else []
    if training := lineage.get("training"):
        counts = [f"{value:,} {key}" for key, value in training.items() if _is_plain(value) and isinstance(value, int)]
        measures = {key: value for key, value in training.items() if isinstance(value, float)}
        rows.append(("trained", ", ".join([*counts, *filter(None, [_described(measures)])])))
    for source in lineage.get("sources") or []:
        rows.append(("source", _described(source)))
    if "created" in lineage:
        rows.append(("created", str(lineage["created"])))
    if isinstance(versions := lineage.get("versions"), dict):
        rows.append(("versions", ", ".join(f"{name} {number}" for name, number in versions.items())))
    return rows


def _described(source: dict[str, Any]) -> str:
    """`data stories, tokens 338,006, subset (start 0, stop 0.95)`, for any keys but those that fill a page."""
    parts = []
    for key, value in source.items():
        if value is None or key in IN_LINEAGE_ALONE:
            continue
        text = _value(value)
        parts.append(f"{key.replace('_', ' ')} {f'({text})' if isinstance(value, (list, dict)) else text}")
    return ", ".join(parts)


def _value(value: Any) -> str:
    """A value of a lineage in words: of a SHA-256 the first twelve digits, a line break as it is written in code."""
    if isinstance(value, list):
        return "; ".join(_value(one) for one in value)
    if isinstance(value, dict):
        return _described(value)
    if _is_plain(value):
        return _number(value)
    return SHA_256.sub(lambda found: found[0][:12], str(value)).replace("\n", "\\n")


def _print_data(facts: dict[str, Any]) -> None:
    console.show(f"packed data {facts['name']}")
    counts = {key: key for key in ("tokens", "documents", "words", "bytes")} | {"vocab_size": "vocabulary"}
    rows: list[tuple[str, str]] = [(label, _number(facts[key])) for key, label in counts.items() if key in facts]
    if facts.get("words"):
        rows.append(("tokens per word", f"{facts['tokens'] / facts['words']:.2f}"))
    if answers := facts.get("targets"):
        rows.append(("answers", f"{answers['tokens']:,} of the tokens, {answers['bytes']:,} bytes"))
    rows += [("token type", str(facts.get("dtype"))), ("tokenizer", str(facts.get("tokenizer"))[:16])]
    source = facts.get("source", {})
    rows += [(key.replace("_", " "), _value(value)) for key, value in source.items() if key != "key"]
    table(("", ""), rows)


def size(amount: int) -> str:
    """1500000 bytes as 1.5 MB."""
    value = float(amount)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} GB"


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: float) -> str:
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}"


def _whole(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda facts: f"{facts[key]:,}"


def _trained(key: str) -> Callable[[dict[str, Any]], str]:
    """Reads a number of the training that the lineage records."""

    def read(facts: dict[str, Any]) -> str:
        value = ((facts["lineage"] or {}).get("training") or {}).get(key)
        return "-" if value is None else _number(value)

    return read


def _bits(facts: dict[str, Any]) -> str:
    bits = (facts.get("run") or {}).get("validation", {}).get("bits_per_byte")
    return "-" if bits is None else f"{bits:.4f}"


COMPARED: dict[str, Callable[[dict[str, Any]], str]] = {
    "kind": lambda facts: facts["kind"],
    "parameters": _whole("parameters"),
    "active": _whole("active_parameters"),
    "FLOPs per token": _whole("flops_per_token"),
    "layers": _whole("layers"),
    "width": _whole("width"),
    "context": _whole("context"),
    "vocabulary": _whole("vocab_size"),
    "weights, float32": lambda facts: size(facts["memory"]["weights_float32"]),
    "made by": lambda facts: str((facts["lineage"] or {}).get("made_by", "-")),
    "trained steps": _trained("steps"),
    "trained tokens": _trained("tokens"),
    "trained words": _trained("words"),
    "bits per byte": _bits,
    "checkpoint": lambda facts: str((facts.get("run") or {}).get("checkpoint") or "-"),
    "tokenizer": lambda facts: (facts["tokenizer"] or "-")[:16],
}
"""What a comparison shows of each model."""
PRINTERS = {"data": _print_data, "study": _print_study, "comparison": _print_comparison}
"""By kind of what is shown; anything else is one model."""
