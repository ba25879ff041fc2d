"""LoRA through peft: the matrices of a model that can have adapters, and the adapters themselves."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.model.routing.router import ScoreLinear
from braidlm.model.routing.stacked import StackedLinear

PEFT_IS_MISSING = "peft, which trains adapters, is not installed"


def check_peft(otherwise: str) -> None:
    """Raise an error early if peft is not installed; `otherwise` is what can be done without it."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise BraidError(PEFT_IS_MISSING, todo=f"pip install 'braidlm[eval]', or {otherwise}") from None


def matrices(model: nn.Module) -> dict[str, nn.Module]:
    """All matrices between embedding and head by name: single ones, and stacks of them."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith("model.stages.") and isinstance(module, (nn.Linear, StackedLinear))
    }


def adaptable(model: nn.Module) -> list[str]:
    """The names of the matrices that get adapters unless others are chosen: all but those of routers."""
    return [name for name, module in matrices(model).items() if not _is_routers(name, module)]


def choose_matrices(model: nn.Module, wanted: str | Sequence[str]) -> list[str]:
    """The matrices of these names (`qkv`, `feed.out`), or whose whole name a regular expression matches."""
    return choose_names(list(matrices(model)), wanted)


def choose_names(names: Sequence[str], wanted: str | Sequence[str]) -> list[str]:
    """The names among these that are wanted, by their ends or by a regular expression."""
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
    for end in wanted:
        if not any(_ends_with(name, end) for name in names):
            raise BraidError(
                f"the model has no matrix '{end}'.{did_you_mean(end, known)}", todo=f"It has {', '.join(known)}."
            )
    return [name for name in names if any(_ends_with(name, end) for end in wanted)]


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


def _is_routers(name: str, module: nn.Module) -> bool:
    return isinstance(module, ScoreLinear) or name.endswith(".router")


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")
