"""ONNX, a graph with its weights that onnxruntime runs on many devices; Braid writes it and does not read it.

The graph is one pass with a cache, named as by Hugging Face's tools: of whole texts, or of the next tokens of texts
whose keys and values are given. Their number and lengths are free, and padding may be on either side.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from braidlm.bridges.bridge import ExportingBridge, ExportTarget, TensorMapping, bridges
from braidlm.bridges.model_info import ModelInfo
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.folders import fill
from braidlm.core.models.logits import Probe, check_promise
from braidlm.model.compression import untrainable
from braidlm.model.language_model import LanguageModel
from braidlm.model.routing.router import TopKRouter

GRAPH = "model.onnx"
PACKAGES = ("onnx", "onnxruntime", "onnxscript")
EXACT = 1e-5
"""The largest change of a logit in onnxruntime; of logits above 1, the largest share of them."""
IN_ONE_FILE = 1_900_000_000
"""Bytes of weights in the graph's own file, which cannot hold 2 GB; more are in a file beside it."""


class GivenCache:
    """The keys and values that a graph is given, to which its tokens add theirs: `keys, values, keys, ...`."""

    def __init__(self, past: Sequence[Tensor]):
        self.length, self.present = past[0].shape[2], list(past)

    def get_seq_length(self) -> int:
        """How many tokens of each text came before."""
        return self.length

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Add a layer's keys and values of new tokens."""
        own = slice(2 * slot, 2 * slot + 2)
        self.present[own] = [torch.cat(pair, dim=2) for pair in zip(self.present[own], (key, value), strict=True)]
        return self.present[own][0], self.present[own][1]


class CachedPass(nn.Module):
    """What the graph computes: logits and the cache of all tokens, from new tokens and the cache of those before."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        cache = GivenCache(past)
        output = self.model(input_ids, attention_mask, past_key_values=cache, use_cache=True)
        return output.logits, *cache.present


class Graph:
    """A written graph in onnxruntime."""

    def __init__(self, folder: Path, threads: int = 0):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads  # 0: as many as there are cores
        self.session = onnxruntime.InferenceSession(str(folder / GRAPH), options, ["CPUExecutionProvider"])
        self.names = [given.name for given in self.session.get_inputs()]
        self.shapes = [given.shape for given in self.session.get_inputs()[2:]]

    def nothing(self, batch: int) -> list[np.ndarray]:
        """The cache of texts that begin."""
        return [np.zeros((batch, heads, 0, channels), np.float32) for _, heads, _, channels in self.shapes]

    def __call__(
        self, ids: np.ndarray, past: list[np.ndarray] | None = None, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits [batch, time, vocabulary] and the cache, of tokens [batch, time] after those of `past`."""
        past = self.nothing(len(ids)) if past is None else past
        mask = np.ones((len(ids), past[0].shape[2] + ids.shape[1]), np.int64) if mask is None else mask
        outputs: list[Any] = self.session.run(None, dict(zip(self.names, (ids, mask, *past), strict=True)))
        return outputs[0], outputs[1:]


class OnnxTarget(ExportTarget):
    """A folder with a graph of one model of ours."""

    def __init__(self, info: ModelInfo):
        self.info = info
        self.shapes = {name: tuple(tensor.shape) for name, tensor in info.tensors.items()}

    @torch.no_grad()
    def save(self, tensors: dict[str, Tensor], folder: Path) -> None:
        own = self.info.tensors.items()
        model = fill(skeleton(self.info.config), {name: tensors[name].to(tensor.dtype) for name, tensor in own})
        batch, time, past = 2, 3, 5  # of the example; the graph holds for any
        ids, mask = torch.zeros(batch, time, dtype=torch.long), torch.ones(batch, past + time, dtype=torch.long)
        model(ids)  # ends of bytes find out what no graph can
        shapes = [shape for shape in model.model.cache_shapes for _ in ("key", "value")]
        cache = [torch.zeros(batch, heads, past, channels) for heads, channels in shapes]
        names = [f"{slot}.{kind}" for slot in range(len(shapes) // 2) for kind in ("key", "value")]
        sizes = ({1: "sequence_length"}, {1: "total_sequence_length"}, ({2: "past_sequence_length"},) * len(cache))
        free = [{0: "batch_size"} | own for own in (*sizes[:2], *sizes[2])]
        with _quiet():
            program: Any = torch.onnx.export(
                CachedPass(model).eval(),
                (ids, mask, *cache),
                input_names=["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in names)],
                output_names=["logits", *(f"present.{name}" for name in names)],
                dynamic_shapes=(*free[:2], tuple(free[2:])),
                dynamo=True,
                verbose=False,
            )
        for part in (program.model, program.model.graph, *program.model.graph.all_nodes()):
            part.metadata_props.clear()  # which line of code made it: half of a small file
        program.save(folder / GRAPH, external_data=4 * self.info.parameters > IN_ONE_FILE)

    def check(self, folder: Path, probe: Probe) -> None:
        """Compare a pass over whole texts, and one whose second half has the cache of the first."""
        allowed, graph, ids = EXACT * max(1.0, probe.logits.abs().max().item()), Graph(folder), probe.ids.numpy()
        half = ids.shape[1] // 2
        first, past = graph(ids[:, :half])
        for logits in (graph(ids)[0], np.concatenate((first, graph(ids[:, half:], past)[0]), axis=1)):
            promise = f"no logit of the graph differs by more than {allowed:.3g}, and here one differs by"
            check_promise(promise, probe.logits, torch.from_numpy(logits), allowed)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter tells of packages and rules that are not needed; what it cannot do is one sentence."""
    loggers = {name: logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")}
    levels = {name: logger.level for name, logger in loggers.items()}
    try:
        for logger in loggers.values():
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except torch.onnx.OnnxExporterError as error:
        first = str(error).strip().split("\x1b")[0].split("\n")[0]  # what follows is for torch's developers, in colours
        raise BraidError(f"torch cannot record this model as ONNX: {first}") from error
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])


@bridges.register("onnx")
class OnnxBridge(ExportingBridge):
    """A folder with a graph for onnxruntime, which Braid writes and does not read."""

    title = "ONNX"
    folder = False

    def export_problems(self, info: ModelInfo) -> list[str]:
        problems = [f"matrices are rounded with their inputs ({k})" for k in untrainable(info.architecture.compression)]
        return problems if info.model.model.attentions else [*problems, "it has no attention, and so no cache"]

    def checked_mappings(self, info: ModelInfo) -> list[TensorMapping]:
        return list(self.mappings(info))  # what layers share is in the graph once, too

    def mappings(self, info: ModelInfo) -> Iterator[TensorMapping]:
        yield from (TensorMapping(name, (name,)) for name in info.tensors)

    def foreign_shapes(self, info: ModelInfo, mappings: list[TensorMapping]) -> dict[str, tuple[int, ...]]:
        return {mapping.braid: tuple(info.tensors[mapping.braid].shape) for mapping in mappings}

    def target(self, info: ModelInfo) -> ExportTarget:
        if missing := [package for package in PACKAGES if find_spec(package) is None]:
            what = f"writing ONNX needs {', '.join(missing)}"
            raise BraidError(what, todo="pip install 'braidlm[device]'")
        return OnnxTarget(info)

    def export_notes(self, info: ModelInfo) -> list[str]:
        if any(isinstance(module, TopKRouter) for module in info.model.modules()):
            return ["the graph computes all experts and paths, also those that a token does not choose"]
        return []
