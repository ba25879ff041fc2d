"""Many streams of one model: the engine alone, through HTTP, and beside transformers' own continuous batching.

python benchmarks/serve.py [--device cuda] [--size 28m] [--streams 64] [--tokens 256]

All run in one process after another, with random weights of one shape (bf16 on a GPU), greedily; the clients of the
HTTP server are a process of their own.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import record
from shapes import VOCABULARY, braid_model, peer_model
from transformers import GenerationConfig

from braidlm.core.decoding.decoder import Sampling
from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import train_bpe
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens
from braidlm.opening.open import open_model
from braidlm.serving.engine import Engine, Request

CONTEXT, PROMPT, PORT = 1024, 16, 8765


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
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.client is not None:
        print(json.dumps(asyncio.run(clients(args.client, args.tokens, args.temperature))))
        return
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
    """`braid serve`'s app on uvicorn; the clients stream."""
    import uvicorn

    from braidlm.serving.api.app import create_app
    from braidlm.serving.models import ServedModels

    async def serve() -> list[dict[str, Any]]:
        models = ServedModels([folder], device=str(device), rows=max(args.streams))
        app = create_app(models, hosts=("127.0.0.1", "localhost"))
        server = uvicorn.Server(uvicorn.Config(app, port=PORT, log_level="warning", access_log=False))
        serving = asyncio.create_task(server.serve())
        rows = []
        for count in args.streams:
            results = [await _clients(count, args) for _ in range(args.rounds + 1)][1:]
            best = min(results, key=lambda result: float(result["seconds"]))
            rows.append(measured(count, best.pop("tokens"), best.pop("seconds"), **best))
        server.should_exit = True
        await serving
        return rows

    return asyncio.run(serve())


async def _clients(count: int, args: Any) -> dict[str, Any]:
    """Run the clients in a process of their own."""
    options = ["--client", count, "--tokens", args.tokens, "--temperature", args.temperature]
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *map(str, options), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return json.loads(output)  # type: ignore[no-any-return]


async def clients(count: int, tokens: int, temperature: float) -> dict[str, Any]:
    """So many clients at once: how many tokens they got and how long it took."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", PORT)
            break
        except OSError:
            await asyncio.sleep(0.1)
    writer.close()
    begun = time.perf_counter()
    results = await asyncio.gather(*(client(prompt, tokens, temperature) for prompt in prompts(count)))
    seconds = time.perf_counter() - begun
    first = sorted(first - begun for _, _, first in results)
    return {
        "tokens": sum(tokens for tokens, _, _ in results),
        "seconds": seconds,
        "events": sum(events for _, events, _ in results),
        "first_token_median": first[len(first) // 2],
    }


async def client(prompt: tuple[int, ...], tokens: int, temperature: float) -> tuple[int, int, float]:
    """One stream: its tokens, events, and when the first came."""
    body = json.dumps(
        {
            "model": "model",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": temperature,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{PORT}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    events, first, last = 0, 0.0, b""
    async for event in lines(reader):
        first = first or time.perf_counter()
        events += 1
        if b'"completion_tokens"' in event:
            last = event
    writer.close()
    return json.loads(last)["usage"]["completion_tokens"], events, first


async def lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events."""
    async for line in reader:
        if line.startswith(b"data: {"):
            yield line[6:]


def by_peer(folder: Path, args: Any, device: torch.device, dtype: torch.dtype) -> Sequence[dict[str, Any]]:
    """transformers' `generate_batch`, with one manager that stays warm."""
    model: Any = peer_model(args.family, args.size, CONTEXT).to(device, dtype).eval()
    config = GenerationConfig(
        max_new_tokens=args.tokens,
        min_new_tokens=args.tokens,
        do_sample=args.temperature > 0,
        temperature=args.temperature or 1.0,
        eos_token_id=-1,
        pad_token_id=0,
        use_cuda_graph=device.type == "cuda",
    )
    rows = []
    for count in args.streams:
        best = (float("inf"), 0)
        for index in range(args.rounds + 1):
            begun = time.perf_counter()
            inputs = [list(prompt) for prompt in prompts(count)]
            results = model.generate_batch(inputs=inputs, generation_config=config, persistent_manager=True)
            seconds = time.perf_counter() - begun
            tokens = sum(len(result.generated_tokens) for result in results.values())
            best = min(best, (seconds, tokens)) if index else best
        rows.append(measured(count, best[1], best[0]))
    return rows


if __name__ == "__main__":
    main()
