"""The web page: static files from the package, under a strict content security policy."""

import hashlib
from pathlib import Path

from fastapi import Request, Response

from dsv4.server.api_error import ApiError
from dsv4.server.json_route import make_router

router = make_router()

_STATIC = Path(__file__).parent.parent / "static"
_JAVASCRIPT = "text/javascript; charset=utf-8"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": _JAVASCRIPT,
    ".mjs": _JAVASCRIPT,
    ".css": "text/css; charset=utf-8",
    ".woff2": "font/woff2",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
}


def _read_all() -> dict[str, Response]:
    """Read every file once at start; no other path can be served."""
    files = {}
    for path in sorted(_STATIC.rglob("*")):
        if path.suffix not in _KINDS:
            continue  # folders, licences
        name = path.relative_to(_STATIC).as_posix()
        # a library's folder name contains its version, so its files never change
        cache = "max-age=31536000, immutable" if name.startswith("vendor/") else "no-cache"
        data = path.read_bytes()
        tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        headers = {**_HEADERS, "cache-control": cache, "etag": tag}
        files[name] = Response(data, headers=headers, media_type=_KINDS[path.suffix])
    return files


_FILES = _read_all()


def _send(request: Request, name: str) -> Response:
    file = _FILES[name]
    if request.headers.get("if-none-match") == file.headers["etag"]:
        kept = {key: file.headers[key] for key in ("etag", "cache-control", *_HEADERS)}
        return Response(status_code=304, headers=kept)
    return file


@router.get("/")
async def page(request: Request) -> Response:
    return _send(request, "index.html")


@router.get("/static/{name:path}")
async def static(request: Request, name: str) -> Response:
    if name not in _FILES:
        raise ApiError(404, f"there is no path {request.url.path[:200]!r} here")
    return _send(request, name)
