"""Inheritance of options: a stage or a path takes those that it does not set from a template."""

from typing import Any


def inherit(base: Any, own: Any) -> Any:
    """Merge a part's own options into inherited ones; a part of another kind replaces them altogether."""
    base = {"kind": base} if isinstance(base, str) and isinstance(own, dict) else base
    own = {"kind": own} if isinstance(own, str) and isinstance(base, dict) else own
    if not isinstance(base, dict) or not isinstance(own, dict):
        return own
    if "kind" in own and own["kind"] != base.get("kind", own["kind"]):
        return own
    merged = dict(base)
    for key, value in own.items():
        merged[key] = inherit(base[key], value) if key in base else value
    return merged
