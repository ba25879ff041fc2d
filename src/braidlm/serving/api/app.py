"""The app: OpenAI's routes, the page with its own, health and metrics, behind one guard."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import braidlm
from braidlm.serving.api.docs_page import docs_page
from braidlm.serving.api.errors import ApiError, add_error_handlers
from braidlm.serving.api.metrics import Metrics
from braidlm.serving.api.openai import Openai
from braidlm.serving.api.safety import REPORT_POLICY, Guard, Limits
from braidlm.serving.models import ServedModels

ROOT = Path(braidlm.__file__).parent
PAGE, REPORT = ROOT / "serving" / "page", ROOT / "core" / "report"
TYPES = {".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript", ".svg": "image/svg+xml",
         ".html": "text/html", ".woff2": "font/woff2", ".png": "image/png", ".txt": "text/plain"}  # fmt: skip
"""The files of the page by their endings; nothing else is served."""
ABOUT = """OpenAI's API for the models of this server, and what looks inside them.

Every error is `{"error": {"message", "type", "param", "code"}}`. See docs/serve.md.
"""


def create_app(
    models: ServedModels,
    routers: Collection[APIRouter] = (),
    limits: Limits | None = None,
    api_key: str | None = None,
    hosts: Collection[str] = ("localhost",),
) -> FastAPI:
    """An app that serves models; its end closes their engines. `hosts` are the names that it may be reached by."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await models.close()

    app = FastAPI(
        title="Braid",
        version=braidlm.__version__,
        description=ABOUT,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    metrics, limits = Metrics(models), limits or Limits()
    add_error_handlers(app)
    app.include_router(Openai(models, limits, metrics).router())
    for router in routers:
        app.include_router(router)

    @app.get("/health", tags=["server"], summary="Whether the server answers")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "models": len(models.served), "loaded": len(models.engines)}

    @app.get("/metrics", tags=["server"], summary="Counters and gauges for Prometheus", response_class=Response)
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/docs", tags=["server"], summary="This API as a page", response_class=HTMLResponse)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()), headers={"Content-Security-Policy": REPORT_POLICY})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        if not (PAGE / "index.html").is_file():
            raise ApiError(404, "this build has no page; /docs describes the API")
        return FileResponse(PAGE / "index.html", headers=NO_CACHE)

    for name, folder in (("page", PAGE), ("report", REPORT)):
        app.mount(f"/static/{name}", PageFiles(directory=folder, check_dir=False))
    app.add_middleware(Guard, metrics=metrics, limits=limits, api_key=api_key, hosts=hosts)
    return app


NO_CACHE = {"Cache-Control": "no-cache"}
"""A browser asks whether a file has changed (ETag), so that an upgrade shows at once."""


class PageFiles(StaticFiles):
    """Files of the known kinds."""

    def file_response(self, full_path: Any, stat_result: Any, scope: Scope, status_code: int = 200) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(NO_CACHE)
        if (kind := TYPES.get(Path(full_path).suffix)) is not None and "content-type" in response.headers:
            response.headers["content-type"] = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        return response

    def lookup_path(self, path: str) -> Any:
        return super().lookup_path(path) if Path(path).suffix in TYPES else ("", None)
