"""Many clients at once: good requests whose text is known, clients that go, and bad requests.

python -m tests.serving.load [REQUESTS] [CLIENTS]
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from braidlm.core.decoding.decoder import Sampling
from braidlm.core.decoding.generation import continue_text
from braidlm.opening.open import open_model

PROMPTS, LONGEST = 8, 32
BAD: list[dict[str, Any]] = [
    {"model": "nobody"}, {"model": "chat", "prompt": [999]}, {"model": "chat", "prompt": "x" * 500}, {},
    {"model": "chat", "n": "2"}, {"model": "chat", "braid": {"paths": ["nobody"]}}, {"model": "chat", "best_of": 9},
]  # fmt: skip


@dataclass
class Load:
    """What to ask of a server, and what it is to answer."""

    url: str
    texts: dict[tuple[str, str | None], str]
    """By prompt and path, what the model writes alone."""
    seed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    beats: int = 0
    """How often /health answered meanwhile."""

    async def run(self, requests: int, at_once: int) -> None:
        """All requests, by so many clients, while another asks whether the server is well."""
        kinds = iter(range(requests))
        limits = httpx.Limits(max_connections=at_once + 1)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            health = asyncio.create_task(self._ask_health())
            await asyncio.gather(*(self._client(client, kinds) for _ in range(at_once)))
            health.cancel()

    async def _ask_health(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=10) as client:
            while True:
                assert (await client.get("/health")).status_code == 200
                self.beats += 1
                await asyncio.sleep(0.05)

    async def _client(self, client: httpx.AsyncClient, numbers: Any) -> None:
        for number in numbers:
            rng = random.Random(f"{self.seed} {number}")
            kind = rng.random()
            if kind < 0.05:
                answer = await client.post("/v1/completions", json=rng.choice(BAD))
                assert answer.status_code in (400, 404), answer.text
                self.outcomes["bad"] += 1
                continue
            (prompt, path), text = rng.choice(list(self.texts.items()))
            body = {"model": "chat", "prompt": prompt, "temperature": 0, "max_tokens": LONGEST, "ignore_eos": True}
            body |= {"braid": {"paths": [path]}} if path else {}
            if kind < 0.25:
                await self._go_early(client, body | {"stream": True}, rng)
            elif kind < 0.5:
                answer = await client.post("/v1/completions", json=body)
                self._check("whole", prompt, text, answer.json()["choices"][0]["text"])
            else:
                self._check("streamed", prompt, text, await _streamed(client, body | {"stream": True}))

    async def _go_early(self, client: httpx.AsyncClient, body: Any, rng: random.Random) -> None:
        events = rng.randrange(4)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if events <= 0 and line:
                    break
                events -= bool(line)
        self.outcomes["cancelled"] += 1

    def _check(self, kind: str, prompt: str, expected: str, text: str) -> None:
        self.outcomes[kind] += 1
        if text != expected:
            self.wrong.append(f"{kind} {prompt!r}: {text!r} instead of {expected!r}")


async def _streamed(client: httpx.AsyncClient, body: Any) -> str:
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
    return text


def texts_alone(folder: Path) -> dict[tuple[str, str | None], str]:
    """What the model writes after each of some prompts, one after another."""
    rng, texts = random.Random(0), {}
    for path in (None, "stories"):
        opened = open_model(folder, paths=[path] if path else None)
        model, tokenizer = opened.load("cpu"), opened.tokenizer
        tokenizer.special = tokenizer.special.__class__(eos=None, bos="<|endoftext|>")  # it goes on after the end
        for _ in range(PROMPTS):
            prompt = "".join(rng.choices("abcdefgh ", k=rng.randrange(1, 30)))
            pieces = continue_text(model, tokenizer, [prompt], LONGEST, Sampling(0))
            texts[prompt, path] = "".join(piece.text for piece in pieces)
    return texts


def main(requests: int = 1000, clients: int = 64) -> None:
    """A warm-up of as many clients, then all requests: outcomes, seconds, and this process's memory around them."""
    from tests.serving.servers import running, save_chat_model, until

    with tempfile.TemporaryDirectory() as root:
        folder = save_chat_model(Path(root) / "chat")
        with running([folder], rows=clients, waiting=256) as server:
            texts = texts_alone(folder)
            asyncio.run(Load(server.url, texts, seed=1).run(2 * clients, clients))
            load, before, begun = Load(server.url, texts), _megabytes(), time.perf_counter()
            asyncio.run(load.run(requests, clients))
            seconds = time.perf_counter() - begun
            until(server.all_rows_are_free)
            until(lambda: not server.server.server_state.tasks)
            print(f"{dict(load.outcomes)}, {len(load.wrong)} wrong texts, {load.beats} answers of /health")
            print(f"{seconds:.1f} s, {before:.0f} MB before, {_megabytes():.0f} MB after, all rows free")
            print(*load.wrong[:5], sep="\n")


def _megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
