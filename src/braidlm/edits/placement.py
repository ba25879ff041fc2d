"""Which tensor of each path stands where in the composed model."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from braidlm.edits.account import Account, Fresh, Part, Taken, parts_of
from braidlm.edits.path_models import PathShape
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.parallel import ParallelLayer, ParallelStage, blocks_in_layer
from braidlm.model.paths.project import ProjectStage
from braidlm.model.routing.stacked import StackedLinear
from braidlm.model.stages import BlockStage

EMBEDDING, POSITIONS, HEAD, HEAD_BIAS = (
    "model.embedding.weight",
    "model.positions.weight",
    "head.weight",
    "head.bias",
)
FINAL_NORM = "model.norm"
NORM_UNUSED = "the path's norm before its own head; the composed stream has a fresh one"


def targets(model: BraidForCausalLM) -> dict[str, Tensor]:
    """Every tensor to account for; a tied head is the embedding."""
    tied = model.config.tie_word_embeddings
    return {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == HEAD)}


def place(model: BraidForCausalLM, paths: Sequence[PathShape], layers: int) -> Account:
    """The account of composing `paths` into `model`, which needs no memory for its weights."""
    wanted, names = targets(model), [path.name for path in paths]
    account = Account()
    account.made[EMBEDDING] = Taken(parts_of(names, [EMBEDDING] * len(paths)), "side by side")
    if POSITIONS in wanted:
        longest = max(path.architecture.context for path in paths)
        rows = len(wanted[POSITIONS]) if longest > len(wanted[POSITIONS]) else None
        account.made[POSITIONS] = Taken(parts_of(names, [POSITIONS] * len(paths)), "side by side", rows)
    for address, stage in model.model.stages.named_children():
        for name, origin in _stage(f"model.stages.{address}", stage, paths, layers):
            account.made[name] = origin
    norm = [f"{FINAL_NORM}.{name}" for name in model.model.norm.state_dict()]
    account.made |= dict.fromkeys(norm, Fresh("final norm", FINAL_NORM))
    if HEAD in wanted:
        own = [EMBEDDING if path.architecture.tie_embeddings else HEAD for path in paths]
        account.made[HEAD] = Taken(parts_of(names, own), "side by side")
    if HEAD_BIAS in wanted:  # scores are the sum of what each path's part of the head gives
        with_bias = [path.name for path in paths if path.architecture.head.options.bias]
        account.made[HEAD_BIAS] = Taken(parts_of(with_bias, [HEAD_BIAS] * len(with_bias)), "added up")
    for path in paths:
        unused = [name for name in path.plain.tensors if name.startswith(f"{FINAL_NORM}.")]
        account.left_out |= {Part(path.name, name): NORM_UNUSED for name in unused}
    account.check(wanted, {path.name: path.plain.tensors for path in paths})
    account.made = {name: account.made[name] for name in wanted}  # in the model's own order
    return account


def _stage(
    address: str, stage: nn.Module, paths: Sequence[PathShape], layers: int
) -> Iterator[tuple[str, Taken | Fresh]]:
    if isinstance(stage, ParallelStage):
        for index, layer in enumerate(stage.layers):
            assert isinstance(layer, ParallelLayer)
            yield from _layer(f"{address}.layers.{index}", layer, paths, layers, index)
    elif isinstance(stage, (BlockStage, ProjectStage)):
        what = "full-width blocks" if isinstance(stage, BlockStage) else "projections"
        yield from ((f"{address}.{name}", Fresh(what, address)) for name in stage.state_dict())


def _layer(
    address: str, layer: ParallelLayer, paths: Sequence[PathShape], layers: int, index: int
) -> Iterator[tuple[str, Taken | Fresh]]:
    """The blocks that the model itself says stand in this layer, its projections and its join."""
    here = {path.name: [path.blocks[i] for i in blocks_in_layer(path.depth, layers, index)] for path in paths}
    if layer.stack is not None:
        for number, block in enumerate(layer.stack):
            blocks = [here[path.name][number] for path in paths]
            for name, how in _stacked_tensors(block):
                parts = parts_of([path.name for path in paths], [f"{own}.{name}" for own in blocks])
                yield f"{address}.stack.{number}.{name}", Taken(parts, how)
    if layer.paths is not None:
        for path in paths:
            for number, block in enumerate(layer.blocks(path.name)):
                for name in block.state_dict():
                    part = Part(path.name, f"{here[path.name][number]}.{name}")
                    yield f"{address}.paths.{path.name}.{number}.{name}", Taken((part,))
    for own, what in (("enter", "projections"), ("join", "joins")):
        module = getattr(layer, own)
        if module is not None:
            fresh = Fresh(what, f"{address}.{own}")
            yield from ((f"{fresh.module}.{name}", fresh) for name in module.state_dict())


def _stacked_tensors(block: nn.Module) -> Iterator[tuple[str, str]]:
    """The tensors of a stack of blocks, and how those of single blocks become them."""
    for name in block.state_dict():
        owner, _, own = name.rpartition(".")
        is_matrix = own == "weight" and isinstance(block.get_submodule(owner), StackedLinear)
        yield name, "stacked, transposed" if is_matrix else "stacked"
