"""LoRA through peft: the matrices of a model that can have adapters, and the adapters themselves."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.model.routing.router import ScoreLinear
from braidlm.model.routing.stacked import StackedLinear


def check_peft(otherwise: str) -> None:
    """Raise an error early if peft is not installed; `otherwise` is what can be done without it."""
    try:
        import peft  # noqa: F401
    except ImportError:
        what = "peft, which trains adapters, is not installed"
        raise BraidError(what, todo=f"pip install 'braidlm[eval]', or {otherwise}") from None


def matrices(model: nn.Module) -> dict[str, nn.Module]:
    """All matrices between embedding and head by name: single ones, and stacks of them."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith("model.stages.") and isinstance(module, (nn.Linear, StackedLinear))
    }


def adaptable(model: nn.Module) -> list[str]:
    """The names of the matrices that get adapters unless others are chosen: all but the matrices of routers."""
    found = matrices(model).items()
    return [name for name, module in found if not (isinstance(module, ScoreLinear) or name.endswith(".router"))]


def choose_names(names: Sequence[str], wanted: str | Sequence[str]) -> list[str]:
    """The names among these with one of these ends (`qkv`, `feed.out`), or that a regular expression matches whole."""
    if isinstance(wanted, str):
        try:
            chosen = [name for name in names if re.fullmatch(wanted, name)]
        except re.error as error:
            raise BraidError(f"'{wanted}' is not a regular expression: {error}") from error
        if not chosen:
            raise BraidError(f"no matrix has a name that '{wanted}' matches", todo=f"Names are like {names[0]}.")
        return chosen
    known = dict.fromkeys(name.rpartition(".")[2] for name in names)
    if not wanted:
        raise BraidError("no matrix is named", todo=f"The model has {', '.join(known)}.")
    chosen = []
    for end in wanted:
        if not (named := [name for name in names if f".{name}".endswith(f".{end}")]):
            what = f"the model has no matrix '{end}'.{did_you_mean(end, known)}"
            raise BraidError(what, todo=f"It has {', '.join(known)}.")
        chosen += named
    return [name for name in names if name in chosen]


def split_stacks(model: nn.Module, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The names of single matrices, and of the parameters that hold a stack of them, as peft takes them."""
    stacks = {name for name in names if isinstance(model.get_submodule(name), StackedLinear)}
    return [name for name in names if name not in stacks], [f"{name}.weight" for name in names if name in stacks]


def lora(model: Any, names: Sequence[str], rank: int, alpha: float, dropout: float, **options: Any) -> Any:
    """peft's model around this one, whose matrices of these names have adapters from now on; all else is frozen.

    peft adds the adapters of a stack to its weights, so that their input cannot drop out: `dropout` must then be 0.
    """
    from peft import LoraConfig, get_peft_model

    single, stacked = split_stacks(model, names)
    targets = {"target_modules": single, "target_parameters": stacked or None}
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, **targets, **options)  # type: ignore[arg-type]
    return get_peft_model(model, config)
