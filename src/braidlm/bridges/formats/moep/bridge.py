"""MoEP as its authors' code saves it: a Hugging Face folder of the type `moep_lm`, whatever its tensors are called.

Versions of the code name tensors differently, so names and shapes together show what each of them is. A tensor that
does not fit is refused by name.
"""

from collections.abc import Iterator
from pathlib import Path

from braidlm.bridges.bridge import Bridge, OpenedCheckpoint, TensorMapping, bridges, bullet_list
from braidlm.bridges.checkpoint import INDEX_FILE, PICKLE_PATTERNS, SINGLE_FILE, Checkpoint, Shapes
from braidlm.bridges.formats.moep.config import MoepConfig, architecture
from braidlm.bridges.formats.moep.matrices import read_matrices
from braidlm.bridges.formats.moep.structure import FEED, QKV, Bank, Module, MoepStructure, is_buffer, read_structure
from braidlm.bridges.hugging_face import read_config
from braidlm.bridges.model_info import TOKEN_IDS, ModelInfo
from braidlm.core.errors import BraidError, errors_at
from braidlm.model.config.braid_config import BraidConfig

MODEL_TYPE = "moep_lm"


@bridges.register(MODEL_TYPE)
class MoepBridge(Bridge):
    """A state dict with the names of any version, and a config.json with its spelling."""

    title = "MoEP"

    def __init__(self) -> None:
        self.opened: list[TensorMapping] = []
        """The mappings of the opened checkpoint; they depend on its names."""

    def open(self, path: Path, config_file: Path | None = None) -> OpenedCheckpoint:
        folder, where = str(path), str(path / "config.json")
        config = MoepConfig(read_config(path, MODEL_TYPE))
        checkpoint = Checkpoint(_weights(path))
        for name, shape in checkpoint.shapes.items():
            if is_buffer(name, shape):
                checkpoint.ignore(name, "a constant of the causal mask or the positions, which some versions stored")
        shapes = checkpoint.shapes
        with errors_at(folder):
            structure = read_structure(shapes)
            transposed = read_matrices(structure, shapes)
        if problems := config.contradictions(structure.sizes):
            raise BraidError(
                f"this configuration contradicts the tensors:{bullet_list(problems)}",
                where,
                "Weights and configuration must come from the same model.",
            )
        tied = _resolve_tied_head(structure.outer, config, checkpoint)
        self.opened = _map_tensors(structure, transposed, tied, shapes, folder)
        with errors_at(where):
            ours = architecture(structure, config, tied)
        token_ids = {name: config.first((name,)) for name in TOKEN_IDS}
        braid_config = BraidConfig(ours, vocab_size=structure.vocabulary, **token_ids)
        return OpenedCheckpoint(checkpoint, braid_config, structure.description, config.notes)

    def mappings(self, info: ModelInfo) -> Iterator[TensorMapping]:
        return iter(self.opened)


def _weights(folder: Path) -> Path:
    """The folder if it has safetensors, else its one file of torch.save, which is opened without running code."""
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return folder
    files = sorted(path for pattern in (*PICKLE_PATTERNS, "*.safetensors") for path in folder.glob(pattern))
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise BraidError(f"which file holds the weights is not clear: {names}", str(folder), f"Call it {SINGLE_FILE}.")
    return files[0] if files else folder


def _resolve_tied_head(outer: Module, config: MoepConfig, checkpoint: Checkpoint) -> bool:
    """Whether the head is tied to the embedding; a stored head is compared with it."""
    key, tied = ("head", "weight"), config.data.get("tie_word_embeddings", True)
    if key not in outer.tensors:
        return bool(tied)
    if tied is False:
        return False
    if checkpoint.ignore_copy_of_embedding(outer.tensors[key], outer.tensors["embedding", "weight"]):
        del outer.tensors[key]
        return True
    config.notes.append("the weights hold a head of their own, not the embedding: it is kept, untied")
    return False


def _map_tensors(
    structure: MoepStructure, transposed: dict[str, bool], tied: bool, shapes: Shapes, where: str
) -> list[TensorMapping]:
    """The mapping of every tensor; one error lists all tensors that are missing or left over."""
    mapper = _Mapper(structure, transposed)
    mapper.map_outer(tied)
    mapper.map_blocks(structure.before, "model.stages.0.layers")
    stage = 1 if structure.before else 0
    mapper.map_experts(structure.shrink, f"model.stages.{stage}.experts")
    for number, layer in enumerate(structure.layers):
        mapper.map_layer(layer, f"model.stages.{stage + 1}.layers.{number}")
    mapper.map_experts(structure.grow, f"model.stages.{stage + 2}.experts")
    mapper.map_blocks(structure.after, f"model.stages.{stage + 3}.layers")
    mapped = {name for mapping in mapper.mappings for name in mapping.foreign}
    modules = [structure.outer, *structure.blocks]
    for bank in (structure.shrink, structure.grow, *structure.layers):
        modules += [bank.router, *bank.members]
    left = dict.fromkeys(name for module in modules for name in module.tensors.values() if name not in mapped)
    problems = mapper.missing + [f"left over {name} {list(shapes[name])}" for name in left]
    if problems:
        raise BraidError(f"the weights are not those of {structure.description}:{bullet_list(problems)}", where)
    return mapper.mappings


class _Mapper:
    """Collects mappings, and the tensors that are missing for others."""

    def __init__(self, structure: MoepStructure, transposed: dict[str, bool]):
        self.structure, self.transposed = structure, transposed
        self.mappings: list[TensorMapping] = []
        self.missing: list[str] = []

    def map_outer(self, tied: bool) -> None:
        outer = [self.structure.outer]
        self._map("model.embedding", outer, ("embedding",), bias=False)
        self._map("model.positions", outer, ("positions",), bias=False)
        self._map("model.norm", outer, ("last norm",), bias=self.structure.norm_bias)
        if not tied:
            self._map("head", outer, ("head",), bias=False)

    def map_blocks(self, blocks: list[Module], ours: str) -> None:
        for number, block in enumerate(blocks):
            self._map_block([block], f"{ours}.{number}", self.structure.width, self.structure.hidden, None)

    def map_layer(self, layer: Bank, ours: str) -> None:
        members = len(layer.members)
        blocks, stacked = (f"{ours}.stack.0", members) if members > 1 else (f"{ours}.paths.path_1.0", None)
        self._map_block(layer.members, blocks, self.structure.narrow, layer.hidden, stacked)
        router_bias = self.structure.layers[0].router.has("router", "bias")
        self._map(f"{ours}.join.router.scores", [layer.router], ("router",), router_bias)

    def map_experts(self, bank: Bank, ours: str) -> None:
        stacked, bias = len(bank.members), bank.has_bias(*FEED, "linear")
        if bank.gated:
            self._map_gated(bank.members, ours, bank.hidden, stacked, bias)
        else:
            self._map(f"{ours}.out", bank.members, ("linear",), bias, stacked=stacked)
        self._map(f"{ours}.router.scores", [bank.router], ("router",), bank.router.has("router", "bias"))

    def _map_block(self, blocks: list[Module], ours: str, width: int, hidden: int, stacked: int | None) -> None:
        structure = self.structure
        self._map(f"{ours}.attention_norm", blocks, ("norm 1",), structure.norm_bias, stacked=stacked)
        self._map(f"{ours}.feed_norm", blocks, ("norm 2",), structure.norm_bias, stacked=stacked)
        separate = any(blocks[0].has(part) for part in QKV)
        parts, sizes = (QKV, (width,) * 3) if separate else (("qkv",), ())
        self._map(f"{ours}.attention.qkv", blocks, parts, structure.attention_bias, sizes, stacked)
        self._map(f"{ours}.attention.out", blocks, ("attention out",), structure.attention_bias, stacked=stacked)
        if structure.gated:
            self._map_gated(blocks, f"{ours}.feed", hidden, stacked, structure.feed_bias)
            return
        self._map(f"{ours}.feed.up", blocks, ("up",), structure.feed_bias, stacked=stacked)
        self._map(f"{ours}.feed.out", blocks, ("down",), structure.feed_bias, stacked=stacked)

    def _map_gated(self, modules: list[Module], ours: str, hidden: int, stacked: int | None, bias: bool) -> None:
        fused = modules[0].has("gate and up")
        parts, sizes = (("gate and up",), ()) if fused else (("gate", "up"), (hidden, hidden))
        self._map(f"{ours}.gate_up", modules, parts, bias, sizes, stacked)
        self._map(f"{ours}.out", modules, ("down",), bias, stacked=stacked)

    def _map(
        self,
        ours: str,
        modules: list[Module],
        parts: tuple[str, ...],
        bias: bool,
        sizes: tuple[int, ...] = (),
        stacked: int | None = None,
    ) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            names = [self._name(module, part, kind) for module in modules for part in parts]
            if all(names):
                transposed = kind == "weight" and {self.transposed.get(name, False) for name in names} == {True}
                self.mappings.append(TensorMapping(f"{ours}.{kind}", tuple(names), sizes, transposed, stacked=stacked))

    def _name(self, module: Module, part: str, kind: str) -> str:
        name = module.tensors.get((part, kind), "")
        if not name:
            self.missing.append(f"missing {kind} of {part}{f' in {module.name}' if module.name else ''}")
        return name
