"""Writes docs/reference.md from the code itself: verbs, recipe keys, parts. Run it after changing any of them.

python docs/generate_reference.py
"""

import argparse
import dataclasses
import json
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from braidlm.cli.list import WHAT
from braidlm.cli.main import make_parser
from braidlm.core.catalogue import about, list_options, registries
from braidlm.core.recipes import list_recipes
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.order import orders, pacings
from braidlm.model.config.braid_config import Architecture
from braidlm.model.config.ranges import MAX_INTEGER
from braidlm.model.config.registry import Registry
from braidlm.model.config.strict import part_of, plain_type, range_of
from braidlm.model.stages import BlockConfig
from braidlm.studies.steps import KINDS, Step, StepTraining, TrainStep
from braidlm.studies.study import Study
from braidlm.training.amounts import Amount, Pace
from braidlm.training.features.averaging import averages
from braidlm.training.features.extra_losses import extra_losses
from braidlm.training.features.modules import dropout_schedules
from braidlm.training.recipe import CheckpointConfig, LogConfig, Recipe, SampleConfig, ValidationConfig
from braidlm.training.schedules import schedules
from braidlm.training.step.optimizers.contract import optimizers

TARGET = Path(__file__).with_name("reference.md")
OF_TRAINING = (chunkings, orders, pacings, schedules, dropout_schedules, optimizers, averages, extra_losses)
ALL_PARTS = {**registries(), **{registry.noun: registry for registry in OF_TRAINING}}
WORDS = {int: "whole number", float: "number", str: "text", bool: "true, false", Amount: "amount", Pace: "pace"}
HEAD = """# Reference

Generated from the code by `python docs/generate_reference.py`; do not edit. How recipes are written and changed is in
[recipes.md](recipes.md).

- [Verbs](#verbs)
- [Recipe keys](#recipe-keys)
- [Study keys](#study-keys)
- [Model keys](#model-keys)
- [Parts](#parts)
- [Data](#data)
- [Recipes](#recipes)
"""


def reference() -> str:
    """The whole page."""
    lines = [
        HEAD,
        "## Verbs\n",
        "Every verb also takes `--quiet` (results and errors only) and `--debug` (the traceback of an error).\n",
        *verbs(),
        "## Recipe keys\n",
        "An *amount* is `500 steps`, `2.5M tokens` or `10M words`; a *pace* is an amount, or several: "
        "`1M words to 10M, then 10M`.\n",
        *keys_of(Recipe, "", "The top of a recipe"),
        "## Study keys\n",
        "A recipe with `domains` is a study. Its `training`, `checkpoints`, `validation`, `samples` and `log` have the "
        "[keys of a recipe](#recipe-keys), but there is no `training.budget`: budgets follow from `epochs`.\n",
        *keys_of(Study, "", "The top of a study", known=(*SHARED, Step)),
        *(line for kind in (TrainStep, *KINDS.values()) for line in step_keys(kind)),
        *keys_of(StepTraining, "steps.NAME.train", about(StepTraining).rstrip(".")),
        "## Model keys\n",
        "`model` in a recipe, or the top of a model preset (`recipes/models/`). `vocab_size` may be given beside these "
        "keys; without it, it is the tokenizer's. `block` and `dropout` are what stages inherit.\n",
        *keys_of(Architecture, "model", "The architecture"),
        *keys_of(BlockConfig, "model.block", "What every block stage inherits"),
        "## Parts\n",
        "A part is written as its name (`norm: rms`) or as a mapping with its options "
        "(`norm: {kind: rms, eps: 1e-6}`); a stage as `- block` or `- block: {layers: 2}`.\n",
        *(line for noun, registry in ALL_PARTS.items() for line in parts(noun, registry)),
        "## Data\n",
        *table(
            ("source", "files", ""),
            ((f"`{r['name']}`", " ".join(f"`{f}`" for f in r["files"]), r["about"]) for r in WHAT["data"][0]()),
        ),
        "## Recipes\n",
        *table(("name", ""), ((f"`{name}`", text) for name, text in list_recipes())),
    ]
    return "\n".join(lines).rstrip() + "\n"


def verbs() -> Iterator[str]:
    """A section for each verb: how it is called and its options, from its argument parser."""
    actions = make_parser()._subparsers._group_actions  # type: ignore[union-attr]
    for name, parser in actions[0].choices.items():  # type: ignore[union-attr, attr-defined]
        own = [a for a in parser._actions if not isinstance(a, argparse._HelpAction) and a.dest not in COMMON]
        given = [_usage(action) for action in own if not action.option_strings]
        options = ["[options]"] if len(own) > len(given) else []
        yield f"### braid {name}\n"
        yield f"{_capital(parser.description or '')}.\n"
        yield f"```text\n{' '.join(['braid', name, *given, *options])}\n```\n"
        yield from table(("", ""), ((f"`{_option(action)}`", action.help or "") for action in own))


COMMON = ("quiet", "debug")


def _usage(action: argparse.Action) -> str:
    word = str(action.metavar or action.dest)
    return {"*": f"[{word} ...]", "+": f"{word} [{word} ...]"}.get(str(action.nargs), word)


def _option(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    if action.nargs == 0:
        return action.option_strings[-1]
    values = "|".join(map(str, action.choices)) if action.choices else str(action.metavar or action.dest.upper())
    return f"{action.option_strings[-1]} {values}"


def keys_of(cls: type, path: str, title: str, known: tuple[type, ...] = ()) -> Iterator[str]:
    """A table of a configuration class's keys, then those of the classes inside it but for those that are `known`."""
    yield f"### {f'`{path}`: ' if path else ''}{title}\n"
    hints = get_type_hints(cls, include_extras=True)
    options = list_options(cls)
    rows = ((f"`{o['name']}`", type_words(hints[o["name"]]), _written(o), o["about"]) for o in options)
    yield from table(("key", "value", "default", ""), rows)
    for option in options:
        found = _inner_class(hints[option["name"]])
        if found is not None and found[0] not in known:
            inner, step = found
            yield from keys_of(inner, f"{path}.{option['name']}{step}".lstrip("."), about(inner).rstrip("."), known)


SHARED = (CheckpointConfig, ValidationConfig, SampleConfig, LogConfig)
"""What a study has in common with a recipe."""


def step_keys(kind: type[Step]) -> Iterator[str]:
    """The keys of a kind of step."""
    yield from keys_of(kind, "steps.NAME", f"{kind.kind}. {about(kind)}".rstrip("."), known=(StepTraining,))


def parts(noun: str, registry: Registry) -> Iterator[str]:
    """The parts of one kind that Braid itself has."""
    yield f"### {noun}\n"
    for name in registry:
        part = registry[name]
        if not part.__module__.startswith("braidlm."):
            continue  # another package's, which happens to be installed
        yield f"**`{name}`**: {about(part)}\n"
        if not hasattr(part, "Config"):
            continue  # a plain function, without options
        hints = get_type_hints(part.Config, include_extras=True)
        options = list_options(part.Config)
        rows = ((f"`{o['name']}`", type_words(hints[o["name"]]), _written(o), o["about"]) for o in options)
        if options:
            yield from table(("option", "value", "default", ""), rows)


def type_words(hint: Any) -> str:
    """What may be written for a value of this type."""
    part = part_of(hint)
    if part is not None and get_origin(hint) is Annotated:
        return f"[{part.registry.noun}](#{part.registry.noun.replace(' ', '-')})"
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        words = [type_words(arm) for arm in inner if arm is not type(None)]
        return " or ".join([*words, *(["null"] if type(None) in inner else [])])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is list or inner[-1:] == (Ellipsis,):
        return f"list of {type_words(inner[0])}"
    if origin is tuple:
        return f"list of {len(inner)}: {type_words(inner[0])}"
    if origin is dict:
        return f"name: {type_words(inner[1])}"
    return " ".join([WORDS.get(plain_type(hint), "mapping"), _range_words(hint)]).strip()


def _range_words(hint: Any) -> str:
    """The range of a number; a limit that only the number's size in memory sets is left out."""
    allowed = range_of(hint)
    if allowed is None:
        return ""
    return str(replace(allowed, at_most=None) if allowed.at_most == MAX_INTEGER else allowed)


def _inner_class(hint: Any) -> tuple[type, str] | None:
    """The configuration class inside a type, and how a path goes into it."""
    if hint in WORDS or part_of(hint) is not None:
        return None
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint, ""
    origin = get_origin(hint)
    if origin in (list, dict):
        found = _inner_class(get_args(hint)[-1])
        return None if found is None else (found[0], "[i]" if origin is list else ".NAME")
    if origin in (Union, types.UnionType):
        return next(filter(None, map(_inner_class, get_args(hint))), None)
    return None


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _written(option: dict[str, Any]) -> str:
    """A default as a recipe would have it."""
    if option["required"]:
        return "(needed)"
    default = option["default"]
    if isinstance(default, dict):
        return f"`{default['kind']}`" if "kind" in default else "see below" if default else ""
    return f"`{default if isinstance(default, str) and default.strip() else json.dumps(default)}`"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A Markdown table and an empty line; nothing for no rows."""
    body = [[_cell(text) for text in row] for row in rows]
    if not body:
        return
    header = list(columns)
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    yield from (f"| {' | '.join(row)} |" for row in body)
    yield ""


def _cell(text: str) -> str:
    """Text that neither ends a cell nor, outside of code, is taken for HTML."""
    pieces = re.split(r"(`[^`]*`)", text.replace("|", "\\|").replace("\n", " "))
    return "".join(p if p.startswith("`") else p.replace("<", "&lt;") for p in pieces)


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
