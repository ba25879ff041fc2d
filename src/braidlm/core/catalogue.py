"""The registered parts with their options, read from their classes."""

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from typing import Any

from braidlm.model.config.registry import PARTS, Registry, import_files
from braidlm.model.config.strict import encode


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
    return [
        {"kind": kind, "name": name, "about": about(registry[name]), "options": _options(registry[name])}
        for kind, registry in registries().items()
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
        if f.init
    ]


def about(part: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(part) or "").split("\n")[0]


def _required(field: Field) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _default(field: Field) -> Any:
    """The default as a recipe would write it."""
    if field.default is not MISSING:
        return encode(field.default)
    return None if field.default_factory is MISSING else encode(field.default_factory())
