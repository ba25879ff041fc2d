"""`braid show`: what a recipe, a model folder, a run or a packed data set is and costs."""

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from braidlm.cli.settings import add_settings, given_settings, names_and_overrides, number
from braidlm.core.console import count, duration, show_json, size
from braidlm.core.errors import BraidError
from braidlm.core.report.rendering import show_report
from braidlm.core.report.report import Report, Table, cell_text
from braidlm.model.config.ranges import Count, Length
from braidlm.opening.names import check_known

HELP = "look at a recipe, a model, a run, a study or packed data, or compare several: cost, stages, lineage, problems"
EPILOG = """examples:
  braid show tiny/llama model.width=128
  braid show best/average domains.english.folder=corpus tasks=null
  braid show runs/mine runs/wider
  braid show data/mine
  braid show tiny/llama --gpus 64 --gpu H100 --between 25
"""
MEMORY = {
    "weights_on_disk": "weights, on disk",
    "weights_compressed": "weights, compressed",
    "weights_float32": "weights, float32",
    "weights_bfloat16": "weights, bf16",
    "training_adamw": "training state, AdamW",
    "cache_float32": "cache of one text, float32",
}
COSTS = ("parameters", "active_parameters", "flops_per_token")
COMPARED = {
    "kind": "kind",
    "parameters": "parameters",
    "active": "active_parameters",
    "FLOPs per token": "flops_per_token",
    "layers": "layers",
    "width": "width",
    "context": "context",
    "vocabulary": "vocab_size",
    "weights, on disk": "memory.weights_on_disk",
    "weights, float32": "memory.weights_float32",
    "made by": "lineage.made_by",
    "trained steps": "lineage.training.steps",
    "trained tokens": "lineage.training.tokens",
    "trained words": "lineage.training.words",
    "bits per byte": "run.validation.bits_per_byte",
    "checkpoint": "run.checkpoint",
    "tokenizer": "tokenizer",
}
"""What a comparison shows of each model, by the keys that lead to it in the facts."""
IN_LINEAGE_ALONE = ("recipe", "recipe_sha256", "versions", "tensors", "left_out", "read_as")
"""What a source's lineage holds and its row leaves out."""
SHA_256 = re.compile(r"\b[0-9a-f]{64}\b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from braidlm.training.machines import Machines

    parser.add_argument("x", metavar="X", help="a recipe's name or file, or a model, run, study or data folder")
    about = "others to compare it with, and changes to recipes"
    parser.add_argument("overrides", nargs="*", default=[], metavar="X|key=value", help=about)
    about = "tokens per text for FLOPs (default: the context)"
    parser.add_argument("--length", type=number(Length), metavar="N", help=about)
    help_text = "what the training of a recipe takes on so many GPUs: memory, traffic, speed and hours"
    parser.add_argument("--gpus", type=number(Count), metavar="N", help=help_text)
    add_settings(parser, Machines, "the machines of --gpus")


def run(args: argparse.Namespace) -> None:
    from braidlm.training.machines import Machines

    others, overrides = names_and_overrides(args.overrides)
    told = given_settings(args, Machines)
    if told and args.gpus is None:
        raise BraidError("machines are told for a plan", todo="--gpus N plans a recipe's training on so many GPUs.")
    for name in (args.x, *others):
        check_known(name)
    from braidlm.studies.show import show

    facts = show([args.x, *others], overrides, args.length, args.gpus, Machines(**told))
    show_json(facts)
    report = (_plan if "plan" in facts else REPORTS.get(facts["kind"], _model))(facts)
    if facts["notes"] or facts["problems"]:
        report.text("")
    for kind in ("note", "problem"):
        for text in facts[f"{kind}s"]:
            report.text(f"{kind}: {text}")
    show_report(report)


def _report(facts: dict[str, Any]) -> Report:
    """A report that begins with what is shown, and an empty line."""
    return Report("").text(f"{facts['kind']} {facts['name']}{': ' + facts['about'] if facts.get('about') else ''}\n")


def _model(facts: dict[str, Any]) -> Report:
    rows = [(_stage_name(row), row["layers"] or "-", *(row[key] for key in COSTS)) for row in facts["stages"]]
    rows.append(("total", facts["layers"], *(facts[key] for key in COSTS)))
    report = _report(facts).table(Table(("stage", "layers", "parameters", "active", "FLOPs per token"), rows))
    return report.table(Table(("", ""), list(_about(facts))))


def _plan(facts: dict[str, Any]) -> Report:
    """What a training takes of each process, and how long it lasts."""
    plan = facts["plan"]
    held = [(name, size(amount)) for name, amount in plan["memory"].items()]
    report = _report(facts).table(Table((f"memory of each of {plan['gpus']} processes ({plan['layout']})", ""), held))
    rows = [
        (name, "-" if name == "all" else f"{1000 * plan['seconds'][name]:.3g} ms", size(amount))
        for name, amount in plan["traffic"].items()
    ]
    rows.insert(0, ("computing", f"{1000 * plan['seconds']['computing']:.3g} ms", "-"))
    rows.append(("a step", f"{1000 * plan['seconds']['step']:.3g} ms", f"{plan['tokens_per_step']:,} tokens"))
    report.text("").table(Table(("a step of each process", "time", "sends"), rows)).text("")
    report.text(
        f"{count(plan['tokens_per_second'])} tokens/s, {plan['steps']:,} steps, {plan['hours']:,.3g} hours: "
        f"{plan['gpu_hours']:,.3g} hours of a GPU.\n\nAssumed:"
    )
    for line in plan["assumptions"]:
        report.text(f"- {line}")
    return report


def _about(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "width", f"{facts['width']:,}"
    yield "context", f"{facts['context']:,} tokens"
    yield "vocabulary", f"{facts['vocab_size']:,}{' (assumed)' if facts['vocab_size_assumed'] else ''}"
    if (ends := facts["ends"]) is not None:
        untied, tied = f"{ends['of_untied_tables']:.1%}", f"{ends['of_tied_tables']:.1%}"
        shares = f"{untied} of untied tables of tokens, {tied} of a tied one"
        yield "embedding and head", f"{ends['parameters']:,} parameters: {shares}"
    yield "forward FLOPs", f"{count(float(facts['flops_per_token']))} per token at {facts['length']:,} tokens"
    if facts["compression"]:
        yield "compression", ", ".join(facts["compression"])
    yield from ((text, size(facts["memory"][key])) for key, text in MEMORY.items() if key in facts["memory"])
    kernels = facts["kernels"]["summary"] if facts["trainable"] else "a quantised model is not trained"
    yield "training on a GPU", kernels
    if (seconds := facts.get("expected_seconds")) is not None:
        yield "expected time", f"about {duration(seconds)} on this machine"
    if run := facts.get("run") or {}:
        yield "checkpoint", run["checkpoint"] or "none yet"
    for kind in ("train", "validation"):
        record = {key: value for key, value in run.get(kind, {}).items() if isinstance(value, (int, float))}
        if numbers := {key: value for key, value in record.items() if not isinstance(value, bool)}:
            yield f"last {kind} record", _described(numbers)
    yield from _lineage(facts["lineage"] or {})
    if facts["tokenizer"]:
        yield "tokenizer", facts["tokenizer"][:16]


def _lineage(lineage: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "made_by" in lineage:
        yield "made by", str(lineage["made_by"])
    if training := lineage.get("training"):
        counts = [f"{n:,} {key}" for key, n in training.items() if isinstance(n, int) and not isinstance(n, bool)]
        measures = {key: value for key, value in training.items() if isinstance(value, float)}
        yield "trained", ", ".join([*counts, *filter(None, [_described(measures)])])
    for source in lineage.get("sources") or []:
        yield "source", _described(source)
    if "created" in lineage:
        yield "created", str(lineage["created"])
    if isinstance(versions := lineage.get("versions"), dict):
        yield "versions", ", ".join(f"{name} {number}" for name, number in versions.items())


def _study(facts: dict[str, Any]) -> Report:
    from braidlm.studies.tables import kind_label

    models, report = facts["models"], _report(facts)
    rows = [(m["name"], kind_label(m["kind"]), m["layers"], m["width"], *(m[key] for key in COSTS)) for m in models]
    columns = ("model", "", "layers", "width", "parameters", "active", "FLOPs per token")
    report.table(Table(columns, rows, keep=1)).text("")
    columns = ("training", "seeds", "words", "tokens", "epochs", "checkpoints", "expected time")
    trained = [m for m in models if m["training"]["epochs"]]  # an average is not
    report.table(Table(columns, [(m["name"], m["times"], *_training(m["training"])) for m in trained]))
    if facts["expected_seconds"] is not None:
        times = f", {len(facts['seeds'])} seeds" if len(facts["seeds"]) > 1 else ""
        report.text(f"all{times}: about {duration(facts['expected_seconds'])} on this machine\n")
    sources = {domain: [source] if isinstance(source, str) else source for domain, source in facts["domains"].items()}
    return report.table(Table(("domain", "source"), [(domain, " ".join(files)) for domain, files in sources.items()]))


def _training(training: dict[str, Any]) -> list[str]:
    """The row of a training, where what is not known yet is a dash."""
    known: list[tuple[Any, Callable[[Any], str]]] = [
        *((training[key], lambda amount: count(float(amount))) for key in ("words", "tokens")),
        (training["epochs"], "{:g}".format),
        (training["checkpoints"], str),
        (training["seconds"], lambda seconds: f"about {duration(seconds)}"),
    ]
    return ["-" if value is None else form(value) for value, form in known]


def _comparison(facts: dict[str, Any]) -> Report:
    """A row for each fact, a column for each model; facts that no model has are left out."""
    models, parts = facts["models"], [Path(model["name"]).parts for model in facts["models"]]
    length = next(n for n in range(1, 100) if len({part[-n:] for part in parts}) == len(set(parts)))
    names = ["/".join(part[-length:]) for part in parts]  # as much of the end as tells them apart
    rows = [(label, *(_found(model, label) for model in models)) for label in COMPARED]
    known = [row for row in rows if any(cell != "-" for cell in row[1:])]
    report = Report("").table(Table(("", *names), known, keep=1))
    for name, model in zip(names, models, strict=True):
        stages = [row["name"].split(": ", 1)[1] for row in model["stages"] if ": " in row["name"]]
        report.text(f"stages of {name}: {', '.join(stages)}")
    return report


def _found(facts: dict[str, Any], label: str) -> str:
    value: Any = facts
    for key in COMPARED[label].split("."):
        value = (value or {}).get(key)
    form = {"bits per byte": "{:.4f}".format, "tokenizer": lambda text: text[:16]}
    form |= {"weights, on disk": size, "weights, float32": size}
    return "-" if value is None else form.get(label, _value)(value)


def _stage_name(row: dict[str, Any]) -> str:
    name = f"{row['name']} of {', '.join(row['paths'])} ({row['join']})" if "paths" in row else row["name"]
    name = f"{name}, settles after {row['settles']} tokens" if "settles" in row else name
    return f"{name}, shared: {row['shared']}" if "shared" in row else str(name)


def _described(source: dict[str, Any]) -> str:
    """`data stories, tokens 338,006, subset (start 0, stop 0.95)`, for any keys but those that fill a page."""
    known = {key: value for key, value in source.items() if value is not None and key not in IN_LINEAGE_ALONE}
    texts = {key: f"({_value(v)})" if isinstance(v, (list, dict)) else _value(v) for key, v in known.items()}
    return ", ".join(f"{key.replace('_', ' ')} {text}" for key, text in texts.items())


def _value(value: Any) -> str:
    """A value of a lineage in words: of a SHA-256 the first twelve digits, a line break as it is written in code."""
    if isinstance(value, list):
        return "; ".join(map(_value, value))
    if isinstance(value, dict):
        return _described(value)
    if isinstance(value, float) and abs(value) >= 1000:
        return f"{value:,.0f}"
    return SHA_256.sub(lambda found: found[0][:12], cell_text(value)).replace("\n", "\\n")


def _data(facts: dict[str, Any]) -> Report:
    counts = {key: key for key in ("tokens", "documents", "words", "bytes")} | {"vocab_size": "vocabulary"}
    rows = [(label, _value(facts[key])) for key, label in counts.items() if key in facts]
    if facts.get("words"):
        rows.append(("tokens per word", f"{facts['tokens'] / facts['words']:.2f}"))
    if answers := facts.get("targets"):
        rows.append(("answers", f"{answers['tokens']:,} of the tokens, {answers['bytes']:,} bytes"))
    rows += [("token type", str(facts.get("dtype"))), ("tokenizer", str(facts.get("tokenizer"))[:16])]
    source = facts.get("source", {})
    rows += [(key.replace("_", " "), _value(value)) for key, value in source.items() if key != "key"]
    return Report("").text(f"packed data {facts['name']}").table(Table(("", ""), rows))


REPORTS: dict[str, Callable[[dict[str, Any]], Report]] = {"data": _data, "study": _study, "comparison": _comparison}
"""By kind of what is shown; anything else is one model."""
