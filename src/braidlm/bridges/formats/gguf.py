"""GGUF, the one file that llama.cpp runs: weights, hyperparameters and the tokenizer together.

Models of Llama's or GPT-2's shape are written with llama.cpp's names; Braid does not read such files.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from braidlm.bridges.bridge import Exported, ExportingBridge, ExportTarget, TensorMapping, bridges
from braidlm.bridges.checkpoint import Shapes
from braidlm.bridges.formats.gpt2 import GPT2Bridge
from braidlm.bridges.formats.llama import LlamaBridge
from braidlm.bridges.hugging_face import HuggingFaceBridge
from braidlm.bridges.model_info import ModelInfo
from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_file
from braidlm.core.models.card import licence_of
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, byte_characters
from braidlm.model.attention.positions import RopeScaling, rope_scalings


def import_gguf() -> ModuleType:
    """The package, or an error that says how to get it."""
    try:
        import gguf
    except ImportError:
        raise BraidError("writing GGUF needs the package 'gguf'", todo="pip install 'braidlm[device]'") from None
    return gguf


class LlamaCppArchitecture(HuggingFaceBridge):
    """A bridge to Hugging Face whose models llama.cpp knows; here tensors still have Hugging Face's names."""

    name: ClassVar[str]

    def add_hyperparameters(self, writer: Any, info: ModelInfo) -> None:
        """Give gguf's writer the sizes and constants of a model."""
        writer.add_vocab_size(info.config.vocab_size)
        writer.add_context_length(info.architecture.context)
        writer.add_embedding_length(info.architecture.width)
        writer.add_block_count(len(info.layers))
        writer.add_feed_forward_length(info.feed_hidden)
        writer.add_head_count(info.attention.heads)

    def constants(self, info: ModelInfo) -> dict[str, Tensor]:
        """Tensors that llama.cpp reads and that nobody has trained."""
        return {}

    def renamed(self, info: ModelInfo) -> Callable[[str], str]:
        """From Hugging Face's names of tensors to llama.cpp's, as the gguf package knows them."""
        gguf = import_gguf()
        known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.name.upper()], len(info.layers))
        return lambda name: known.get_name(name, try_suffixes=(".weight", ".bias"))


class LlamaCppLlama(LlamaBridge, LlamaCppArchitecture):
    """Llama, whose queries and keys llama.cpp rotates in neighbouring pairs."""

    title = "llama.cpp's Llama"
    name = "llama"
    pairs = "interleaved"

    def add_hyperparameters(self, writer: Any, info: ModelInfo) -> None:
        super().add_hyperparameters(writer, info)
        writer.add_head_count_kv(info.attention.kv_heads)
        writer.add_key_length(info.attention.head_dim)
        writer.add_value_length(info.attention.head_dim)
        writer.add_layer_norm_rms_eps(info.block.norm.options.eps)
        writer.add_rope_dimension_count(info.attention.head_dim)
        writer.add_rope_freq_base(info.architecture.positions.options.theta)
        if (scaling := self._scaling(info)) is not None:
            writer.add_rope_scaling_attn_factors(scaling.attention_factor)

    def constants(self, info: ModelInfo) -> dict[str, Tensor]:
        """What llama.cpp divides the frequency of each pair by, since its own scalings have other options than ours."""
        if (scaling := self._scaling(info)) is None:
            return {}
        theta, head_dim = info.architecture.positions.options.theta, info.attention.head_dim
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        return {"rope_freqs.weight": frequencies / scaling.scale(frequencies, theta)}

    def _scaling(self, info: ModelInfo) -> RopeScaling | None:
        choice = info.architecture.positions.options.scaling
        return None if choice is None else rope_scalings.build(choice)


class LlamaCppGPT2(GPT2Bridge, LlamaCppArchitecture):
    """GPT-2, whose activation is the approximation of GELU by tanh."""

    title = "llama.cpp's GPT-2"
    name = "gpt2"

    def settings(self, info: ModelInfo) -> dict[str, Any]:
        return super().settings(info) | {"activation_function": "gelu_new"}

    def add_hyperparameters(self, writer: Any, info: ModelInfo) -> None:
        super().add_hyperparameters(writer, info)
        writer.add_layer_norm_eps(info.block.norm.options.eps)


_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel"}
_GPT2 = {"type": "ByteLevel", "use_regex": True}


def _split(digits: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": _PATTERN.replace("DIGITS", digits)}, "behavior": "Isolated"}


PRE_TOKENIZERS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "gpt-2": ([_GPT2], False),
    "smollm": ([{"type": "Digits", "individual_digits": True}, _GPT2], False),
    "qwen2": ([_split(r"\p{N}"), _BYTES], False),
    "llama-bpe": ([_split(r"\p{N}{1,3}"), _BYTES], True),
}
"""llama.cpp's names for ways to divide a text into words, the same in terms of the tokenizers library, and whether a
word that is a token is taken as it is (`ignore_merges`)."""


class Vocabulary:
    """The tokens of a model by id, with what llama.cpp must know about each."""

    def __init__(self, tokenizer: BraidTokenizer, rows: int):
        """`rows` are those of the embedding, which may be more than the tokenizer has tokens."""
        self.tokenizer = tokenizer
        by_id = {index: token for token, index in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
        self.tokens = [by_id.get(index, f"[PAD{index}]") for index in range(rows)]
        self.types = ["NORMAL" if index in by_id else "UNUSED" for index in range(rows)]
        for index, token in tokenizer.backend.get_added_tokens_decoder().items():
            # llama.cpp finds user-defined tokens in every text, and control tokens only where it is asked to.
            self.types[index] = "CONTROL" if token.special else "USER_DEFINED"
        self.merges = [" ".join(merge) for merge in tokenizer.definition["model"].get("merges", [])]

    def add_to(self, writer: Any, token_types: Any) -> None:
        """Give gguf's writer everything about the tokenizer."""
        tokenizer = self.tokenizer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer))
        writer.add_token_list(self.tokens)
        writer.add_token_types([token_types[name] for name in self.types])
        # An array cannot be empty, and llama.cpp demands one: a merge of what is never a piece of a word does nothing.
        writer.add_token_merges(self.merges or [f"{tokenizer.special.eos} {tokenizer.special.eos}"])
        writer.add_eos_token_id(tokenizer.eos_id)
        # Without the key llama.cpp would take token 11; texts begin as in `braid generate`.
        named = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        writer.add_bos_token_id(tokenizer.beginning[0] if tokenizer.beginning else named)
        if tokenizer.pad_id is not None:
            writer.add_pad_token_id(tokenizer.pad_id)
        if tokenizer.pause_id is not None:  # no model was trained to predict it
            writer.add_array("tokenizer.ggml.suppress_tokens", [tokenizer.pause_id])
        writer.add_add_bos_token(bool(tokenizer.beginning))
        writer.add_add_eos_token(False)
        if isinstance(template := tokenizer.settings.get("chat_template"), str):
            writer.add_chat_template(template)


def vocabulary_problems(tokenizer: BraidTokenizer, rows: int) -> list[str]:
    """Why llama.cpp would make other tokens of some text, or could not hold the vocabulary."""
    model = tokenizer.definition["model"]
    if model["type"] != "BPE":
        return [f"the tokenizer is of the kind {model['type']}; Braid writes byte-level BPE to GGUF"]
    problems = []
    if tokenizer.vocab_size > rows:
        problems.append(f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {rows} rows for them")
    if "normalizer" in tokenizer.definition:
        problems.append(f"the tokenizer changes texts first ({tokenizer.definition['normalizer']['type']})")
    if tokenizer.space_before != "nothing":
        problems.append("the tokenizer puts a space before every text (`space_before`), and llama.cpp does not")
    elif pre_tokenizer_name(tokenizer) is None:
        known = ", ".join(PRE_TOKENIZERS)
        problems.append(f"no pre-tokenizer of {known} divides texts into words as this tokenizer does")
    if options := [name for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if name in model]:
        problems.append(f"the tokenizer's BPE has options that llama.cpp lacks: {', '.join(options)}")
    if missing := [byte for byte, char in enumerate(byte_characters()) if char not in model["vocab"]]:
        problems.append(f"the tokenizer has no token for {len(missing)} of the 256 bytes")
    # Tokens that texts may contain, recognised only in some places, or taking the spaces beside them along.
    picky = [
        token["content"]
        for token in tokenizer.definition.get("added_tokens", [])
        if not token.get("special") and any(token.get(name) for name in ("lstrip", "rstrip", "single_word"))
    ]
    if picky:
        problems.append(f"llama.cpp finds these tokens in other places of a text: {', '.join(picky)}")
    if tokenizer.eos_id is None:
        problems.append("no token ends a text; llama.cpp would stop at token 11")
    return problems


def pre_tokenizer_name(tokenizer: BraidTokenizer) -> str | None:
    """llama.cpp's name for the way in which a tokenizer divides texts into words."""
    definition = tokenizer.definition
    first, model = definition.get("pre_tokenizer", {}), definition["model"]
    sequence = first["pretokenizers"] if first.get("type") == "Sequence" else [first]
    # `trim_offsets` does not change tokens.
    steps = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in sequence]
    if steps == [_BYTES] and not model.get("merges"):
        return "gpt-2"  # every byte is a token, however words are divided
    way = (steps, model.get("ignore_merges", False))
    return next((name for name, known in PRE_TOKENIZERS.items() if known == way), None)


BLOCK_TYPES = ("q8_0", "q5_0", "q4_0")
"""Types with a scale for every 32 numbers of a row, which the gguf package computes."""
MIXTURES = ("q6_k", "q5_k_m", "q4_k_m")
"""Files whose matrices are of several types with scales for 256 numbers: llama.cpp's own quantiser chooses and computes
them, since the gguf package only reads such types."""
DTYPES = ("f32", "f16", "bf16", *BLOCK_TYPES, *MIXTURES)
"""The types of matrices."""
POSITIONS, EMBEDDING, HEAD = "position_embd.weight", "token_embd.weight", "output.weight"
BLOCK = 32


def file_type(dtype: str) -> Any:
    """llama.cpp's number for files of a type."""
    return import_gguf().LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"]


def stored_type(name: str, shape: tuple[int, ...], dtype: str) -> str:
    """The type of one tensor: vectors and learned positions stay f32, as in llama.cpp's own conversions; below 8 bits
    embedding and head keep 8."""
    if len(shape) < 2 or name == POSITIONS or dtype in MIXTURES:
        return "f32"
    if dtype in BLOCK_TYPES and shape[-1] % BLOCK:
        return "f16"
    return "q8_0" if dtype in BLOCK_TYPES and name in (EMBEDDING, HEAD) else dtype


def import_llama_cpp() -> ModuleType:
    """The package with llama.cpp's library, or an error that says how to get it."""
    try:
        import llama_cpp
    except ImportError:
        kinds = ", ".join(MIXTURES)
        todo = "pip install llama-cpp-python, or write f32 and run llama.cpp's `llama-quantize` on the file."
        raise BraidError(f"{kinds} are made by llama.cpp's own quantiser, which is not installed", todo=todo) from None
    return llama_cpp


def quantised_by_llama_cpp(source: Path, target: Path, dtype: str) -> None:
    """Write a file of float32 as one of these mixtures."""
    llama_cpp = import_llama_cpp()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = file_type(dtype), torch.get_num_threads()
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), options):
        raise BraidError(f"llama.cpp's quantiser could not write {dtype}", str(target), "Its messages are above.")


@dataclass(frozen=True)
class GgufTarget(ExportTarget):
    """One file of a model of ours."""

    info: ModelInfo
    architecture: LlamaCppArchitecture
    shapes: Shapes
    dtype: str

    def write(self, out: Path, model: Exported) -> None:
        with atomic_file(out) as scratch, TemporaryDirectory(prefix="braid-") as folder:
            written = Path(folder) / "f32.gguf" if self.dtype in MIXTURES else scratch
            self._write_file(written, out.stem, model)
            if written is not scratch:
                quantised_by_llama_cpp(written, scratch, self.dtype)

    def _write_file(self, path: Path, name: str, model: Exported) -> None:
        gguf, lineage = import_gguf(), model.lineage
        assert model.tokenizer is not None  # a model without one was refused
        writer = gguf.GGUFWriter(path, self.architecture.name)
        writer.add_type("model")
        writer.add_name(name)
        writer.add_description(f"Made with Braid (the Python package braidlm): {lineage['made_by']}.")
        if licence := licence_of(lineage):
            writer.add_license(licence)
        writer.add_file_type(file_type("f32" if self.dtype in MIXTURES else self.dtype))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_string("braid.lineage", json.dumps(lineage, ensure_ascii=False))
        self.architecture.add_hyperparameters(writer, self.info)
        Vocabulary(model.tokenizer, self.info.config.vocab_size).add_to(writer, gguf.TokenType)
        for tensor_name, tensor in (model.tensors | self.architecture.constants(self.info)).items():
            kind = gguf.GGMLQuantizationType[stored_type(tensor_name, tuple(tensor.shape), self.dtype).upper()]
            writer.add_tensor(tensor_name, _quantised(gguf, tensor_name, tensor, kind), raw_dtype=kind)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _quantised(gguf: Any, name: str, tensor: Tensor, kind: Any) -> np.ndarray:
    """The bytes of a tensor in a type, which must be able to hold its numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        data = gguf.quants.quantize(tensor.numpy(), kind)
        finite = np.isfinite(gguf.quants.dequantize(data, kind)).all()
    if not finite:
        raise BraidError(f"{name} has numbers that are too large for {kind.name.lower()}", todo="Use f32 or bf16.")
    return data


@bridges.register("gguf")
class GgufBridge(ExportingBridge):
    """A file for llama.cpp, which Braid writes and does not read."""

    title = "GGUF"
    folder = False
    suffix = ".gguf"
    dtypes = DTYPES
    zero_biases = True

    def __init__(self, dtype: str = dtypes[0]):
        self.dtype = dtype

    def export_problems(self, info: ModelInfo) -> list[str]:
        return _architecture(info).export_problems(info)

    def tokenizer_problems(self, info: ModelInfo, tokenizer: BraidTokenizer | None) -> list[str]:
        if tokenizer is None:
            return ["a GGUF file holds the tokenizer, and this model has none"]
        return vocabulary_problems(tokenizer, info.config.vocab_size)

    def mappings(self, info: ModelInfo) -> Iterator[TensorMapping]:
        rename = (architecture := _architecture(info)).renamed(info)
        for mapping in architecture.mappings(info):
            # llama.cpp's matrices are [out, in] throughout, as ours are.
            yield replace(mapping, foreign=tuple(map(rename, mapping.foreign)), transposed=False)

    def target(self, info: ModelInfo) -> ExportTarget:
        if self.dtype in MIXTURES:
            import_llama_cpp()
        rename = (architecture := _architecture(info)).renamed(info)
        transposed = {name for mapping in architecture.mappings(info) if mapping.transposed for name in mapping.foreign}
        shapes = architecture.target(info).shapes.items()
        needed = {rename(name): shape[::-1] if name in transposed else shape for name, shape in shapes}
        return GgufTarget(info, architecture, needed, self.dtype)

    def export_notes(self, info: ModelInfo) -> list[str]:
        """The types of what is not f32; dropout is not mentioned, which no file for inference has."""
        if (own := self.dtype) == "f32":
            return []
        if own in MIXTURES:
            return [f"llama.cpp's quantiser writes {own}; matrices whose rows 256 does not divide get a larger type"]
        notes = [f"matrices are written as {own}; vectors and learned positions stay f32"]
        if own in BLOCK_TYPES[1:]:
            notes.append("embedding and head are q8_0")
        shapes = self.foreign_shapes(info, self.checked_mappings(info)).items()
        others = {shape[-1] for name, shape in shapes if stored_type(name, shape, own) == "f16" != own}
        if widths := ", ".join(map(str, sorted(others))):
            notes.append(f"{own} needs rows of a multiple of {BLOCK}; matrices with rows of {widths} are f16")
        return notes


def _architecture(info: ModelInfo) -> LlamaCppArchitecture:
    """The architecture of llama.cpp that a model resembles most."""
    return LlamaCppGPT2() if info.architecture.positions.kind == "learned" else LlamaCppLlama()
