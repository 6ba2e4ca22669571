"""Strict JSON body parsing, shared by all routes, that does not block the event loop.

A parser in C holds the GIL until it is done; 30 MB of JSON would stop every connection for
seconds. Larger bodies are therefore parsed on a thread and in pieces: the parser sees at most a
few dozen kilobytes at a time, and value limits reject a hostile body early.
"""

import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from dsv4.server.api_error import ApiError
from dsv4.server.options import MAX_JSON_DEPTH, MAX_JSON_NUMBERS, MAX_JSON_VALUES, SMALL_BYTES
from dsv4.server.service import in_thread

_SPACE = re.compile(rb"[ \t\n\r]*")
_SCALAR = re.compile(rb"[-+.\w]{1,4400}")
_NUMBERS = re.compile(rb"[-+.eE0-9, \t\n\r]{1,65536}")
_SHORT_TEXT = re.compile(rb'"([^"\\\x00-\x1f]{0,65536}+)"')
# Runs of flat members and entries with their commas, short enough that one parser call holds the
# interpreter lock for about a millisecond. The parser still validates them.
_SMALL = rb'(?:"(?:[^"\\]|\\.){0,256}+"|[-+.\w]{1,64}+)'
_MEMBER = rb'\s*+"(?:[^"\\]|\\.){0,256}+"\s*+:\s*+' + _SMALL + rb"\s*+"
_FLAT = rb"(?:" + _SMALL + rb"|\[\s*+\]|\{(?:" + _MEMBER + rb",){0,7}+(?:" + _MEMBER + rb"|\s*+)\})"
_MEMBERS = re.compile(rb"(?:" + _MEMBER + rb",){1,512}+")
_ENTRIES = re.compile(rb"(?:\s*+" + _FLAT + rb"\s*+,){1,64}+")
# Whole characters in JSON notation; a surrogate pair is one.
_CHARACTERS = re.compile(
    rb'(?:[^"\\]{1,64}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{4}|\\[^u])'
    rb"{1,1024}+"
)


class JsonRequest(Request):
    """Strict bodies: no NaN, no deep nesting, no lone surrogates."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = (
                    _read_whole(body)
                    if len(body) <= SMALL_BYTES
                    else await in_thread(lambda: read_in_pieces(body))
                )
            except ValueError as error:
                raise ApiError(400, f"body: not JSON ({error})", code="invalid_json") from error
        return self._json


class JsonRoute(APIRoute):
    """Every GET route also answers HEAD, with the headers only."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(self._as_get(scope))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().handle(self._as_get(scope), receive, send)

    def _as_get(self, scope: Scope) -> Scope:
        is_head = scope.get("method") == "HEAD" and "GET" in (self.methods or ())
        return {**scope, "method": "GET"} if is_head else scope

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return read_strictly


def make_router() -> APIRouter:
    return APIRouter(route_class=JsonRoute)


def _check_depth(num_levels: int) -> None:
    if num_levels > MAX_JSON_DEPTH:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")


def _read_whole(data: bytes) -> Any:
    value = from_json(data, allow_inf_nan=False)
    if data.count(b"[") + data.count(b"{") > MAX_JSON_DEPTH:
        level, depth = [value], 0
        while level := [item for item in level if isinstance(item, dict | list)]:
            depth += 1
            _check_depth(depth)
            level = [
                x for item in level for x in (item.values() if isinstance(item, dict) else item)
            ]
    return value


def read_in_pieces(data: bytes) -> Any:
    """The value of a JSON text; ValueError if it is invalid, ApiError if it has too many values."""
    return _JsonReader(data).whole()


class _JsonReader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0
        self._num_values = self._num_numbers = 0

    def whole(self) -> Any:
        value = self._value(0)
        if self._next():
            raise ValueError(f"more behind the value, at byte {self._place}")
        return value

    def _next(self) -> bytes:
        """The next non-blank byte; empty at the end."""
        found = _SPACE.match(self._data, self._place)
        assert found is not None
        self._place = found.end()
        return self._data[self._place : self._place + 1]

    def _take(self, expected: bytes) -> None:
        found = self._next()
        if found != expected:
            what = repr(found.decode("latin-1")) if found else "the end"
            raise ValueError(f"found {what} at byte {self._place}, expected {expected.decode()!r}")
        self._place += 1

    def _count(self, num_values: int) -> None:
        self._num_values += num_values
        if self._num_values > MAX_JSON_VALUES:
            raise _too_many(f"more than {MAX_JSON_VALUES} values")

    def _run(self, pattern: re.Pattern[bytes], around: bytes) -> Any:
        """Parse a pattern's match here, up to its last comma, in one go; None without a match."""
        found = pattern.match(self._data, self._place)
        if found is None:
            return None
        self._place = found.end() - 1
        return from_json(around % found.group()[:-1], allow_inf_nan=False)

    def _entries(self, depth: int) -> list[Any]:
        entries: list[Any] = []
        if depth + 2 <= MAX_JSON_DEPTH:
            entries = self._run(_ENTRIES, b"[%b]") or []
            inside = sum(2 * len(entry) for entry in entries if isinstance(entry, dict))
            self._count(len(entries) + inside)
        return entries

    def _value(self, depth: int) -> Any:
        self._count(1)
        first = self._next()
        if first == b'"':
            return self._text()
        if first == b"{":
            return self._object(depth)
        if first == b"[":
            return self._list(depth)
        found = _SCALAR.match(self._data, self._place)
        if found is None:
            raise ValueError(f"found no value at byte {self._place}")
        self._place = found.end()
        return from_json(found.group(), allow_inf_nan=False)

    def _object(self, depth: int) -> dict[str, Any]:
        _check_depth(depth + 1)
        self._place += 1
        found: dict[str, Any] = {}
        if self._next() == b"}":
            self._place += 1
            return found
        while True:
            begin = self._place
            members = self._run(_MEMBERS, b"{%b}")
            if members:
                found.update(members)
                run = self._data[begin : self._place]
                num_quotes = run.count(b'"') - run.count(b'\\"')  # a key may come many times
                self._count(max(2 * len(members), num_quotes // 2))
                self._take(b",")
            if self._next() != b'"':
                raise ValueError(f"found no key at byte {self._place}")
            key = self._text()
            self._count(1)
            self._take(b":")
            found[key] = self._value(depth + 1)
            if self._next() == b"}":
                self._place += 1
                return found
            self._take(b",")

    def _list(self, depth: int) -> list[Any]:
        _check_depth(depth + 1)
        self._place += 1
        found: list[Any] = []
        if self._next() == b"]":
            self._place += 1
            return found
        while True:
            found += self._numbers() or self._entries(depth) or [self._value(depth + 1)]
            if self._next() == b"]":
                self._place += 1
                return found
            self._take(b",")

    def _numbers(self) -> list[Any]:
        """Numbers up to the last comma in the buffer; none if there is no comma."""
        found = _NUMBERS.match(self._data, self._place)
        cut = found.group().rfind(b",") if found is not None else -1
        if cut < 0:
            return []
        part = self._data[self._place : self._place + cut]
        numbers: list[Any] = from_json(b"[" + part + b"]", allow_inf_nan=False)
        self._place += cut
        self._num_numbers += len(numbers)
        if self._num_numbers > MAX_JSON_NUMBERS:
            raise _too_many(f"more than {MAX_JSON_NUMBERS} numbers")
        return numbers

    def _text(self) -> str:
        short = _SHORT_TEXT.match(self._data, self._place)
        if short is not None:
            self._place = short.end()
            return short.group(1).decode()
        parts = []
        self._place += 1
        while self._data[self._place : self._place + 1] != b'"':
            found = _CHARACTERS.match(self._data, self._place)
            if found is None:
                raise ValueError(f"a string that does not end, or a bad escape, at {self._place}")
            end = found.end()
            while end < len(self._data) and self._data[end] & 0xC0 == 0x80:
                end -= 1  # back to a character boundary
            if end <= self._place:
                raise ValueError(f"not UTF-8 at byte {self._place}")
            parts.append(from_json(b'"%b"' % self._data[self._place : end]))
            self._place = end
        self._place += 1
        return "".join(parts)


def _too_many(found: str) -> ApiError:
    return ApiError(400, f"body: found {found}; send less", code="body_too_large")
