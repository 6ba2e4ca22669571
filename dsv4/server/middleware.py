"""Middleware for every request: keys, origins, body size and time limits, and error responses."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv4.server.api_error import ApiError, internal_error
from dsv4.server.options import BODY_SECONDS, MAX_BODIES_BYTES, MAX_BODY_BYTES, SMALL_BYTES
from dsv4.server.service import Client, Service, current_client, is_large
from dsv4.server.sse import ClientGone

log = logging.getLogger(__name__)

_FREE_PATHS = ("/", "/health", "/ready", "/favicon.ico")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


class AccessMiddleware:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._keys = [key.encode() for key in service.options.api_keys]
        self._urgent = {key.encode() for key in service.options.priority_keys}
        # Without keys, any client that reaches the port is served. The Host header is checked
        # against DNS rebinding: a foreign web page must not reach it under its own host name.
        self._checks_host = not self._keys and is_loopback(service.options.host)
        self._num_bytes = 0  # of large bodies in flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = name
        reply = _Reply(send, name)
        body = bytearray()
        try:
            self._check(scope, headers)
            await self._read_body(headers, receive, body)
            is_large.set(len(body) > SMALL_BYTES)
            await self._app(scope, _replay(bytes(body), receive), reply)
        except ApiError as error:
            self._service.metrics.count_rejected(error.status_code)
            await self._refuse(error, scope, receive, reply)
        except ClientGone:
            log.debug("%s: the client has gone", name)
        except Exception:
            log.exception("%s: %s failed", name, scope["path"])
            await self._refuse(internal_error(name), scope, receive, reply)
        finally:
            self._num_bytes -= _large_bytes(body)

    def _check(self, scope: Scope, headers: dict[bytes, str]) -> None:
        path = scope["path"]
        if self._checks_host and not _is_local_name(headers.get(b"host", "")):
            raise ApiError(
                400,
                f"host: found {headers.get(b'host', '')[:80]!r}, expected localhost or 127.0.0.1; "
                "a server without API keys on a loopback address answers to no other name",
                code="wrong_host",
            )
        current_client.set(Client())
        if self._keys and path not in _FREE_PATHS and not path.startswith("/static/"):
            self._check_key(headers)
        if not self._keys:
            self._check_origin(headers)
        has_body = headers.get(b"content-length", "0") != "0" or b"transfer-encoding" in headers
        if scope["method"] == "POST" and has_body:
            _check_type(headers.get(b"content-type", ""))
        encoding = headers.get(b"content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise ApiError(
                400, f"content-encoding: found {encoding[:40]!r}, expected an uncompressed body"
            )

    def _check_key(self, headers: dict[bytes, str]) -> None:
        scheme, _, token = headers.get(b"authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        given = [text.encode() for text in (bearer, headers.get(b"x-api-key", "")) if text]
        # Compare with every key, so that timing does not reveal a near match.
        found = [key for one in given for key in self._keys if hmac.compare_digest(one, key)]
        if not found:
            word = "a key that is not valid" if given else "no key"
            raise ApiError(
                401,
                f"authorization: found {word}, expected 'Authorization: Bearer KEY' or 'x-api-key'",
                code="invalid_api_key",
            )
        shares = self._service.options.share_prefixes
        name = "" if shares else hashlib.blake2b(found[0], digest_size=16).hexdigest()
        current_client.set(Client(name, may_prioritise=found[0] in self._urgent))

    def _check_origin(self, headers: dict[bytes, str]) -> None:
        """Without keys, a foreign web page must not send requests through a visitor's browser."""
        origin, allowed = headers.get(b"origin"), self._service.options.cors_origins
        own = (f"http://{headers.get(b'host', '')}", f"https://{headers.get(b'host', '')}")
        if origin is not None and origin not in own and not {origin, "*"} & set(allowed):
            raise ApiError(
                403,
                f"origin: found {origin[:80]!r}, expected this server's own page; "
                "--cors-origin lets other pages in",
                code="foreign_origin",
            )

    async def _read_body(
        self, headers: dict[bytes, str], receive: Receive, body: bytearray
    ) -> None:
        """Read the whole body, within its size and time limits."""
        too_large = ApiError(
            413, f"body: larger than {MAX_BODY_BYTES} bytes; send less", code="body_too_large"
        )
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
            raise too_large
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    self._add(body, message.get("body", b""))
                    if len(body) > MAX_BODY_BYTES:
                        raise too_large
                    if not message.get("more_body", False):
                        return
        except TimeoutError as error:
            text = f"body: not complete after {BODY_SECONDS:g} seconds"
            raise ApiError(408, text, code="body_too_slow") from error

    def _add(self, body: bytearray, part: bytes) -> None:
        """Small bodies are always accepted; large ones share a limit."""
        before = _large_bytes(body)
        body += part
        self._num_bytes += _large_bytes(body) - before
        if _large_bytes(body) and self._num_bytes > MAX_BODIES_BYTES:
            text = "body: too many large bodies are in work; try again"
            raise ApiError(503, text, code="busy", retry_after=2)

    async def _refuse(
        self, error: ApiError, scope: Scope, receive: Receive, reply: "_Reply"
    ) -> None:
        if reply.has_begun:
            return  # the server closes the connection, so the client sees a broken response
        await error.response(scope["path"])(scope, receive, reply)


class _Reply:
    """`send` with our headers added."""

    def __init__(self, send: Send, name: str) -> None:
        self._send = send
        self._own = (*_HEADERS, (b"x-request-id", name.encode()))
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            message["headers"] = [*message.get("headers", ()), *self._own]
        await self._send(message)


def _check_type(kind: str) -> None:
    name = kind.partition(";")[0].strip().lower()
    if name != "application/json":
        found = repr(kind[:80]) if kind else "none"
        text = f"content-type: found {found}, expected application/json"
        raise ApiError(400, text, code="wrong_content_type")


def _large_bytes(body: bytearray) -> int:
    return len(body) if len(body) > SMALL_BYTES else 0


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` for the application: the whole body at once, then only the disconnect."""
    waiting: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Message:
        return waiting.pop() if waiting else await receive()

    return read


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_local_name(host: str) -> bool:
    """A Host header that names this machine: localhost, or an address instead of a name."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name.lower() == "localhost" or name.lower().endswith(".localhost")
    return True
