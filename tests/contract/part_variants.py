"""Every registered part with every option at a value that is not its default, found from the types of the options."""

import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from braidlm.model.config.registry import PARTS, import_files
from braidlm.model.config.strict import encode, part_of

import_files("braidlm.model")  # a registry exists once its file has been imported

PLACES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "stage": lambda part: {"stages": [{part.pop("kind"): part}] * 2},
    "sharing": lambda part: {"stages": [{"block": {"layers": 4, "share": part}}]},
    "attention": lambda part: {"block": {"attention": {"heads": 4, **part}}},
    "feed-forward": lambda part: {"block": {"feed": part}},
    "norm": lambda part: {"block": {"norm": part}},
    "join": lambda part: {"stages": [{"parallel": {"layers": 2, "paths": 2, "join": part}}]},
    "routing loss": lambda part: {
        "stages": [{"parallel": {"paths": 2, "join": {"kind": "gumbel_v1", "losses": {part["kind"]: 0.1}}}}]
    },
    "positions": lambda part: {"positions": part},
    "rope scaling": lambda part: {"positions": {"scaling": part}},
    "embedding": lambda part: {"embedding": part, "tie_embeddings": part["kind"] == "tokens"},
    "head": lambda part: {"head": part, "tie_embeddings": part["kind"] == "linear"},
    "initialisation": lambda part: {"initialisation": part},
    "compression": lambda part: {"compression": [{part.pop("kind"): part}]},
    "projection": lambda part: {"stages": [{"project": {"to": 16, "experts": {"names": 3, **part}}}, {"block": {}}]},
    "gate": lambda part: {"stages": [{"block": {"layers": 3}}], "gates": {"kind": part}},
}
"""Where a part of each kind is in an architecture."""

HALVES = [{"name": "b", "width": 8}, {"name": "a", "width": 8}]
UNEQUAL = [{"name": "b", "width": 4}, {"name": "a", "width": 12}]
"""Paths whose names are not in the order of the alphabet, which a saved configuration must not bring them into."""
REQUIRED: dict[tuple[str, str], dict[str, Any]] = {
    ("stage", "project"): {"to": 16},
    ("stage", "parallel"): {"paths": 2},
    ("norm", "per_path"): {"paths": HALVES},
    ("head", "average"): {"paths": HALVES},
    ("head", "mixture"): {"paths": HALVES},
    ("head", "posterior"): {"paths": HALVES},
    ("compression", "low_rank"): {"ranks": {"stages.*": 4}},
    ("compression", "int8"): {"modules": ["stages.*"]},
    ("compression", "int4"): {"modules": ["stages.*"], "group": 8},
    ("rope scaling", "linear"): {"factor": 4.0},
    ("rope scaling", "llama3"): {"factor": 4.0, "original_context": 8},
    ("rope scaling", "yarn"): {"factor": 4.0, "original_context": 256},
}
"""Options that have no default."""
VALUES: dict[str, list[Any]] = {
    "losses": [{"z_loss": 0.1}],
    "names": [3, ["a", "b", "c"]],
    "paths": [3, {"a": {"width": 8}, "b": {"width": 8}}, UNEQUAL],
    "experts": [3, 0.25],
    "width": [16],
    "new": [["expert_3"], ["path_2"]],
    "join": ["add", "routed"],
    "kind": ["swiglu"],
    "router": [{}],
    "stacked": ["with_experts", False],
    "scaling": [{"kind": "yarn", "factor": 4.0, "original_context": 256}],
}
"""By the option's name, where its type does not tell; anything else is found by `alternatives`."""
COMPANIONS: dict[str, dict[str, Any]] = {
    "kv_bias": {"keys": "shared"},
    "activation": {"hidden": 8},
    "new": {"top_k": 1},
    "base_top_k": {"new": ["expert_3"], "top_k": 3},
    "join base_top_k": {"new": ["path_2"]},
    "share": {"layers": 2},
    "stacked": {"feed": {"experts": 3}},
}
"""By the name of an option of a stage, experts, a router or a join, what it needs beside it."""
SCALARS: dict[Any, list[Any]] = {
    bool: [True, False],
    int: [2, 3, 1, 4, 8, 16, 24],
    float: [0.25, 2.0, 1e-3],
    str: ["a"],
}

Variant = tuple[str, str, str, Callable[[], Iterator[dict[str, Any]]]]
"""Noun, kind, option with dots, and architectures to try until one can be built."""


def every_option() -> Iterator[Variant]:
    """One variant for each option of each part; options of a nested configuration once for all parts of a noun."""
    for noun, registry in PARTS.items():
        nested: set[str] = set()
        for kind in registry:
            config = getattr(registry[kind], "Config", None)
            options = [] if config is None else list(_options(config, nested))
            yield noun, kind, "", lambda n=noun, k=kind: iter([architecture(n, k, {})])
            for path, values in options:
                yield noun, kind, ".".join(path), lambda n=noun, k=kind, p=path, v=values: _candidates(n, k, p, v)


def architecture(noun: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    return PLACES[noun]({"kind": kind, **REQUIRED.get((noun, kind), {}), **options})


def _candidates(noun: str, kind: str, path: tuple[str, ...], values: list[Any]) -> Iterator[dict[str, Any]]:
    for value in values:
        option: Any = value
        for name in reversed(path[1:]):
            option = {name: option} | COMPANIONS.get(name, {}) | ({"names": 3} if name == "router" else {})
        if path[0] == "experts" and len(path) > 1 and isinstance(option, dict):
            option = {"names": 3, **option}
        beside = COMPANIONS.get(f"{noun} {path[0]}", COMPANIONS.get(path[0], {})) if noun in ("join", "stage") else {}
        yield architecture(noun, kind, {path[0]: option, **beside})


def _options(
    config: type, nested: set[str], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    hints = get_type_hints(config, include_extras=True)
    for field in fields(config):
        path, hint = (*prefix, field.name), hints[field.name]
        inner = _dataclass_in(hint)
        values = [value for value in alternatives(field.name, hint) if value != _default(field)]
        if values:
            yield path, values
        if inner is not None and f"{inner.__name__}.{field.name}" not in nested:
            nested.add(f"{inner.__name__}.{field.name}")
            yield from _options(inner, nested, path)


def alternatives(name: str, hint: Any) -> list[Any]:
    """Values that an option of this type may have."""
    if name in VALUES:
        return VALUES[name]
    if get_origin(hint) in (Union, types.UnionType):
        return [value for arm in get_args(hint) if arm is not type(None) for value in alternatives(name, arm)]
    part = part_of(hint)
    if part is not None:
        return list(part.registry)
    if get_origin(hint) is Annotated:
        return alternatives(name, get_args(hint)[0])
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return SCALARS.get(hint, [])


def _dataclass_in(hint: Any) -> Any:
    arms = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((arm for arm in arms if is_dataclass(arm)), None)


def _default(field: Any) -> Any:
    if field.default is not MISSING:
        return field.default
    return encode(field.default_factory()) if field.default_factory is not MISSING else None
