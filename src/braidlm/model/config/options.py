"""Options over options: what a stage, a path or a recipe does not say is taken from what it refines."""

from typing import Any


def merge_options(base: Any, override: Any) -> Any:
    """Options over options. A part of another kind replaces the inherited one; of the same kind, it refines it."""
    base = {"kind": base} if isinstance(base, str) and isinstance(override, dict) else base
    override = {"kind": override} if isinstance(override, str) and isinstance(base, dict) else override
    if not isinstance(base, dict) or not isinstance(override, dict):
        return override
    if "kind" in override and override["kind"] != base.get("kind", override["kind"]):
        return override
    merged = dict(base)
    for key, value in override.items():
        merged[key] = merge_options(base[key], value) if key in base else value
    return merged
