"""A replica: runs one engine process and passes its messages on to the ingress that asked.

If the engine ends, the replica ends with it and Ray starts another one: a replica without an engine
would keep receiving requests while the weights load.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from ray import serve

from dsv4.errors import Dsv4Error
from dsv4.server.metrics import EngineMetrics
from dsv4.server.worker.link import ENGINE, EngineLink, Notify
from dsv4.server.worker.wire import WireMessage
from dsv4.util.models import model_folder

log = logging.getLogger(__name__)

PULSE_SECONDS = 5.0  # between heartbeats in an idle stream
FAREWELL_SECONDS = 1.0  # for the last messages to leave before the replica ends
LAST_KINDS = ("refused", "broken", "died")


def is_last(message: WireMessage) -> bool:
    """Whether this is the last message of its request."""
    if message["kind"] == "outputs":
        return any("finish" in output for output in message["outputs"])
    return message["kind"] in LAST_KINDS or bool(message.get("is_last"))


class RelayLink(EngineLink):
    """An engine process that is not restarted; its messages go to queues unchanged."""

    def __init__(
        self, model: str, choices: dict[str, Any], notify: Notify, engine: tuple[str, ...]
    ) -> None:
        super().__init__(model, choices, notify, max_waiting=0, engine=engine)
        self._queues: dict[str, asyncio.Queue[WireMessage]] = {}

    @property
    def num_live(self) -> int:
        return len(self._queues)

    async def relay(self, name: str, data: bytes) -> AsyncIterator[list[WireMessage]]:
        """Send a packed message to the engine and yield its answers: several together if they have
        piled up, an empty list from time to time."""
        queue: asyncio.Queue[WireMessage] = asyncio.Queue()
        self._queues[name] = queue
        is_over = False
        try:
            self._submit(name, data, None)
            while not is_over:
                messages = await _next(queue)
                is_over = any(map(is_last, messages))
                yield messages
        finally:
            del self._queues[name]
            if not is_over:
                self._tell_abort(name)

    def end_all(self, error: str) -> None:
        for name, queue in self._queues.items():
            queue.put_nowait({"kind": "died", "id": name, "error": error})

    def _on_message(self, message: WireMessage) -> None:
        kind = message["kind"]
        if kind == "outputs":
            super()._on_message({"kind": "beat"})
            for output in message["outputs"]:
                self._put(output["id"], {"kind": kind, "outputs": [output]})
        elif kind in ("accepted", "refused", "scores", "broken"):
            super()._on_message({"kind": "beat"})
            self._put(message["id"], message)
        else:
            super()._on_message(message)

    def _put(self, name: str, message: WireMessage) -> None:
        if name in self._queues:  # otherwise aborted in the meantime
            self._queues[name].put_nowait(message)

    async def _run_and_recover(self, failures: int) -> int:
        try:
            await self._run_once()
        except Exception:  # an invalid message: as if the process had died
            log.exception("the engine process cannot be understood")
        if self.state != "failed":
            self.state = "failed"
            self._notify({"kind": "failed", "error": self._ending or "the engine process ended"})
        return failures


async def _next(queue: asyncio.Queue[WireMessage]) -> list[WireMessage]:
    try:
        async with asyncio.timeout(PULSE_SECONDS):
            messages = [await queue.get()]
    except TimeoutError:
        return []
    while not queue.empty():
        messages.append(queue.get_nowait())
    return messages


class EngineReplica:
    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, model: str, choices: dict[str, Any], engine: tuple[str, ...] = ENGINE
    ) -> None:
        self._node = socket.gethostname()
        self._name = serve.get_replica_context().replica_id.unique_id
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            folder = str(model_folder(model))
        except Dsv4Error as error:
            raise RuntimeError(f"node {self._node}: {error}") from None
        self._link = RelayLink(folder, choices, self._hear, engine)
        self._figures = CollectorRegistry()
        self._figures.register(EngineMetrics({}, self._link))
        await self._link.start()
        await self._loaded

    def _hear(self, message: WireMessage) -> None:
        """Handle the engine's messages about itself."""
        if message["kind"] == "plan":
            log.warning("plan: %s", message["text"])
        elif message["kind"] == "ready":
            self._loaded.set_result(None)
        elif message["kind"] == "failed":
            error = f"node {self._node}: {message['error']}"
            if not self._loaded.done():
                self._loaded.set_exception(RuntimeError(error))
                return
            log.error("%s; this replica ends, Ray starts another one", error)
            self._link.end_all(message["error"])
            asyncio.get_running_loop().call_later(FAREWELL_SECONDS, os._exit, 1)

    async def answer(self, prefix_keys: bytes, name: str, data: bytes) -> AsyncIterator[bytes]:
        """Messages for one packed `add` or `score`. The router reads `prefix_keys`."""
        async for messages in self._link.relay(name, data):
            yield json.dumps(messages, separators=(",", ":")).encode()

    async def report(self) -> dict[str, Any]:
        """For the ingress: the model's facts, statistics, and this replica's identity."""
        link = self._link
        return {
            "replica": {
                "name": self._name,
                "node": self._node,
                "process": os.getpid(),
                "is_healthy": link.is_healthy,
            },
            "facts": link.facts,
            "stats": link.stats,
        }

    async def metrics_text(self) -> tuple[str, bytes]:
        return self._name, generate_latest(self._figures)

    def record_routing_stats(self) -> dict[str, Any]:
        return {"prefix_keys": bytes.fromhex(self._link.prefix_keys)}

    def check_health(self) -> None:
        if not self._link.is_healthy:
            raise RuntimeError(f"node {self._node}: the engine is {self._link.state} and silent")

    async def __del__(self) -> None:
        """Ray awaits this once the replica has drained; prefixes are written to disk."""
        if hasattr(self, "_link"):
            await self._link.stop()
