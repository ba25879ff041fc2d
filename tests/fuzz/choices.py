"""Values for options, drawn from their types: all that is registered is reached, in any combination.

A case is one random number, so that no two are alike; strategies would make most cases from earlier ones.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from random import Random
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from braidlm.model.config.registry import inherit
from braidlm.model.config.strict import part_of, plain_type, range_of, type_hints
from braidlm.training.amounts import Amount, Pace
from tests.contract.part_variants import every_option
from tests.fuzz.mutations import HOSTILE

CASES = st.randoms(use_true_random=True)
Known = Mapping[str, list[Any]]
"""Values by an option's name, or by its class and name, where its type does not tell."""
VALUES: dict[Any, list[Any]] = {
    bool: [True, False],
    int: [1, 2, 3, 0, 4, 5, 8, 16, -1],
    float: [0.5, 1.0, 0.25, 0.0, 1e-3, 0.999, 2.0, 1e-30, -1.0],
    type(None): [None],
}
AMOUNTS = ["1 steps", "2 steps", "3 steps", "64 tokens", "20 words", 2]
RARELY = 1 / 100
"""How often a value does not belong where it is."""


def options_of(rng: Random, config: Any, known: Known, most: int = 3) -> dict[str, Any]:
    """What a dataclass needs and up to `most` of its other options."""
    given = [one for one in fields(config) if one.init]
    needed = [one.name for one in given if one.default is MISSING and one.default_factory is MISSING]
    others = [one.name for one in given if one.name not in needed]
    chosen = rng.sample(others, min(len(others), rng.randint(0, most)))
    hints, own = type_hints(config), {name: f"{config.__name__}.{name}" for name in [*needed, *chosen]}
    return {name: value_of(rng, hints[name], known, own[name] if own[name] in known else name) for name in own}


def value_of(rng: Random, hint: Any, known: Known, name: str = "") -> Any:
    """A value of a type, and once in a while one that does not belong."""
    origin = get_origin(hint)
    if rng.random() < RARELY:
        return rng.choice(HOSTILE)
    if name in known:
        return rng.choice(known[name])
    if origin in (Union, types.UnionType):
        return value_of(rng, rng.choice(get_args(hint)), known)
    if (part := part_of(hint)) is not None:
        kind = rng.choice(sorted(part.registry))
        config = getattr(part.registry[kind], "Config", None)
        options = {} if config is None else options_of(rng, config, known, 2)
        return {kind: options} if part.by_key else {"kind": kind, **options}
    if origin is Annotated:
        fitting = [one for one in VALUES.get(plain_type(hint), []) if (range_of(hint) or [one]).__contains__(one)]
        return rng.choice(fitting) if fitting else value_of(rng, plain_type(hint), known)
    if origin is Literal:
        return rng.choice(get_args(hint))
    if origin in (list, tuple):
        return [value_of(rng, get_args(hint)[0], known) for _ in range(rng.randint(0, 2))]
    if origin is dict:
        names = rng.sample(known["text"], rng.randint(0, 2))
        return {name: value_of(rng, get_args(hint)[1], known) for name in names}
    if is_dataclass(hint):
        return rng.choice(AMOUNTS) if hint in (Amount, Pace) else options_of(rng, hint, known)
    return rng.choice(VALUES.get(hint, known["text"]))


def architecture_of(rng: Random) -> dict[str, Any]:
    """An architecture with up to three options of registered parts that are not at their defaults."""
    architecture: dict[str, Any] = {}
    for _, _, _, candidates in rng.sample(VARIANTS, rng.randint(0, 3)):
        architecture = inherit(architecture, rng.choice(list(candidates())))
    return architecture


VARIANTS = list(every_option())
