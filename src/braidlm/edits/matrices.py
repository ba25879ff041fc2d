"""The matrices of a model that an edit can compress: its linear layers and banks, without those of routers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.edits.account import Account, Derived, Part, targets
from braidlm.edits.edit import SOURCE
from braidlm.model.compression.compression import sizes_of
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.heads.ends import LinearHead, TokenEmbedding
from braidlm.model.initialisation import LINEAR
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.router import ScoreLinear
from braidlm.opening.braid import OpenedBraid

BODY = "model."
"""Before the addresses of all layers but the head, in the names of tensors."""


@dataclass(frozen=True)
class Matrix:
    """The matrix of one layer, or one for each member of a bank."""

    address: str
    """Of its layer, as the configuration names it: `stages.0.layers.3.feed.out`."""
    tensor: str
    """The name under which it is saved; layers that share a matrix have the same."""
    inputs: int
    outputs: int
    members: int | None
    """How many there are in a bank, [member, inputs, outputs]; None for one matrix [outputs, inputs]."""

    @property
    def layer(self) -> str:
        """The beginning of the names of its layer's tensors."""
        return self.tensor.removesuffix(".weight")

    @property
    def size(self) -> int:
        return (self.members or 1) * self.inputs * self.outputs

    def rows(self, tensor: Tensor) -> Tensor:
        """[..., outputs, inputs] of the tensor as it is saved, and the other way round."""
        return tensor if self.members is None else tensor.transpose(-1, -2)


def matrices_of(source: OpenedBraid, patterns: Sequence[str]) -> list[Matrix]:
    """The matrices of the layers whose addresses fit one of these patterns; every pattern must fit some."""
    named = [(a, m) for a, m in source.info.model.model.named_modules() if type(m) in LINEAR]
    free = [(a, m) for a, m in named if "router" not in a.split(".")]
    for pattern in patterns:
        if not any(fnmatchcase(address, pattern) for address, _ in free):
            raise BraidError(
                f"no linear layer is called '{pattern}'",
                source.title,
                f"There are {', '.join(address for address, _ in free[:4])} and {max(0, len(free) - 4)} more.",
            )
    chosen = [(a, m) for a, m in free if any(fnmatchcase(a, pattern) for pattern in patterns)]
    return [_matrix(source, a, m) for a, m in chosen]


def notes_of(source: OpenedBraid) -> list[str]:
    """Remarks for the plan: those of the source, and which layers with a matrix are not plain linear ones."""
    body = source.info.model.model
    other = [type(m) for m in body.modules() if isinstance(m, LINEAR) and type(m) not in (*LINEAR, ScoreLinear)]
    kinds = ", ".join(sorted({kind.__name__ for kind in other}))
    return [*source.notes, *([f"{len(other)} layers stay as they are: {kinds}"] if other else [])]


def ends_of(source: OpenedBraid) -> list[Matrix]:
    """The matrices of embedding and head, where these are plain ones; one matrix twice where they are tied."""
    model = source.info.model
    ends = {"embedding": model.model.embedding, "head": model.head}
    plain = {"embedding": TokenEmbedding, "head": LinearHead}
    if any(type(end) is not plain[name] for name, end in ends.items()):
        return []
    shape = ends["embedding"].weight.shape
    names = {"embedding": f"{BODY}embedding.weight", "head": "head.weight"}
    return [
        Matrix(name, model.tied.get(tensor, tensor), shape[1], shape[0], members=None) for name, tensor in names.items()
    ]


def compressed_config(source: OpenedBraid, *forms: dict[str, Any]) -> BraidConfig:
    """The same model with some matrices in another form."""
    return source.config_with(compression=[*source.config.architecture["compression"], *forms])


def account_of(
    source: OpenedBraid, config: BraidConfig, derived: dict[str, Derived]
) -> tuple[BraidForCausalLM, Account]:
    """The new model without memory, and its account: what is not derived is copied."""
    model = skeleton(config)
    tensors = targets(model)
    account = Account({name: derived.get(name) or Derived((Part(SOURCE, name),)) for name in tensors})
    account.check(tensors, {SOURCE: source.info.tensors})
    return model, account


def shared_once(matrices: Iterable[Matrix]) -> list[Matrix]:
    """Each tensor once, by the first of its layers."""
    return list({matrix.tensor: matrix for matrix in reversed(list(matrices))}.values())[::-1]


def parameters_text(source: OpenedBraid, model: BraidForCausalLM) -> str:
    """`8,000 of 10,000 parameters stay (80.0%)`."""
    before, after = (model_cost(one).parameters for one in (source.info.model, model))
    return f"{after:,} of {before:,} parameters stay ({after / before:.1%})"


def _matrix(source: OpenedBraid, address: str, layer: Any) -> Matrix:
    tensor = f"{BODY}{address}.weight"
    return Matrix(address, source.info.model.tied.get(tensor, tensor), *sizes_of(layer), getattr(layer, "stack", None))
