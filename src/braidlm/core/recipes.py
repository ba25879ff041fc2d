"""Recipes: YAML files found by name, composed by Hydra with `key=value` overrides, then decoded strictly elsewhere."""

import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.reading import check_openable, parse_yaml, read_bytes

_HYDRA_RAISES = (ValueError, TypeError, AttributeError, KeyError, AssertionError, OSError, RecursionError)
_OVERRIDE = re.compile(r"^(\+{1,2}|~)?([A-Za-z_][\w.\[\]-]*)(=.*)?$", re.DOTALL)
_ANY_KEY = "++key"
_PLAIN = re.compile(r"=?[\w./+-]*", re.ASCII)
"""A value that means the same to Hydra and to YAML; reading it needs no parser."""
_COMMENT = re.compile(r"(^|\s)#")
_INDEX, _DOTTED = re.compile(r"\[(\d+)\]"), r".\1"


def recipe_root() -> Path:
    """The folder of the recipes that come with Braid, in an installed package or in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def list_recipes() -> list[tuple[str, str]]:
    """Names and first comment lines of the recipes that come with Braid."""
    root = recipe_root()
    first_lines = {path: path.read_text(encoding="utf-8").split("\n", 1)[0] for path in sorted(root.rglob("*.yaml"))}
    return [
        (str(path.relative_to(root).with_suffix("")), line.lstrip("# ").strip()) for path, line in first_lines.items()
    ]


def find_recipe(name: str) -> Path:
    """A recipe by its name (`tiny/gpt2`) or its file."""
    path = Path(os.path.expanduser(name))
    if path.suffix == ".yml":
        raise BraidError("a recipe file ends in .yaml; Hydra reads no other", name, "Rename it.")
    if path.suffix == ".yaml":
        if not os.path.lexists(path) and path.parent.is_dir():
            near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.yaml")])
            raise BraidError(f"this file does not exist{near and '.'}{near}", name)
        if not os.path.isfile(path):
            read_bytes(path)  # says what is in its place
        return path.resolve()
    known = recipe_root() / f"{name}.yaml"
    if os.path.isfile(known):
        return known
    if not os.path.isdir(path):
        check_openable(path)
    todo = "`braid list recipes` shows those that come with Braid; a recipe of your own is given as FILE.yaml."
    raise BraidError(f"there is no recipe '{name}'.{did_you_mean(name, [n for n, _ in list_recipes()])}", todo=todo)


def compose_recipe(name: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """The recipe as plain data: its defaults lists followed, overrides applied, interpolations resolved."""
    # Hydra takes a third of a second to import, and `braid list recipes` has no need of it.
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from braidlm.core import hydra_changes as hydra

    path = find_recipe(name)
    with hydra.recorded_environment() as variables:
        try:
            # A recipe is composed from its own folder, so that it needs no package header; `/models/gpt2@model` in its
            # defaults list is found through the search path.
            parsed = filter(None, map(_parsed, overrides or []))
            changed = {key for sign, key, _ in parsed if sign != "+"}  # `+` adds a choice to a defaults list
            with hydra.bounded_interpolation(), hydra.hydra_in(path.parent, changed):
                data = resolved(hydra.compose_quickly(path.stem, hydra_overrides(overrides)))
        except BraidError:
            raise
        except YAMLError as error:
            raise BraidError(f"this is not valid YAML: {error}", str(path)) from error
        # Hydra and OmegaConf raise plain errors of many kinds for values in places where they expect others.
        except (HydraException, OmegaConfBaseException, *_HYDRA_RAISES) as error:
            _check_environment(variables, path)
            _raise_missing(name, overrides or [], path)
            first = (str(error).strip() or str(error.__cause__)).split("\n")[0]
            if isinstance(error, RecursionError):
                first = "its defaults lists or interpolations lead in a circle"
            given = f"Overrides are written key=value, or ~key to remove one; given were: {' '.join(overrides or [])}"
            todo = given if overrides else None
            raise BraidError(f"this recipe cannot be composed: {first}", str(path), todo) from error
    _check_environment(variables, path)
    if not isinstance(data, dict):
        raise BraidError("a recipe is a mapping of keys to values", str(path))
    return {str(key): value for key, value in data.items()}


def is_study(data: dict[str, Any]) -> bool:
    """Whether a composed recipe is a study (`domains`) and not a single run (`data.sets`)."""
    return "domains" in data


def resolved(config: Any) -> Any:
    """What Hydra composed as plain data; `${of_width:1/2}` in a model is half of its width."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("of_width", _of_width, replace=True)
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def _of_width(factor: str | float, *, _parent_: Any) -> int:
    """The width of the model around the key, times `factor`, rounded down to a whole number of at least 1."""
    from omegaconf import DictConfig

    node = _parent_
    while node is not None and not (isinstance(node, DictConfig) and "stages" in node):
        node = node._get_parent()
    if node is None:
        raise ValueError("${of_width:...} stands in a model, which has a `width` and `stages`")
    width = node.get("width")
    # A width that is no number is told once, when the model is decoded, and not for every size that follows from it.
    return max(1, int(width * Fraction(str(factor)))) if isinstance(width, int) else 1


def _check_environment(variables: list[str], path: Path) -> None:
    """A recipe may be a stranger's, and what it reads is written to files: the environment has tokens and passwords."""
    if variables:
        what = f"this recipe reads the environment: {', '.join(dict.fromkeys(variables))}"
        raise BraidError(what, str(path), "Set BRAID_ALLOW_ENV=1 if you trust it.")


def hydra_overrides(overrides: list[str] | None, sweeps: bool = False) -> list[str]:
    """Overrides in Hydra's grammar, with Braid's own recipes in the search path; `key=value` may set what the file
    leaves to its default. With `sweeps`, `key=a,b` are several values.

    Strict decoding then finds misspelled keys. Hydra would refuse such a key and advise `+key`, which it then accepts
    whatever the spelling.
    """
    written = [f"hydra.searchpath=[{quoted(f'file://{recipe_root()}')}]"]
    for override in overrides or []:
        if (parsed := _parsed(override)) is not None:
            sign, key, value = parsed
            if not key.isascii():
                raise BraidError(
                    f"{key}: a key of the command line has letters from a to z", todo="Write it into a file."
                )
            value = value if _PLAIN.fullmatch(value) else _as_hydra_reads(key, value, sweeps)
            override = f"{'++' if not sign and value else sign}{key}{value}"
        written.append(override)
    return written


def _as_hydra_reads(key: str, value: str, sweeps: bool) -> str:
    """A value with its `=`, in Hydra's grammar: one that it cannot read is YAML, as in a file."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    text, todo = value[1:], f"Write a text in quotes of its own: '{key}=\"...\"'"
    try:
        parsed = OverridesParser.create().parse_override(f"{_ANY_KEY}{value}")
    except HydraException:
        if _COMMENT.search(text):  # the rest would be lost in silence
            raise BraidError(f"{key}: after '#' YAML has a comment: {text}", todo=todo) from None
        return f"={_in_hydra_grammar(_yaml(key, text, todo), key, todo)}"
    if not parsed.is_sweep_override() or sweeps:
        return value
    if ", " in text and parsed.is_choice_sweep() and "(" not in text:
        return f"={quoted(text)}"  # a sentence
    what = f"{key}: {text} are several values, which `braid train --multirun` takes"
    raise BraidError(what, todo=f"A decimal number has a point, a list has brackets. {todo}")


def _yaml(key: str, text: str, todo: str) -> Any:
    """What a text is in YAML; within brackets a colon needs no blank after it, as it needs none for Hydra."""
    if text[:1] in ("[", "{") and not set("'\"") & set(text):
        text = re.sub(r":(?=[\w{\[])", ": ", text)
    try:
        return parse_yaml(text, key, object)
    except BraidError:
        raise BraidError(f"{key}: this is not YAML: {text:.60}", todo=todo) from None


def _in_hydra_grammar(value: Any, key: str, todo: str) -> str:
    """Plain data as Hydra's grammar writes it."""
    if isinstance(value, list):
        return f"[{','.join(_in_hydra_grammar(one, key, todo) for one in value)}]"
    if isinstance(value, dict):
        for name in value:
            if not re.fullmatch(r"[A-Za-z_]\w*", str(name), re.ASCII):
                raise BraidError(f"{key}: the key '{name}' cannot stand on the command line", todo=todo)
        pairs = (f"{name}:{_in_hydra_grammar(one, key, todo)}" for name, one in value.items())
        return f"{{{','.join(pairs)}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if isinstance(value, int | float) else quoted(str(value))


def quoted(text: str) -> str:
    """A text as a quoted value in Hydra's override grammar."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"  # backslashes mean themselves, but before a quote


def _parsed(override: str) -> tuple[str, str, str] | None:
    """The sign (`+`, `++`, `~` or nothing), the key as Hydra writes it (`stages.2` where our errors write `stages[2]`),
    and the value with its `=`, or nothing; None for a choice of a defaults group (`models@model=...`)."""
    match = _OVERRIDE.match(override)
    return match and (match[1] or "", _INDEX.sub(_DOTTED, match[2]), match[3] or "")


def _raise_missing(name: str, overrides: list[str], path: Path) -> None:
    """Tell every key that an override needs and the recipe does not have: `~key` removes, `list[2]` is an element."""
    needy: dict[str, tuple[bool, list[str]]] = {}
    for override in overrides:
        sign, key, _ = _parsed(override) or ("", "", "")
        steps = key.split(".")
        if sign == "~" or any(step.isdigit() for step in steps):
            needy[override] = sign == "~", steps
    if needy:
        recipe = compose_recipe(name, [override for override in overrides if override not in needy])
        found = (_missing(override, *needs, recipe) for override, needs in needy.items())
        if problems := [problem for problem in found if problem]:
            raise BraidError("\n".join(problems), str(path))


def _missing(override: str, removes: bool, steps: list[str], recipe: Any) -> str | None:
    """What the override names and the recipe does not have, with the nearest name; None where it has it all."""
    named = override.partition("=")[0] if removes else override  # Hydra's sweeps write ~key=null
    node, where = recipe, ""
    for at, step in enumerate(steps):
        if isinstance(node, dict):
            children = {str(key): value for key, value in node.items()}
            if step not in children:
                inside = f" in '{where}'" if where else ""
                problem = f"{named}: there is no key '{step}'{inside}.{did_you_mean(step, children)}"
                return problem if removes else None  # others make the key
            node, where = children[step], f"{where}.{step}" if where else step
        elif isinstance(node, list):
            if not step.isdigit() or int(step) >= len(node):
                return f"{named}: '{where}' is a list of {len(node)} and has no [{step}]"
            if removes and at + 1 == len(steps):
                return f"{named}: an element of a list cannot be removed; write the list anew: {where}=[...]"
            node, where = node[int(step)], f"{where}[{step}]"
        else:
            return f"{named}: '{where}' is {node!r} and has no keys" if removes else None
    return None
