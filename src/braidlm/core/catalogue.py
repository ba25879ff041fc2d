"""The registered parts with their options, read from their classes."""

import ast
import inspect
import textwrap
from dataclasses import MISSING, fields
from functools import cache
from itertools import pairwise
from typing import Any

from braidlm.model.config.registry import PARTS, Registry, import_files
from braidlm.model.config.strict import encode


@cache
def attribute_docs(cls: type) -> dict[str, str]:
    """The docstring of each attribute of a class, inherited ones included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # a built-in class, or one without a source file
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for pair in pairwise(body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def registries() -> dict[str, Registry]:
    """The registries of all parts of the model, by kind; a registry exists once its file has been imported."""
    import_files("braidlm.model")
    return dict(sorted(PARTS.items()))


def list_parts() -> list[dict[str, Any]]:
    """Every part: its kind, name, description, and its options with their defaults and help."""
    parts = ((kind, name, registry[name]) for kind, registry in registries().items() for name in registry)
    return [
        # A part that is a function has no options.
        {"kind": kind, "name": name, "about": about(part), "options": list_options(getattr(part, "Config", None))}
        for kind, name, part in parts
    ]


def list_options(config: type | None) -> list[dict[str, Any]]:
    """The fields of a configuration class, with their defaults as a recipe would write them."""
    docs = {} if config is None else attribute_docs(config)
    options = []
    for field in fields(config) if config is not None else ():  # type: ignore[arg-type]
        if field.init:
            factory = field.default_factory
            default = field.default if factory is MISSING else factory()
            told = {"name": field.name, "default": None if default is MISSING else encode(default)}
            options.append(told | {"required": default is MISSING, "about": docs.get(field.name, "")})
    return options


def about(part: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(part) or "").split("\n")[0]
