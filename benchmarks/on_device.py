"""A model as its users run it on a CPU: by Braid, as an ONNX graph in onnxruntime, and as GGUF files in llama.cpp.

The model has a recipe's shape, random weights and a tokenizer of bytes: none of this changes how long a pass takes, and
only the vocabulary's size is the recipe's. Every contestant has the same threads; llama.cpp says its own times.
"MB" is what is on disk, "prompt" and "text" are tokens/s of reading a prompt and of writing after it.

pip install xllamacpp; python benchmarks/on_device.py RECIPE ... [--threads 1] [--prompt 128] [--tokens 64] [--rounds 5]
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xllamacpp
from measure import record

from braidlm.bridges.formats.gguf import GgufBridge
from braidlm.bridges.formats.onnx import Graph
from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import save_model
from braidlm.core.models.presets import config_from
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.convert import convert

Speeds = tuple[float, float]
"""Tokens/s of a prompt and of the text after it."""
GREEDY = Sampling(temperature=0)


def model_of(recipe: str) -> BraidForCausalLM:
    """A random model of a recipe's shape."""
    config: BraidConfig = config_from(recipe, vocab_size=8192)
    torch.manual_seed(0)
    return BraidForCausalLM(config).eval()


def by_braid(model: BraidForCausalLM, prompt: list[int], tokens: int) -> Speeds:
    """`braid generate`'s own decoder."""
    with torch.inference_mode():
        steps = decode_tokens(Decoder(model, 1, len(prompt) + tokens), [prompt], tokens, GREEDY, None, 0)
        begun = time.perf_counter()
        next(steps)
        read = time.perf_counter()
        written = sum(1 for _ in steps)
    return len(prompt) / (read - begun), written / (time.perf_counter() - read)


def by_graph(graph: Graph, prompt: list[int], tokens: int) -> Speeds:
    """onnxruntime."""
    begun = time.perf_counter()
    logits, past = graph(np.array([prompt]))
    read = time.perf_counter()
    for _ in range(tokens - 1):
        logits, past = graph(logits[:, -1:].argmax(-1), past)
    return len(prompt) / (read - begun), (tokens - 1) / (time.perf_counter() - read)


def llama_cpp(path: Path, threads: int) -> Callable[[list[int], int], Speeds]:
    """A file in llama.cpp."""
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.warmup = str(path), 512, 1, True
    options.verbosity = -1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(options)

    def speeds(prompt: list[int], tokens: int) -> Speeds:
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        times = server.handle_completions(asked)["timings"]
        assert (times["prompt_n"], times["predicted_n"]) == (len(prompt), tokens)
        return times["prompt_per_second"], times["predicted_per_second"]

    return speeds


def size(path: Path) -> float:
    """MB of a file, or of a folder's weights or graph."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.onnx*")]
    return sum(file.stat().st_size for file in files) / 1e6


def rows_of(recipe: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each way to run one model: the best of rounds in which they take turns."""
    model, prompt = model_of(recipe), list(range(1, args.prompt + 1))
    paths = {"braid, f32": save_model(model, folder / "braid", bytes_tokenizer(), {"made_by": "a benchmark"})}
    convert(paths["braid, f32"], paths.setdefault("onnx, f32", folder / "onnx"), to="onnx")
    graph = Graph(folder / "onnx", args.threads)
    works = {"braid, f32": partial(by_braid, model), "onnx, f32": partial(by_graph, graph)}
    with contextlib.suppress(BraidError):  # llama.cpp knows the shapes of few models
        for dtype in GgufBridge.dtypes:
            path = folder / f"{dtype}.gguf"
            convert(folder / "braid", path, to="gguf", dtype=dtype)
            paths[f"gguf, {dtype}"], works[f"gguf, {dtype}"] = path, llama_cpp(path, args.threads)
    best: dict[str, Speeds] = dict.fromkeys(works, (0.0, 0.0))
    for _ in range(args.rounds):
        for name, work in works.items():
            prompt_speed, text_speed = work(prompt, args.tokens)
            best[name] = (max(best[name][0], prompt_speed), max(best[name][1], text_speed))
    return [
        {"model": recipe, "run by": name, "MB": size(paths[name]), "prompt": speeds[0], "text": speeds[1]}
        for name, speeds in best.items()
    ]


def main() -> None:
    """Measure and write a dated result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="+")
    for name, value in (("threads", 1), ("prompt", 128), ("tokens", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for recipe in args.recipes:
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(recipe, args, Path(folder))
    record("on_device", torch.device("cpu"), rows, args.out)


if __name__ == "__main__":
    main()
