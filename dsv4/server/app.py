"""The application: its routes and error handlers. READ FIRST in this folder.

A chat request passes through `middleware.py` (key, size), `routes/chat.py`, `generation.py` (what
to ask the engine), `answers.py` (phases, parsing), `worker/link.py` and the engine process, and
returns the same way.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException

from dsv4 import __version__
from dsv4.server.api_error import ApiError, bad_fields
from dsv4.server.middleware import AccessMiddleware
from dsv4.server.routes import (
    chat,
    completions,
    docs,
    messages,
    models,
    operation,
    page,
    responses,
)
from dsv4.server.service import Service

# Each at /v1 and, for clients configured without that prefix, at /.
ROUTERS = (chat.router, completions.router, responses.router, messages.router, models.router)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {}}}
    for status, text in (
        (400, "the request is wrong; the message names the field"),
        (401, "no key, or a wrong one"),
        (403, "a web page of another origin"),
        (404, "no such model or path"),
        (413, "the body is too large"),
        (429, "the queue is full"),
        (503, "the model is starting, restarting or shutting down"),
    )
}


def create_app(service: Service) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.link.start()
        clock = asyncio.create_task(service.metrics.watch_loop())
        try:
            yield
        finally:
            clock.cancel()
            await service.link.stop()

    app = FastAPI(
        title="dsv4",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from a CDN; `routes/docs.py` does not
        redoc_url=None,
        responses=_ERRORS,
    )
    app.state.service = service
    app.include_router(operation.router)
    app.include_router(page.router, include_in_schema=False)
    app.include_router(docs.router, include_in_schema=False)
    for router in ROUTERS:
        app.include_router(router, prefix="/v1")
        app.include_router(router, include_in_schema=False)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_bad_fields)
    app.add_middleware(AccessMiddleware, service=service)
    if service.options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.options.cors_origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
        )
    return app


def _rejected(request: Request, error: ApiError) -> Response:
    request.app.state.service.metrics.count_rejected(error.status_code)
    return error.response(request.url.path)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _rejected(request, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:200]
    known = {404: f"there is no path {path!r} here", 405: f"{path!r} takes no {method}"}
    message = known.get(error.status_code, str(error.detail))
    return _rejected(request, ApiError(error.status_code, message))


async def _on_bad_fields(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _rejected(request, bad_fields(error.errors()))
