"""The app: OpenAI's routes, the page with its own, the API as a page, health and metrics, behind one guard."""

import json
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import braidlm
from braidlm.core.report.rendering import FORMATS
from braidlm.core.report.report import Report, Table
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


def docs_page(schema: dict[str, Any]) -> str:
    """The API as a page with every route and field, made as a report, so that it needs no script from elsewhere."""
    report = Report(f"{schema['info']['title']} {schema['info']['version']}", "The API of this server")
    for paragraph in filter(None, schema["info"].get("description", "").split("\n\n")):
        report.text(" ".join(paragraph.split()))
    report.text("The same for programs: `/openapi.json`.")
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            report.heading(f"{method.upper()} {path}")
            if about := route.get("description") or route.get("summary"):
                report.text(" ".join(about.split()))
            if rows := [(one["name"], _kind(one["schema"]), "", "") for one in route.get("parameters", ())]:
                report.table(Table(("parameter", "type", "default", "about"), rows))
            for title, content in _contents(route):
                if fields := list(_fields(content, schema)):
                    report.table(Table((title, "type", "default", "about"), fields))
    return FORMATS[".html"](report)


def _contents(route: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas of the body and of the answer."""
    for title, holder in (("body", route.get("requestBody")), ("answer", route["responses"].get("200"))):
        if content := (holder or {}).get("content", {}).get("application/json", {}).get("schema"):
            yield title, content


def _fields(
    content: dict[str, Any], schema: dict[str, Any], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, ...]]:
    """Each field as name, type, default and about; those of objects inside follow theirs."""
    content = _resolved(content, schema)
    for name, field in content.get("properties", {}).items():
        default = json.dumps(field["default"]) if field.get("default") is not None else ""
        required = "required" if name in content.get("required", ()) else default
        yield prefix + name, _kind(field), required, " ".join(field.get("description", "").split())
        inner = field.get("items", field)
        if depth < 3:
            yield from _fields(inner, schema, f"{prefix}{name}{'[]' if 'items' in field else ''}.", depth + 1)


def _resolved(content: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A schema itself, where a reference names it; the first of several that has fields."""
    options = [content, *content.get("anyOf", ()), *content.get("allOf", ())]
    reference = next((one["$ref"] for one in options if "$ref" in one), None)
    return schema["components"]["schemas"][reference.rpartition("/")[2]] if reference else content


def _kind(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return "object"
    if options := field.get("anyOf"):
        return " or ".join(dict.fromkeys(map(_kind, options)))
    if "const" in field:
        return json.dumps(field["const"])
    kind = str(field.get("type", "any"))
    return f"list of {_kind(field['items'])}" if kind == "array" and "items" in field else kind
