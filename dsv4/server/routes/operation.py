"""For operators: health, readiness, version, metrics, and the page's statistics."""

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from dsv4 import __version__
from dsv4.server.json_route import make_router
from dsv4.server.service import Service

router = make_router()


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while the engine's loop responds, else why it restarts; the state of several ranks."""
    link = request.app.state.service.link
    status = 200 if link.is_healthy else 503
    state = "stalled" if link.state == "ready" else link.state
    body: dict[str, Any] = {"status": "ok" if status == 200 else state}
    if status != 200 and link.error:
        body["error"] = link.error
    if link.stats.get("ranks"):
        body["ranks"] = link.stats["ranks"]
    return JSONResponse(body, status)


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> JSONResponse:
    """`/health` under the path that some platforms use."""
    return await health(request)


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """How many requests run or wait."""
    return {"server_load": request.app.state.service.link.num_live}


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 while new requests are accepted."""
    service: Service = request.app.state.service
    link = service.link
    state = "draining" if service.is_draining else link.state
    if state == "ready" and not link.is_healthy:
        state = "stalled"
    return JSONResponse({"status": state}, 200 if state == "ready" else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = await request.app.state.service.metrics_text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """The engine's latest statistics, and its page sizes in bytes."""
    service: Service = request.app.state.service
    link = service.link
    return {
        "model": service.names[0],
        "state": "draining" if service.is_draining else link.state,
        "restarts": link.num_restarts,
        "page_bytes": link.facts.get("page_bytes", {}),
        **link.stats,
    }
