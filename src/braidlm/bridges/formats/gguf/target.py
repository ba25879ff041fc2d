"""Writing the file: metadata, vocabulary, and tensors in the type that was asked for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from braidlm.bridges.checkpoint import Shapes
from braidlm.bridges.formats.gguf.architectures import LlamaCppArchitecture
from braidlm.bridges.formats.gguf.library import import_gguf
from braidlm.bridges.formats.gguf.vocabulary import Vocabulary
from braidlm.bridges.model_info import ModelInfo
from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_file
from braidlm.core.models.licence import licence_of
from braidlm.data.tokenizing.build import BraidTokenizer

FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
"""The types of matrices, and llama.cpp's names for files of them."""
POSITIONS = "position_embd.weight"
BLOCK = 32
"""q8_0 has a scale for so many numbers of a row."""


def stored_type(name: str, shape: tuple[int, ...], dtype: str) -> str:
    """The type of one tensor: vectors and learned positions stay f32, as in llama.cpp's own conversions."""
    if len(shape) < 2 or name == POSITIONS:
        return "f32"
    return "f16" if dtype == "q8_0" and shape[-1] % BLOCK else dtype


@dataclass(frozen=True)
class GgufTarget:
    """One file of a model of ours."""

    info: ModelInfo
    architecture: LlamaCppArchitecture
    shapes: Shapes
    dtype: str

    def write(
        self, out: Path, tensors: dict[str, Tensor], tokenizer: BraidTokenizer | None, lineage: dict[str, Any]
    ) -> None:
        assert tokenizer is not None  # a model without one was refused
        gguf = import_gguf()
        with atomic_file(out) as scratch:
            writer = gguf.GGUFWriter(scratch, self.architecture.name)
            self._add_general(gguf, writer, out.stem, lineage)
            self.architecture.add_hyperparameters(writer, self.info)
            Vocabulary(tokenizer, self.info.config.vocab_size).add_to(writer, gguf.TokenType)
            for name, tensor in (tensors | self.architecture.constants(self.info)).items():
                kind = gguf.GGMLQuantizationType[stored_type(name, tuple(tensor.shape), self.dtype).upper()]
                writer.add_tensor(name, _quantised(gguf, name, tensor, kind), raw_dtype=kind)
            try:
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
            finally:
                writer.close()

    def _add_general(self, gguf: Any, writer: Any, name: str, lineage: dict[str, Any]) -> None:
        """What people and the Hub read of a file."""
        writer.add_type("model")
        writer.add_name(name)
        writer.add_description(f"Made with Braid (the Python package braidlm): {lineage['made_by']}.")
        if licence := licence_of(lineage):
            writer.add_license(licence)
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[self.dtype]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_string("braid.lineage", json.dumps(lineage, ensure_ascii=False))


def _quantised(gguf: Any, name: str, tensor: Tensor, kind: Any) -> np.ndarray:
    """The bytes of a tensor in a type, which must be able to hold its numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        data = gguf.quants.quantize(tensor.numpy(), kind)
        finite = np.isfinite(gguf.quants.dequantize(data, kind)).all()
    if not finite:
        raise BraidError(f"{name} has numbers that are too large for {kind.name.lower()}", todo="Use f32 or bf16.")
    return data
