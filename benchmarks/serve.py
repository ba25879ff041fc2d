"""Many streams of one model: the engine alone, through HTTP, and beside transformers' own continuous batching.

python benchmarks/serve.py [--device cuda] [--size 28m] [--streams 64] [--tokens 256]

All run in one process after another, with random weights of one shape (bf16 on a GPU), greedily; the clients of the
HTTP server are a process of their own. Times are the best of several rounds after one that warms up.

`generate_batch` gets a manager for each number of texts, which stays between rounds (one that was made for a single
text would decode 64 one by one), a cache and batches of the size that these texts need, no shared prefixes to look for,
and attention as it chooses (flash attention where that is installed, or else SDPA over pages with masks). It is timed
as its own settings decide, and with CUDA graphs and double buffering, which it leaves out where attention has masks.
"""

import argparse
import asyncio
import json
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from measure import record
from shapes import VOCABULARY, braid_model, peer_model
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from braidlm.core.decoding.decoder import Sampling
from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import train_bpe
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens
from braidlm.opening.open import open_model
from braidlm.serving.engine import Engine, Request

CONTEXT, PROMPT = 1024, 16
PAGE = 256
"""Tokens of a page of the peer's cache."""
CLIENTS = str(Path(__file__).with_name("serve_clients.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--family", default="gpt2")
    parser.add_argument("--size", default="28m")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--skip", nargs="*", default=[], choices=["engine", "http", "peer"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as root:
        model = braid_model(args.family, args.size, CONTEXT).to(dtype)
        folder = save_model(model, Path(root) / "model", tokenizer(), {"made_by": "benchmarks/serve.py"})
        rows: list[dict[str, Any]] = []
        works = {"engine": by_engine, "http": by_http, "peer": by_peer}
        for name in (name for name in works if name not in args.skip):
            for row in works[name](folder, args, device, dtype):
                rows.append({"what": name, "family": args.family, "size": args.size} | row)
                print(rows[-1], flush=True)
        record("serve", device, rows, args.out)


def tokenizer() -> BraidTokenizer:
    """A BPE with as many tokens as the model, of random words."""
    source = random.Random(0)
    words = ["".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(2, 9))) for _ in range(30_000)]
    return BraidTokenizer(train_bpe([" ".join(words)] * 2, VOCABULARY), SpecialTokens())


def prompts(count: int) -> list[tuple[int, ...]]:
    source = random.Random(count)
    return [tuple(source.randrange(300, VOCABULARY) for _ in range(PROMPT)) for _ in range(count)]


def measured(streams: int, tokens: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"streams": streams, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, **more}


def by_engine(folder: Path, args: Any, device: torch.device, dtype: torch.dtype) -> Sequence[dict[str, Any]]:
    """The engine, read in an event loop."""
    engine = Engine(open_model(folder), str(device), rows=max(args.streams))

    async def read(prompt: tuple[int, ...]) -> int:
        sampling = Sampling(args.temperature, seed=1)
        completion = engine.submit(Request(prompt, args.tokens, sampling, ignore_eos=True))
        return sum([len(some) async for some in completion.tokens()])

    async def once(count: int) -> tuple[float, int]:
        begun = time.perf_counter()
        tokens = sum(await asyncio.gather(*(read(prompt) for prompt in prompts(count))))
        return time.perf_counter() - begun, tokens

    async def all_counts() -> list[dict[str, Any]]:
        rows = []
        for count in args.streams:
            await once(count)  # captures graphs
            seconds, tokens = min([await once(count) for _ in range(args.rounds)])
            rows.append(measured(count, tokens, seconds))
        return rows

    rows = asyncio.run(all_counts())
    engine.close()
    return rows


def by_http(folder: Path, args: Any, device: torch.device, dtype: torch.dtype) -> Sequence[dict[str, Any]]:
    """The app and the server of `braid serve`; the clients stream."""
    from braidlm.serving.api.app import create_app
    from braidlm.serving.models import ServedModels
    from braidlm.serving.serve import make_server

    async def serve() -> list[dict[str, Any]]:
        models = ServedModels([folder], device=str(device), rows=max(args.streams))
        app = create_app(models, hosts=("127.0.0.1", "localhost"))
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        server = make_server(app, drain=10)
        serving = asyncio.create_task(server.serve([listener]))
        rows = []
        for count in args.streams:
            port = listener.getsockname()[1]
            results = [await _clients(count, port, args) for _ in range(args.rounds + 1)][1:]
            best = min(results, key=lambda result: float(result["seconds"]))
            rows.append(measured(count, best.pop("tokens"), best.pop("seconds"), **best))
        server.should_exit = True
        await serving
        return rows

    return asyncio.run(serve())


async def _clients(count: int, port: int, args: Any) -> dict[str, Any]:
    """Run the clients in a process of their own."""
    body = {"model": "model", "max_tokens": args.tokens, "temperature": args.temperature, "ignore_eos": True}
    given = json.dumps({"port": port, "prompts": prompts(count), "body": body})
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, CLIENTS, stdin=pipe, stdout=pipe, stderr=pipe)
    begun = time.thread_time()
    output, errors = await process.communicate(given.encode())
    if process.returncode or not output:
        sys.exit(f"the clients ended with {process.returncode}:\n{errors.decode()}")
    result: dict[str, Any] = json.loads(output)
    return result | {"loop_us_per_token": (time.thread_time() - begun) / result["tokens"] * 1e6}


def by_peer(folder: Path, args: Any, device: torch.device, dtype: torch.dtype) -> Iterable[dict[str, Any]]:
    """transformers' `generate_batch`, as its own settings choose and with CUDA graphs."""
    model: Any = peer_model(args.family, args.size, CONTEXT).to(device, dtype).eval()
    how = GenerationConfig(
        max_new_tokens=args.tokens,
        do_sample=args.temperature > 0,
        temperature=args.temperature or 1.0,
        eos_token_id=-1,
        pad_token_id=0,
    )
    page = "page_size" if "page_size" in signature(ContinuousBatchingConfig).parameters else "block_size"
    kinds: dict[str, dict[str, Any]] = {"its own": {}}
    if device.type == "cuda":
        kinds["graphs"] = {"use_cuda_graph": True, "use_async_batching": True}
    for kind, options in kinds.items():
        for count in args.streams:
            pages = count * (1 + (PROMPT + args.tokens) // PAGE)
            sizes: dict[str, Any] = {page: PAGE, "num_blocks": pages, "max_batch_tokens": max(512, count * PROMPT)}
            batching = ContinuousBatchingConfig(allow_block_sharing=False, **sizes, **options)
            settings = {"settings": kind, "attention": model.config._attn_implementation}
            try:
                best = min(_peer_seconds(model, count, how, batching) for _ in range(args.rounds + 1))
            except (AssertionError, RuntimeError) as error:  # what is left of the device is not to be trusted
                yield {"what": "peer", "streams": count, **settings, "failed": str(error).splitlines()[0][:120]}
                return
            model.destroy_cached_continuous_batching_manager()  # it is made for so many texts
            yield measured(count, count * args.tokens, best, **settings)


def _peer_seconds(model: Any, count: int, how: GenerationConfig, batching: ContinuousBatchingConfig) -> float:
    """One batch; the first makes the manager, which later ones find warm."""
    inputs = [list(prompt) for prompt in prompts(count)]
    begun = time.perf_counter()
    results = model.generate_batch(
        inputs=inputs, generation_config=how, continuous_batching_config=batching, persistent_manager=True
    )
    seconds = time.perf_counter() - begun
    counts = [len(result.generated_tokens) for result in results.values()]
    assert counts == [how.max_new_tokens] * count, counts
    return seconds


if __name__ == "__main__":
    main()
