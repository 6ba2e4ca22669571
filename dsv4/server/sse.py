"""Responses that end when the client disconnects: event streams and whole answers."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from dsv4.server.options import MAX_QUICK_ENTRIES, WRITE_SECONDS
from dsv4.server.service import in_large_thread

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ClientGone(Exception):
    """The client disconnected."""


def event(data: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_encode(data)}\n\n".encode()


async def whole_answer(build: Callable[[], Any], num_entries: int) -> Response:
    """The result of `build` as JSON. A large answer is built and serialised off the event loop."""
    if num_entries <= MAX_QUICK_ENTRIES:
        return JSONResponse(build())
    # piece by piece: a single call of the encoder would hold the GIL
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = await in_large_thread(lambda: "".join(encoder.iterencode(build())).encode())
    return Response(data, media_type="application/json")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled when the client disconnects."""
    return await _race(work, request.receive)


class EventStream(Response):
    """Server-sent events from a generator, which is closed when the client disconnects."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(headers={**headers, "x-accel-buffering": "no"})
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self.headers["cache-control"] = "no-cache"
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(self._send_all(send), receive)
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for data in self._events:
            await _write(send, {"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _write(send: Send, message: Message) -> None:
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await send(message)
    except TimeoutError as error:
        raise ClientGone from error


async def _race(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for item in (task, gone):
            item.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
