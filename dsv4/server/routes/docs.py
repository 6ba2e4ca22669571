"""GET /docs: the OpenAPI document as a plain page, without scripts or external hosts."""

from html import escape
from typing import Any

from fastapi import Request, Response

from dsv4.server.json_route import make_router

router = make_router()

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td{border-top:1px solid #8884;padding:.2rem .5rem;"
    "vertical-align:top}code{font-size:.9em}:root{color-scheme:light dark}"
)
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
}


@router.get("/docs")
async def docs(request: Request) -> Response:
    document = request.app.openapi()
    schemas = document.get("components", {}).get("schemas", {})
    parts = [
        _operation(method, path, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    title = f"{document['info']['title']} {document['info']['version']}"
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>"
        f'<p>As a document for programs: <a href="/openapi.json">/openapi.json</a></p>'
        f"{''.join(parts)}</html>"
    )
    return Response(page, media_type="text/html; charset=utf-8", headers=_HEADERS)


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    text = escape(operation.get("description", ""))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
    rows = [
        f"<tr><td><code>{escape(field)}</code>{_mark(field, schemas[name])}</td>"
        f"<td><code>{escape(_kind(value))}</code></td></tr>"
        for field, value in schemas.get(name, {}).get("properties", {}).items()
    ]
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    return f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{text}</p>{table}"


def _mark(field: str, schema: dict[str, Any]) -> str:
    return " (needed)" if field in schema.get("required", ()) else ""


def _kind(schema: dict[str, Any]) -> str:
    """A type and its bounds in one line."""
    if "anyOf" in schema:
        return " | ".join(_kind(branch) for branch in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    name = str(schema.get("type", "any"))
    if "items" in schema:
        name += f" of {_kind(schema['items'])}"
    words = ("enum", "const", "minimum", "exclusiveMinimum", "maximum", "maxItems", "maxLength")
    bounds = [f"{word} {schema[word]}" for word in words if word in schema]
    return f"{name} ({', '.join(bounds)})" if bounds else name
