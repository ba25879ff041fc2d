"""Servers on real sockets, in a thread of this process."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.serving.api.app import create_app
from braidlm.serving.api.safety import Limits
from braidlm.serving.models import ServedModels
from braidlm.serving.serve import _listen, make_server
from tests.tiny_models import BASE, randomised, tiny_config

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT = 96
PATHS = {**BASE, "context": CONTEXT, "positions": "learned", "stages": [
    "block", {"parallel": {"layers": 1, "paths": ["stories", "maths"], "join": "shared_linear"}}, "block",
]}  # fmt: skip


@dataclass
class Running:
    """A server that runs, and what it serves."""

    url: str
    port: int
    models: ServedModels
    server: Any

    def client(self, key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def connect(self) -> socket.socket:
        """A connection without HTTP."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **options)

    def all_rows_are_free(self) -> bool:
        engines = self.models.engines.values()
        return all(engine.free == engine.rows and not engine.waiting for engine in engines)


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@contextmanager
def running(
    names: Sequence[Path | str], limits: Limits | None = None, api_key: str | None = None, **options: Any
) -> Iterator[Running]:
    """Serve models at a free port of this machine."""
    hosts = options.pop("hosts", ("localhost",))
    models = ServedModels(names, **{"device": "cpu", "rows": 8, "waiting": 32, **options})
    listener = _listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = make_server(create_app(models, (), limits, api_key, hosts), drain=10)
    thread = threading.Thread(target=lambda: asyncio.run(server._serve([listener])))
    thread.start()
    try:
        yield Running(f"http://127.0.0.1:{port}", port, models, server)
    finally:
        server.should_exit = True
        thread.join()


def save_chat_model(folder: Path, template: str | None = TEMPLATE, seed: int = 0, **architecture: Any) -> Path:
    """A model over bytes with two paths, and a template for chats."""
    import torch

    tokenizer = bytes_tokenizer()
    if template is not None:
        tokenizer.settings["chat_template"] = template
    torch.manual_seed(seed)
    from braidlm.model.modeling_braid import BraidForCausalLM

    config = tiny_config(vocab_size=tokenizer.vocab_size, **{**PATHS, **architecture})
    config.eos_token_id = tokenizer.eos_id
    return save_model(randomised(BraidForCausalLM(config), seed).eval(), folder, tokenizer, {"made_by": "a test"})
