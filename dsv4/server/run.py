"""From options to a listening server: the socket, the engine, signals, shutdown."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dsv4.errors import Dsv4Error, OptionError
from dsv4.server.api_error import ApiError
from dsv4.server.app import create_app
from dsv4.server.middleware import is_loopback
from dsv4.server.options import HEADER_SECONDS, MAX_HEADER_BYTES, ServerOptions
from dsv4.server.service import Service
from dsv4.server.worker.link import ENGINE, EngineLink, Notify
from dsv4.server.worker.wire import WireMessage

log = logging.getLogger(__name__)


class StartError(Dsv4Error):
    """The engine could not be started; carries its message and exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def serve(
    model: str,
    choices: dict[str, Any],
    options: ServerOptions,
    notify: Notify,
    *,
    engine: tuple[str, ...] = ENGINE,
) -> None:
    """Serve until a signal arrives. `notify` receives plan, progress and ready messages.

    `engine`: the Python arguments of the engine process.
    """
    with bind(options) as listener:
        failure: list[WireMessage] = []
        at = address(listener, options)  # the listener closes before the engine ends

        def hear(message: WireMessage) -> None:
            if message["kind"] == "failed" and link.state == "failed":
                failure.append(message)
                server.should_exit = True
            elif not service.is_draining:  # "ready" after "shutting down" would mislead
                notify({**message, "address": at})

        link = EngineLink(model, choices, hear, max_waiting=options.max_waiting, engine=engine)
        service = Service(model, options, link)
        if not options.api_keys and not is_loopback(options.host):
            log.warning("no API key is set: everyone who reaches %s may use this", options.host)
        server = _Server(service)
        # A full garbage collection would stop the event loop while a request holds many objects.
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)
        # One answer takes the GIL several times; a thread that parses a large body releases it
        # only after this long.
        sys.setswitchinterval(0.0005)
        server.run(sockets=[listener])
    if failure:
        raise StartError(failure[0]["error"], failure[0]["exit_code"])


def address(listener: socket.socket, options: ServerOptions) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{listener.getsockname()[1]}"


def bind(options: ServerOptions) -> socket.socket:
    """Bind the port before anything is loaded: a port in use fails at once."""
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise OptionError(
            f"cannot listen on {options.host} port {options.port}: {error}; choose another --port "
            "or --host, or stop what uses it"
        ) from error
    return listener


class _Server(uvicorn.Server):
    def __init__(self, service: Service) -> None:
        config = uvicorn.Config(
            create_app(service),
            http=_Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level=max(logging.getLogger().getEffectiveLevel(), logging.WARNING),
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self._service = service
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.is_draining:
            os._exit(130 if sig == signal.SIGINT else 143)  # second signal: exit now
        self._service.is_draining = True
        if self._service.link.num_live:
            seconds = self._service.options.drain_seconds
            log.warning("shutting down; running answers have %g s", seconds)
        else:
            log.warning("shutting down")

    async def on_tick(self, counter: int) -> bool:
        if self._service.is_draining and self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_stop())
        return await super().on_tick(counter)

    async def _drain_and_stop(self) -> None:
        """Let running requests finish, or end them with an error; new ones are already refused."""
        link = self._service.link
        try:
            async with asyncio.timeout(self._service.options.drain_seconds):
                while link.num_live:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = "the server is shutting down and this answer took too long"
            link.fail_all(ApiError(503, text, code="shutting_down"))
        self.should_exit = True


class _Protocol(H11Protocol):
    """Headers must arrive in time, and protocol errors have the same shape as all others."""

    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if is_busy and self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None
        elif not is_busy and self._headers_due is None:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._headers_due = self.loop.call_later(HEADER_SECONDS, self._headers_late)

    def _headers_late(self) -> None:
        self._headers_due = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        text = "the request is not HTTP, or its headers are too long"
        body = ApiError(400, text, code="bad_http").response("").body
        data = bytes(body)
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(data), data)
        )
        self.transport.close()
