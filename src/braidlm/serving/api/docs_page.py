"""The API as a page: made from its OpenAPI schema as a report, so that it needs no script from elsewhere."""

import json
from collections.abc import Iterator
from typing import Any

from braidlm.core.report.rendering import FORMATS
from braidlm.core.report.report import Report, Table


def docs_page(schema: dict[str, Any]) -> str:
    """HTML with every route, and the fields of what is sent and answered."""
    report = Report(f"{schema['info']['title']} {schema['info']['version']}", "The API of this server")
    for paragraph in filter(None, schema["info"].get("description", "").split("\n\n")):
        report.text(" ".join(paragraph.split()))
    report.text("The same for programs: `/openapi.json`.")
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            report.heading(f"{method.upper()} {path}")
            if about := route.get("description") or route.get("summary"):
                report.text(" ".join(about.split()))
            rows = [(one["name"], _kind(one["schema"]), "", "") for one in route.get("parameters", ())]
            if rows:
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
