"""The plan of composing, shown before anything is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from braidlm.core.models.accounting import model_facts, skeleton
from braidlm.edits.account import Account, account_table, columns
from braidlm.edits.assembly import STARTS
from braidlm.edits.composing.layout import Layout, lay_out
from braidlm.edits.composing.path_models import PathModel, aligned_sections
from braidlm.edits.composing.tensor_origins import account_for
from braidlm.inspection.layers import routing_modules
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.registry import Choice
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.joins import Join
from braidlm.model.paths.parallel import ParallelLayer, ParallelStage, blocks_in_layer

TRAINED_BYTES = 12
"""Of a trained parameter, beside its own four: the gradient and AdamW's two moments in float32."""


@dataclass
class Composition:
    """Paths, the model they become, and the account of every tensor."""

    paths: Sequence[PathModel]
    join: Choice
    layout: Layout
    model: BraidForCausalLM
    """On the meta device."""
    account: Account
    start: str

    @classmethod
    def of(
        cls,
        paths: Sequence[PathModel],
        join: Choice,
        layers: int | None,
        blocks: int,
        frozen: Sequence[str],
        start: str,
    ) -> "Composition":
        """Lay the model out, build it on the meta device and account for its tensors."""
        layout = lay_out(paths, join, layers, blocks)
        first = paths[0].plain.config
        special = {name: getattr(first, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = BraidConfig(layout.architecture, vocab_size=first.vocab_size, frozen=list(frozen), **special)
        model = skeleton(config)
        return cls(paths, join, layout, model, account_for(model, paths), start)

    @property
    def config(self) -> BraidConfig:
        return self.model.config

    @property
    def shows_routes(self) -> bool:
        """Whether `braid routes` can tell which path a token takes: there is a router, or paths as wide as the join."""
        widths = {path.width for path in self.paths}
        return any(
            not isinstance(one, Join) or hasattr(one, "router") or widths == {one.width_out}
            for one in routing_modules(self.model)
        )

    def lines(self) -> list[str]:
        """The plan as text."""
        names = " + ".join(path.name for path in self.paths)
        stages = ", ".join(_stage(choice) for choice in self.config.decoded.stages)
        title = f"Compose {names}: width {self.config.hidden_size}, join {self.join.kind}"
        sizes = [f"  {what:<12} {text}" for what, text in self._sizes()]
        notes = [f"  note: {note}" for note in self._notes()]
        return [
            title,
            f"  stages: {stages}",
            *self._alignment(),
            *account_table(self.account, [path.name for path in self.paths]),
            *sizes,
            *notes,
        ]

    def fresh_parts(self) -> list[str]:
        """The kinds of part that are newly initialised."""
        return list(dict.fromkeys(origin.kind for origin in self.account.fresh.values()))

    def _alignment(self) -> list[str]:
        """Which of each path's blocks, counted from 0, are in which layer."""
        heads = [f"{path.name} (width {path.width}, {path.depth} blocks)" for path in self.paths]
        rows: list[list[str]] = []
        before = [0] * len(self.paths)
        stages = [stage for stage in self.model.model.stages if isinstance(stage, ParallelStage)]
        for stage, sections in zip(stages, aligned_sections(self.paths), strict=True):
            depths = [len(section.blocks) for section in sections]
            for layer in range(len(stage.layers)):
                inside = [blocks_in_layer(depth, len(stage.layers), layer) for depth in depths]
                blocks = [range(first + own.start, first + own.stop) for first, own in zip(before, inside, strict=True)]
                rows.append([f"layer {len(rows)}", *map(_numbers, blocks)])
            before = [first + depth for first, depth in zip(before, depths, strict=True)]
        return columns([["blocks in", *heads], *rows])

    def _sizes(self) -> list[tuple[str, str]]:
        facts = model_facts(self.model)
        memory, trained = facts["memory"], self.trained
        return [
            ("parameters", f"{facts['parameters']:,}, {facts['active_parameters']:,} active for a token"),
            ("trained", f"{trained:,} ({trained / facts['parameters']:.0%})"),
            (
                "memory",
                f"weights {_megabytes(memory['weights_float32'])}, in training with AdamW "
                f"{_megabytes(memory['weights_float32'] + TRAINED_BYTES * trained)} (float32, activations on top)",
            ),
        ]

    @property
    def trained(self) -> int:
        """How many parameters training will change."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def _frozen(self) -> set[str]:
        """The tensors that training will not change."""
        return {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}

    def _stacking_note(self) -> str:
        layers = [module for module in self.model.modules() if isinstance(module, ParallelLayer)]
        if all(layer.stack is not None for layer in layers):
            return "the paths have one shape and are computed as one stacked product"
        first = _shape(self.paths[0])
        differing = [key for key in first if any(_shape(path)[key] != first[key] for path in self.paths)]
        because = f"they differ in {', '.join(differing)}" if differing else "a part of theirs cannot be stacked"
        return f"the paths are computed one by one, which is slower: {because}"

    def _notes(self) -> list[str]:
        notes = [*self.layout.notes, self._stacking_note()]
        if kinds := [kind for kind in self.fresh_parts() if kind in ("projections", "joins")]:
            notes.append(f"{' and '.join(kinds)} begin {STARTS[self.start]}")
        notes += [f"'{path.name}': {note}" for path in self.paths for note in path.source.notes]
        first, *others = ((path.name, path.source.tokenizer.identity()["roles"]) for path in self.paths)
        differing = [name for name, roles in others if roles != first[1]]
        if differing:
            notes.append(f"special tokens have other roles in {', '.join(differing)}; those of '{first[0]}' count")
        if self.config.frozen:
            fresh = dict.fromkeys(o.kind for name, o in self.account.fresh.items() if name in self._frozen())
            also = f" (so also the fresh {', '.join(fresh)})" if fresh else ""
            nothing = "" if self.trained else "; nothing is left to train"
            notes.append(f"training will leave as they are: {', '.join(self.config.frozen)}{also}{nothing}")
        return notes


def _shape(path: PathModel) -> dict[str, Any]:
    shape: dict[str, Any] = {"width": path.width, "depth": path.depth}
    for part in path.sections[0].options:
        shape[part] = [section.options[part] for section in path.sections]
    return shape


def _stage(choice: Choice) -> str:
    """`block x 2` or `project to 64`."""
    layers, to = getattr(choice.options, "layers", None), getattr(choice.options, "to", None)
    return " ".join(filter(None, (choice.kind, layers and f"x {layers}", to and f"to {to}")))


def _numbers(blocks: range) -> str:
    return ", ".join(map(str, blocks)) or "none: passes on what it reads"


def _megabytes(amount: int) -> str:
    return f"{amount / 1e6:,.1f} MB"
