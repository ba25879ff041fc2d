"""Attribute docstrings of a class, which serve as help texts."""

import ast
import inspect
import textwrap
from itertools import pairwise


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
