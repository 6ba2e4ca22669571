"""The web page: a handful of files from the package, under a strict content security policy."""

from pathlib import Path

from fastapi import Request, Response

from dsv4.server.api_error import ApiError
from dsv4.server.json_route import make_router

router = make_router()

_STATIC = Path(__file__).parent.parent / "static"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def _read_all() -> dict[str, Response]:
    """Every file, once: a name that is not among them cannot be asked for."""
    files = {}
    for path in sorted(_STATIC.iterdir()):
        kind = f"{_KINDS[path.suffix]}; charset=utf-8"
        files[path.name] = Response(path.read_bytes(), headers=_HEADERS, media_type=kind)
    return files


_FILES = _read_all()


@router.get("/")
async def page() -> Response:
    return _FILES["index.html"]


@router.get("/static/{name:path}")
async def static(request: Request, name: str) -> Response:
    if name not in _FILES:
        raise ApiError(404, f"there is no path {request.url.path[:200]!r} here")
    return _FILES[name]
