"""The bridge to GGUF: a model of Llama's or GPT-2's shape as one file with llama.cpp's names."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from braidlm.bridges.bridge import ExportingBridge, ExportTarget, OpenedCheckpoint, TensorMapping, bridges
from braidlm.bridges.formats.gguf.architectures import LlamaCppArchitecture, LlamaCppGPT2, LlamaCppLlama
from braidlm.bridges.formats.gguf.library import import_gguf
from braidlm.bridges.formats.gguf.target import BLOCK, FILE_TYPES, GgufTarget, stored_type
from braidlm.bridges.formats.gguf.vocabulary import vocabulary_problems
from braidlm.bridges.model_info import ModelInfo
from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import BraidTokenizer


@bridges.register("gguf")
class GgufBridge(ExportingBridge):
    """A file for llama.cpp, which Braid writes and does not read."""

    title = "GGUF"
    folder = False
    suffix = ".gguf"
    dtypes = tuple(FILE_TYPES)
    zero_biases = True

    def __init__(self, dtype: str = dtypes[0]):
        self.dtype = dtype

    def open(self, path: Path, config_file: Path | None = None) -> OpenedCheckpoint:
        raise BraidError("Braid writes GGUF and does not read it", str(path))

    def export_problems(self, info: ModelInfo) -> list[str]:
        return _architecture(info).export_problems(info)

    def tokenizer_problems(self, info: ModelInfo, tokenizer: BraidTokenizer | None) -> list[str]:
        if tokenizer is None:
            return ["a GGUF file holds the tokenizer, and this model has none"]
        return vocabulary_problems(tokenizer, info.config.vocab_size)

    def mappings(self, info: ModelInfo) -> Iterator[TensorMapping]:
        architecture = _architecture(info)
        rename = _names(architecture, info)
        for mapping in architecture.mappings(info):
            # llama.cpp's matrices are [out, in] throughout, as ours are.
            yield replace(mapping, foreign=tuple(map(rename, mapping.foreign)), transposed=False)

    def target(self, info: ModelInfo) -> ExportTarget:
        architecture = _architecture(info)
        rename = _names(architecture, info)
        transposed = {name for mapping in architecture.mappings(info) if mapping.transposed for name in mapping.foreign}
        shapes = architecture.target(info).shapes.items()
        needed = {rename(name): shape[::-1] if name in transposed else shape for name, shape in shapes}
        return GgufTarget(info, architecture, needed, self.dtype)

    def export_notes(self, info: ModelInfo) -> list[str]:
        """The types of what is not f32; dropout is not mentioned, which no file for inference has."""
        if self.dtype == "f32":
            return []
        notes = [f"matrices are written as {self.dtype}; vectors and learned positions stay f32"]
        shapes = self.foreign_shapes(info, self.checked_mappings(info)).items()
        others = {
            shape[-1] for name, shape in shapes if stored_type(name, shape, self.dtype) not in ("f32", self.dtype)
        }
        if others:
            widths = ", ".join(map(str, sorted(others)))
            notes.append(f"{self.dtype} needs rows of a multiple of {BLOCK}; matrices with rows of {widths} are f16")
        return notes


def _architecture(info: ModelInfo) -> LlamaCppArchitecture:
    """The architecture of llama.cpp that a model resembles most."""
    return LlamaCppGPT2() if info.architecture.positions.kind == "learned" else LlamaCppLlama()


def _names(architecture: LlamaCppArchitecture, info: ModelInfo) -> Callable[[str], str]:
    """From Hugging Face's names of tensors to llama.cpp's, as the gguf package knows them."""
    gguf = import_gguf()
    kind = gguf.MODEL_ARCH[architecture.name.upper()]
    known = gguf.get_tensor_name_map(kind, len(info.layers))
    return lambda name: known.get_name(name, try_suffixes=(".weight", ".bias"))
