"""The messages between the two processes: length-prefixed JSON objects.

A message has a `kind`. To the engine: `load`, `add`, `abort`, `score`. From it: `plan`,
`progress`, `ready`, `failed`, `accepted`, `refused`, `broken`, `outputs`, `scores`, `stats`,
`prefixes`, `beat`, `ending`.
"""

import asyncio
import base64
import json
import socket
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from dsv4.request import Guide, Output, Request, SamplingParams, TokenLogprobs

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 28  # a prompt of ten million tokens
QUICK_IDS = 1 << 16  # a prompt up to this size is packed on the event loop

WireMessage = dict[str, Any]


def pack(message: WireMessage) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    assert len(data) <= MAX_MESSAGE_BYTES, f"a message of {len(data)} bytes"
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


async def pack_prompt(ids: Sequence[int], make: Callable[[], WireMessage]) -> bytes:
    """Like `pack`, for a message with these ids; many are packed off the event loop."""
    if len(ids) <= QUICK_IDS:
        return pack(make())
    return await asyncio.to_thread(lambda: pack(make()))


def message_size(head: bytes) -> int:
    size = int.from_bytes(head, "big")
    assert size <= MAX_MESSAGE_BYTES, f"a message of {size} bytes; the line is out of step"
    return size


class LinkClosed(ConnectionError):
    """The web process has gone."""


class Channel:
    """The blocking end of the connection, used by the engine process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # keeps concurrent messages from interleaving

    def send(self, message: WireMessage) -> None:
        data = pack(message)
        try:
            with self._lock:
                self._connection.sendall(data)
        except ConnectionError as error:
            raise LinkClosed(str(error)) from error

    def receive(self) -> WireMessage | None:
        """The next message; None when the other side has closed."""
        head = self._read(LENGTH_BYTES)
        data = None if head is None else self._read(message_size(head))
        return None if data is None else json.loads(data)

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            part = self._connection.recv(min(size - len(data), 1 << 20))
            if not part:
                return None
            data += part
        return bytes(data)


def ids_to_wire(ids: Sequence[int]) -> str:
    """Packed in base64: a million ids as JSON numbers would block the event loop."""
    return base64.b64encode(array("i", ids)).decode()


def ids_from_wire(text: str) -> tuple[int, ...]:
    ids = array("i")
    ids.frombytes(base64.b64decode(text))
    return tuple(ids)


def request_to_wire(request: Request) -> WireMessage:
    message = {item.name: getattr(request, item.name) for item in fields(request)}
    message["prompt_ids"] = ids_to_wire(request.prompt_ids)
    params = {item.name: getattr(request.params, item.name) for item in fields(request.params)}
    guide = request.params.guide
    if guide is not None:
        params["guide"] = {item.name: getattr(guide, item.name) for item in fields(guide)}
    return {**message, "params": params}


def request_from_wire(message: WireMessage) -> Request:
    """The request; RequestError if a value is not allowed."""
    params = dict(message["params"])
    params["stop"] = tuple(params["stop"])
    params["stop_ids"] = None if params["stop_ids"] is None else tuple(params["stop_ids"])
    params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    if params["guide"] is not None:
        params["guide"] = Guide(**params["guide"])
    values = {**message, "prompt_ids": ids_from_wire(message["prompt_ids"])}
    return Request(**{**values, "params": SamplingParams(**params)})


def output_to_wire(output: Output) -> WireMessage:
    message: WireMessage = {"id": output.request_id, "tokens": output.token_ids}
    if output.text:
        message["text"] = output.text
    if output.logprobs:
        message["logprobs"] = [(item.token_id, item.logprob, item.top) for item in output.logprobs]
    if output.num_cached is not None:
        message["cached"] = output.num_cached
    if output.finish_reason is not None:
        message["finish"] = output.finish_reason
        message["stop"] = output.stop_reason
        message["error"] = output.error
        message["code"] = output.error_code
        message["refused"] = output.refused
        message["drafts"] = (output.num_drafted, output.num_accepted)
    return message


def output_from_wire(message: WireMessage) -> Output:
    num_drafted, num_accepted = message.get("drafts", (0, 0))
    return Output(
        request_id=message["id"],
        token_ids=tuple(message["tokens"]),
        text=message.get("text", ""),
        finish_reason=message.get("finish"),
        stop_reason=message.get("stop"),
        logprobs=logprobs_from_wire(message.get("logprobs", ())),
        error=message.get("error"),
        error_code=message.get("code"),
        refused=message.get("refused", False),
        num_cached=message.get("cached"),
        num_drafted=num_drafted,
        num_accepted=num_accepted,
    )


def logprobs_from_wire(items: Any) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(token, logprob, tuple((other, value) for other, value in top))
        for token, logprob, top in items
    )
