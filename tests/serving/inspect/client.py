"""Asking an app of `/braid/` in this process."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from braidlm.serving.api.app import create_app
from braidlm.serving.inspect.folders import ServedFolders
from braidlm.serving.inspect.router import router
from braidlm.serving.models import ServedModels

JSON = {"Content-Type": "application/json"}
Ask = Callable[..., Awaitable[Any]]


def with_app(names: Path | Sequence[Path], work: Callable[[Ask], Awaitable[Any]]) -> Any:
    """Run `work` with a function that sends a request and gives the JSON of the answer; engines end afterwards."""

    async def run() -> Any:
        models = ServedModels(names, "cpu", rows=4)
        app = create_app(models, (router(models, ServedFolders(names)),))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

            async def ask(path: str, status: int | None = 200, raw: bool = False, **body: Any) -> Any:
                response = await (
                    client.post(path, content=json.dumps(body), headers=JSON) if body else client.get(path)
                )
                assert status in (None, response.status_code), response.text
                return response if raw else response.json()

            try:
                return await work(ask)
            finally:
                await models.close()

    return asyncio.run(run())
