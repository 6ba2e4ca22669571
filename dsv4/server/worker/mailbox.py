"""One client's pending results: outputs of its requests, and log-probabilities of its prompts."""

import asyncio
from typing import TYPE_CHECKING

from dsv4.request import Output, Request, TokenLogprobs
from dsv4.server.api_error import ApiError
from dsv4.server.worker.wire import WireMessage, logprobs_from_wire

if TYPE_CHECKING:
    from dsv4.server.worker.link import RequestLink

MAX_UNREAD = 8192  # outputs that a slow client may leave unread before its request is aborted


class Mailbox:
    """Outputs of some requests in arrival order. Closing it aborts those still running."""

    def __init__(self, link: "RequestLink") -> None:
        self._link = link
        self._running: set[str] = set()
        self._outputs: dict[str, list[Output]] = {}  # by request, not yet read
        self._num_unread = 0
        self._wake = asyncio.Event()
        self._error: ApiError | None = None
        self.num_tokens = 0  # of all prompts added

    async def add(self, request: Request) -> None:
        """Submit a request to the engine; returns when it is accepted, raises if it is refused."""
        self._running.add(request.id)
        self.num_tokens += len(request.prompt_ids)
        await self._link.send(request, self)

    async def next(self, timeout: float) -> list[Output]:
        """New outputs, one per request: a late reader gets several steps' tokens at once. An empty
        list if nothing arrives within `timeout`."""
        if not self._outputs and self._error is None:
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                return []
        self._wake.clear()
        if self._error is not None:
            raise self._error
        outputs, self._outputs, self._num_unread = self._outputs, {}, 0
        return [Output.joined(parts) for parts in outputs.values()]

    def abort(self, request_id: str) -> None:
        """Abort one request; its later outputs are dropped."""
        if request_id in self._running:
            self._running.discard(request_id)
            self._link.forget(request_id)
        self._outputs.pop(request_id, None)

    def close(self) -> None:
        for request_id in list(self._running):
            self.abort(request_id)

    def deliver(self, output: Output) -> bool:
        """Called by the link. False: the client does not read, so abort the request."""
        if output.finished:
            self._running.discard(output.request_id)
        self._outputs.setdefault(output.request_id, []).append(output)
        self._num_unread += 1
        self._wake.set()
        if self._num_unread <= MAX_UNREAD:
            return True
        self.fail(ApiError(503, "the answer was not read for too long", code="slow_reader"))
        return False

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._wake.set()


class Scores:
    """Log-probabilities of a prompt, received in pieces."""

    def __init__(self) -> None:
        self.found: list[TokenLogprobs] = []
        self.answer: asyncio.Future[WireMessage] = asyncio.get_running_loop().create_future()

    def deliver(self, message: WireMessage) -> None:
        if message["kind"] == "scores":
            del self.found[message["first"] :]  # the engine may have restarted the job
            self.found += logprobs_from_wire(message["scores"])
            if not message["is_last"]:
                return
        if not self.answer.done():
            self.answer.set_result(message)
