"""A language model as plain modules: what BraidModel and BraidForCausalLM run, and all that counting a model needs."""

from typing import TYPE_CHECKING, Any

from torch import nn

from .attention.positions import position_kinds
from .compression import compress, compressed_head
from .config.braid_config import BraidConfig
from .dropout import Dropout
from .errors import BraidError
from .heads.ends import embeddings, heads
from .layer_skip import check_exit, set_dropout
from .norms import norms
from .paths.average import stay_apart
from .paths.switches import address_outside_stack, freeze, switch_off_modules, use_paths
from .stages import stage_kinds


class Body(nn.Module):
    """Embedding, stages and norm."""

    config: BraidConfig
    tied: dict[str, str]
    """The name of every parameter that is another one too, and the name that it is saved under."""

    if TYPE_CHECKING:  # parts are of many classes

        def __getattr__(self, name: str) -> Any: ...

    def add_parts(self, config: BraidConfig) -> None:
        """Build all parts of an empty module."""
        architecture = config.decoded
        width = architecture.width
        self.embedding = embeddings.build(architecture.embedding, config.vocab_size, width)
        self.positions = position_kinds.build(architecture.positions, width, architecture.context)
        self.drop = Dropout(architecture.dropout.embedding)
        self.stages = nn.ModuleList()
        for index, choice in enumerate(architecture.stages):
            try:
                stage = stage_kinds.build(choice, width)
            except BraidError as error:
                raise BraidError(error.what, error.where or f"stages[{index}]", error.todo) from error
            width = stage.width_out
            self.stages.append(stage)
        self.width_out: int = width
        set_dropout(self.stages, architecture.width, architecture.dropout)
        if architecture.gates is not None:
            architecture.gates.add_to(self.stages, architecture.width)
        self.norm = norms.build(architecture.norm, width)
        compress(self, architecture.compression)
        self.attentions: list[Any] = [m for m in self.modules() if hasattr(m, "cache_slot")]
        for slot, attention in enumerate(self.attentions):
            attention.cache_slot = slot
        for name, module in self.named_modules():
            module.writes_stream = name.removesuffix(".up").endswith(
                (".attention.out", ".feed.out", ".bank.out", ".shared.out")
            )
            if hasattr(module, "address"):
                module.address = address_outside_stack(name)
        self.cache_shapes = [attention.cache_shape for attention in self.attentions]
        """Heads and channels of every layer of a cache."""
        self.head_slots = 0
        """How many layers of a cache, behind those of the attentions, are the head's: some heads read the text too."""
        self.windows: list[int | None] = list(dict.fromkeys(a.window for a in self.attentions))
        self.head_dims = sorted({a.head_dim for a in self.attentions})
        for head_dim in self.head_dims:
            self.positions.check(head_dim)
        use_paths(self, config.paths)
        switch_off_modules(self, config.without)
        self.tied = shared_names(self)

    @property
    def exit_layer(self) -> int | None:
        """The layer that passes end after, if not the last: `config.num_hidden_layers`, which transformers changes for
        the drafts of `assistant_early_exit`."""
        layer, depth = self.config.last_layer, self.config.decoded.depth
        if layer == depth:
            return None
        try:
            check_exit(self.stages, self.width_out, layer)
        except BraidError:
            self.config.num_hidden_layers = depth  # transformers would not set it back
            raise
        return layer


class LanguageModel(nn.Module):
    """A body, and the head that reads its stream."""

    config: BraidConfig
    model: Any
    tied: dict[str, str]

    if TYPE_CHECKING:  # parts are of many classes

        def __getattr__(self, name: str) -> Any: ...

    def add_head(self, config: BraidConfig) -> None:
        """Build the head of a module that has its body, as `model`."""
        body, architecture = self.model, config.decoded
        head = heads.build(architecture.head, body.width_out, config.vocab_size)
        self.head: Any = compressed_head(head, architecture.compression)
        if head.cache_shapes:  # it reads the text: it gets layers of its own in every cache, and a mask for its window
            head.first_slot, body.head_slots = len(body.cache_shapes), len(head.cache_shapes)
            body.cache_shapes = [*body.cache_shapes, *head.cache_shapes]
            body.windows = list(dict.fromkeys([*body.windows, head.window]))
        if getattr(head, "settling", None) is not None:
            head.are_apart = stay_apart(body.stages, body.norm, head)
            for stage in body.stages if head.are_apart else ():
                stage.settling = head.settling
        use_paths(self, config.paths)
        freeze(self, config.frozen)
        self.tied = shared_names(self) | self._tied_head()

    def _tied_head(self) -> dict[str, str]:
        if not self.config.tie_word_embeddings:
            return {}
        shared = self.head.shared_with(self.model.embedding)
        if not shared:
            ends = self.config.decoded
            what = f"the head '{ends.head.kind}' has nothing to share with the embedding '{ends.embedding.kind}'"
            raise BraidError(what, todo="Set tie_embeddings: false.")
        tied = {f"head.{own}": f"model.embedding.{other}" for own, other in shared.items()}
        if any(self.get_parameter(own).shape != self.get_parameter(other).shape for own, other in tied.items()):
            raise BraidError("tie_embeddings needs the last stage to end at the embedding's width")
        return tied


def shared_names(model: nn.Module) -> dict[str, str]:
    """The name of every parameter that a module before it has too, and its first name."""
    first: dict[nn.Parameter, str] = {}
    return {n: first[p] for n, p in model.named_parameters(remove_duplicate=False) if first.setdefault(p, n) != n}


def tie(model: Any) -> None:
    """Let every parameter that is another one too be that one."""
    for name, saved in model.tied.items():
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, model.get_parameter(saved))
