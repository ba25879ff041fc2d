"""The contract of an edit: plan, check, execute, stamp.

An edit is one file in this folder: a dataclass of its options, registered under its name, whose `plan` says of every
tensor of the new model where it comes from. What the plan promises to preserve is checked on the result before the
folder is made final, and the lineage records it. `compose` is the edit with several sources.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from braidlm.core import console
from braidlm.core.devices import check_weights_fit, weights_bytes
from braidlm.core.files import check_new_folder
from braidlm.core.models.folders import fill, save_model
from braidlm.core.models.logits import UNCHANGED, check_promise
from braidlm.core.reading import given_path
from braidlm.data.tokenizing.build import BraidTokenizer
from braidlm.edits.account import SOURCE, Account, account_summary, account_table, targets
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.ranges import Seed
from braidlm.model.config.registry import Registry, import_files
from braidlm.model.config.strict import decode
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.open import Backend, open_model
from braidlm.opening.opened_model import OpenedModel, find_tokenizer

if TYPE_CHECKING:
    from braidlm.model.modeling_braid import BraidForCausalLM

edits = Registry("edit")


@dataclass
class EditPlan:
    """The new model, the origin of each of its tensors, and what it keeps of the old one."""

    title: str
    """What the edit does to which model, in one sentence."""
    model: "BraidForCausalLM"
    """On the meta device; the plan is carried out by filling it."""
    account: Account
    notes: Sequence[str] = ()
    details: Sequence[str] = ()
    """Lines between the title and the table of tensors."""
    paths: Sequence[str] = ()
    """The names of the model's paths, whose tensors are in one line of the table."""
    finish: "Callable[[BraidForCausalLM], None] | None" = None
    """Fills what the account calls fresh in another way than the model's initialisation."""
    unchanged_on: Tensor | None = None
    """Token ids [sequence, time] whose logits the edit promises not to change; by default it promises nothing."""
    check: "Callable[[BraidForCausalLM], None] | None" = None
    """Raises an error if the new model does not keep another promise."""
    measure: "Callable[[BraidForCausalLM], dict[str, Any]] | None" = None
    """What the new model costs and predicts beside the old one, for the lineage; it shows its numbers itself."""


class Edit(ABC):
    """The options of a kind of edit; each kind is a dataclass of them."""

    about: ClassVar[str]
    """One line for the command line."""
    backend: ClassVar[Backend] = "braid"
    """What reads the model; other than Braid where the kind of edit also takes decoders of transformers."""

    @property
    def texts(self) -> dict[str, str]:
        """The texts that it reads, by their options; in a study they may be a domain's name."""
        return {key: text for key in ("text", "beside") if (text := getattr(self, key, None)) is not None}

    def counted(self, config: BraidConfig) -> BraidConfig | None:
        """The configuration of the new model, where that follows from the old one's alone."""
        return None

    @abstractmethod
    def plan(self, source: OpenedBraid) -> EditPlan:
        """What the edit makes of a model; the model is not changed."""

    def apply(self, model: OpenedModel, out: str | Path | None, record: dict[str, Any], dry_run: bool) -> Path | None:
        """Plan for a Braid model, or one that a bridge reads, and carry it out. A kind whose results may be of another
        format than Braid's overrides it."""
        source = model if isinstance(model, OpenedBraid) else OpenedBraid(model.folder)
        source.check_editable()
        return carry_out(self.plan(source), {SOURCE: source}, find_tokenizer(source.folder), out, record, dry_run)


def edit(
    kind: str,
    /,
    model: str | Path,
    out: str | Path | None = None,
    *,
    dry_run: bool = False,
    seed: int = 1,
    **options: Any,
) -> Path | None:
    """Make a new model of one: `kind` is `prune` or another kind that `braid edit --help` lists, with its options.

    `model` is a model folder, a run, one model of a study, or ORG/NAME on the Hub. Returns the folder
    written, None for a dry run.
    """
    load_edits()
    chosen: Edit = decode(edits[kind], options)
    decode(Seed, seed, "seed")
    if out is not None or not dry_run:
        check_new_folder(out)
    record = {"made_by": f"braid edit {kind}", "options": {"seed": seed, **asdict(chosen)}}  # type: ignore[call-overload]
    opened = open_model(model, chosen.backend, bare=chosen.backend != "braid")
    return chosen.apply(opened, out, record, dry_run)


def carry_out(
    plan: EditPlan,
    sources: Mapping[str, OpenedBraid],
    tokenizer: BraidTokenizer | None,
    out: str | Path | None,
    record: dict[str, Any],
    dry_run: bool,
) -> Path | None:
    """Show the plan; unless it is a dry run make the model, check what was promised, and write it with its lineage."""
    plan.account.check(targets(plan.model), {name: source.info.tensors for name, source in sources.items()})
    if show_plan([plan.title, *plan.details], plan.account, plan.notes, dry_run, plan.paths):
        return None
    assert out is not None
    seed = record["options"]["seed"]
    model = assemble(plan.model, plan.account, sources, seed)
    if plan.finish is not None:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            plan.finish(model)
    if (ids := plan.unchanged_on) is not None:
        (source,) = sources.values()
        promise = f"this edit promises not to change a logit by more than {UNCHANGED:g}, and one changed by"
        with torch.no_grad():
            check_promise(promise, source.load(dtype=torch.float32)(ids).logits, model(ids).logits)
    if plan.check is not None:
        plan.check(model)
    lineage = record | ({} if plan.measure is None else {"measured": plan.measure(model)})
    lineage["sources"] = [{"name": name, **source.edit_record()} for name, source in sources.items()]
    save_model(model, given_path(out), tokenizer, lineage | plan.account.record())
    return given_path(out)


def show_plan(
    title: Sequence[str], account: Account, notes: Iterable[str], dry_run: bool, paths: Sequence[str] = ()
) -> bool:
    """Show a plan, and return whether nothing shall be done, since it is a dry run.

    The account of every tensor is a detail: `lineage.json` has it too.
    """
    summary = [*title, *account_summary(account), *(f"  note: {note}" for note in notes)]
    console.say_plan(summary, account_table(account, paths), dry_run)
    return dry_run


def load_edits() -> None:
    """Import every file of this folder, which registers its edits."""
    import_files(__name__.rpartition(".")[0])


def assemble(
    model: "BraidForCausalLM", account: Account, sources: Mapping[str, OpenedBraid], seed: int
) -> "BraidForCausalLM":
    """Fill a skeleton as the account says; of the sources only one tensor's parts are in memory at a time."""
    check_weights_fit(weights_bytes(model))
    fresh = account.fresh
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for address, module in model.named_modules():
            own = [f"{address}.{name}" for name, _ in module.named_parameters(recurse=False)]
            if own and all(name in fresh for name in own):
                module.to_empty(device="cpu", recurse=False)
                model._init_weights(module)
    state = {
        name: origin.compute(lambda part: sources[part.source].read(part.tensor))
        for name, origin in account.derived.items()
    }
    # A fresh buffer begins at zero: the ranking of a router that balances, the opening of its new choices.
    state |= {name: torch.zeros_like(b, device="cpu") for name, b in model.named_buffers() if name in fresh}
    state |= {name: p.data for name, p in model.named_parameters() if name in fresh}
    fill(model, state)
    assert not any(tensor.is_meta for tensor in model.state_dict().values()), "every tensor has its values"
    return model
