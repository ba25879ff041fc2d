"""What vLLM asks of a model beside attention: what it cannot serve, its configuration, weights and division.

vLLM builds the model with the attention implementation "vllm" and without the head, replaces plain linear layers by its
own, and fills all of them from the folder's file. Any other function of transformers' attention interface works too.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from torch import Tensor, nn

from .attention.attention import Softmax
from .attention.backend import PLAIN, check_implementation, common_shape, layer_windows, make_layers
from .compression import untrainable
from .config.braid_config import Architecture, ServedAttention
from .errors import BraidError
from .heads.ends import LinearHead, TokenEmbedding, embeddings, heads
from .mixture_of_depths import MixtureOfDepths

COLUMNS = "colwise_gather_output"
"""Each process computes its share of a layer's outputs, and all are gathered: no sum is rounded differently."""


def asks_for_backend(config: Any) -> bool:
    """Whether attention is computed by another library's function."""
    return config._attn_implementation not in PLAIN


def describe(model: Any) -> None:
    """Write what vLLM reads before there is a model into its configuration, and so into the folder's."""
    parts = model.attentions
    can_serve = next(unserved(model), None) is None
    model.config.serve_by(ServedAttention(*common_shape(parts), layer_windows(parts)) if can_serve else None)


def prepare(model: Any) -> None:
    """Give a model without its head the layers of another library, and say how processes divide its products."""
    check_implementation(model.config._attn_implementation)
    if (problem := next(unserved(model), None)) is not None:
        todo = "Serve it with `braid serve`, which runs every model folder."
        name = model.config._attn_implementation
        raise BraidError(f"attention by '{name}' (vLLM's way) cannot serve this model: {problem}", todo=todo)
    layers = make_layers(model.config, model.attentions)
    for part, own in zip(model.attentions, layers, strict=True):
        part.backend_layers = own
    # One flat list: vLLM allows one number in the name of a layer.
    model.attention_layers = nn.ModuleList(layer for own in layers for layer in own)
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            module.__class__ = kept_linear(type(module))  # type: ignore[assignment, arg-type]
    # Processes divide plain linear layers, by address with * for numbers; all have routers and stacks whole.
    plain = [name.split(".") for name, part in model.named_modules() if type(part) is nn.Linear]
    divided = [parts for parts in plain if "router" not in parts]
    model._tp_plan = {".".join("*" if part.isdigit() else part for part in parts): COLUMNS for parts in divided}
    if not model.config.tie_word_embeddings:
        _rename_head(type(model).__name__)


def unserved(model: Any) -> Iterator[str]:
    """What another library's attention cannot compute of a model, each as the end of a sentence."""
    architecture: Architecture = model.config.decoded
    for part in model.attentions:
        rule = getattr(part, "rule", part)
        if type(rule) is not Softmax:
            yield f"the weights of its attention are no softmax ({type(rule).__name__})"
    for module in model.modules():
        if isinstance(module, MixtureOfDepths):
            yield "some tokens pass by its layers (mixture of depths)"
        elif getattr(module, "scope", "all") == "routed":
            yield "its attention experts see only the tokens that chose them (scope: routed)"
    if len({part.window for part in model.attentions} - {None}) > 1:
        yield "its layers have windows of different sizes"
    head, embedding = heads[architecture.head.kind], embeddings[architecture.embedding.kind]
    if embedding is not TokenEmbedding or head is not LinearHead:
        yield f"vLLM has its own embedding and head, not '{architecture.embedding.kind}' and '{architecture.head.kind}'"
    elif getattr(architecture.head.options, "bias", False):
        yield "its head has a bias"
    elif model.width_out != architecture.width:
        yield f"its stream ends with {model.width_out} channels and begins with {architecture.width}"
    if kinds := untrainable(architecture.compression):
        nearest = "`braid convert FOLDER --to llama --out NEW` (or mistral, qwen2, gpt2) writes the same function"
        yield f"its matrices are quantised ({', '.join(kinds)}); where it has that shape, {nearest}"
    if not model.attentions:
        yield "it has no attention"


def load_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Fill a model in which vLLM has replaced layers, and say which parameters it has filled. The file has one name for
    what several layers share."""
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for name, values in weights:
        for own in (name, *(other for other, first in model.tied.items() if first == name)):
            if own not in state:
                raise BraidError(f"the folder's weights have '{own}', and the model has not")
            load = getattr(state[own], "weight_loader", None)
            if load is None:
                state[own].data.copy_(values)
            else:
                load(state[own], values)
            yield own


@cache
def kept_linear(kind: type[nn.Module]) -> type[nn.Module]:
    """A kind of linear layer as one that vLLM leaves alone: of an `nn.Linear` it would forget what this kind does."""
    others = (base for base in kind.__bases__ if base is not nn.Linear)
    return type(kind.__name__, (*others, nn.Module), {"forward": kind.forward})


def _rename_head(model_class: str) -> None:
    """Tell vLLM, which reads transformers' renamings for a model without its head, that the head is its `lm_head`."""
    from transformers.conversion_mapping import WeightRenaming, register_checkpoint_conversion_mapping

    register_checkpoint_conversion_mapping(model_class, [WeightRenaming(r"^head\.", "lm_head.")], overwrite=True)
