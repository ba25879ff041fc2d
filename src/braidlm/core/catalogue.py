"""The registered parts with their options, read from the classes themselves: written once, shown everywhere."""

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from typing import Any

from braidlm.model.parts import REGISTRIES
from braidlm.model.strict import encode


def list_parts() -> list[dict[str, Any]]:
    """Every part: its kind, name, what it is, and its options with their defaults and help."""
    return [
        {"kind": kind, "name": name, "about": about(registry[name]), "options": _options(registry[name])}
        for kind, registry in REGISTRIES.items()
        for name in registry
    ]


def _options(part: Any) -> list[dict[str, Any]]:
    return list_options(part.Config) if hasattr(part, "Config") else []  # a function has none


def list_options(config: type) -> list[dict[str, Any]]:
    """The fields of a configuration class."""
    docs = attribute_docs(config)
    return [
        {"name": f.name, "default": _default(f), "required": _required(f), "about": docs.get(f.name, "")}
        for f in fields(config)
    ]


def about(part: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(part) or "").split("\n")[0]


def attribute_docs(cls: type) -> dict[str, str]:
    """The text under each attribute of a class, those it inherits included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # a class of C, or made without a file
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for pair in pairwise(body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def _required(field: Field) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _default(field: Field) -> Any:
    """The default as it would stand in a recipe."""
    if field.default is not MISSING:
        return encode(field.default)
    return None if field.default_factory is MISSING else encode(field.default_factory())
