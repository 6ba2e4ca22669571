"""The ingress: the server's HTTP application, which sends requests to replicas through Ray."""

import asyncio
import json
import logging
from collections.abc import Iterable
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from dsv4.cache.prefix import block_keys
from dsv4.request import Request
from dsv4.server.api_error import ApiError
from dsv4.server.app import create_app
from dsv4.server.middleware import is_loopback
from dsv4.server.options import ServerOptions, read_keys
from dsv4.server.service import Service
from dsv4.server.worker.link import MAX_TOKENS, RequestLink
from dsv4.server.worker.wire import QUICK_IDS, WireMessage
from dsv4.util.logs import log_requests

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # between polls of all replicas for their statistics
POLL_TIMEOUT_SECONDS = 5.0
SILENT_SECONDS = 30.0  # before a silent stream fails; its replica sends a heartbeat every 5 s


class ReplicaLink(RequestLink):
    """Requests to the replicas; Ray picks one for each, and queues requests while all are full."""

    def __init__(self, engines: DeploymentHandle, max_waiting: int) -> None:
        super().__init__(max_waiting)
        self._engines = engines.options(stream=True)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._poll: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._poll = asyncio.create_task(self._watch_replicas())

    async def stop(self) -> None:
        self.state = "stopped"
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)

    @property
    def is_healthy(self) -> bool:
        return self.state == "ready"

    def check_room(self, count: int) -> None:
        """Ray refuses excess requests; only the memory of this process is checked here."""
        self.check_ready()
        num_tokens = sum({box: box.num_tokens for box in self._live.values()}.values())
        if num_tokens > MAX_TOKENS:
            text = f"prompts with {num_tokens} tokens run or wait, expected at most {MAX_TOKENS}"
            raise ApiError(429, f"{text}; try again later", code="queue_full", retry_after=1)

    # --- requests -----------------------------------------------------------------------------

    def _submit(self, name: str, data: bytes, request: Request | None) -> None:
        # A separate context: otherwise Ray takes all calls of one HTTP request for the same call.
        work = self._relay(name, data, request)
        self._tasks[name] = asyncio.get_running_loop().create_task(work, context=Context())

    def _tell_abort(self, name: str) -> None:
        task = self._tasks.get(name)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _relay(self, name: str, data: bytes, request: Request | None) -> None:
        """Receive the messages of one request until it ends, or fail it."""
        response: Any = None
        try:
            response = self._engines.answer.remote(await _prefix_keys(request), name, data)
            await self._read_all(response)
            self.fail(name, _died("it ended"))  # no effect on a request that has its answer
        except BackPressureError:
            text = f"all replicas are full and {self._max_waiting} requests wait; try again later"
            self.fail(name, ApiError(429, text, code="queue_full", retry_after=1))
        except (RayError, RayServeException) as error:
            log.warning("%s: its replica was lost: %s", name, _first_line(error))
            self.fail(name, _died(type(error).__name__))
        except TimeoutError:
            log.warning("%s: its replica gave no sign of life for %g s", name, SILENT_SECONDS)
            self.fail(name, _died("it gave no sign of life"))
            response.cancel()
        except asyncio.CancelledError:
            self.fail(name, _died("it was cancelled"))  # by Ray; we cancel only what is forgotten
            if response is not None:
                response.cancel()
            raise
        finally:
            self._tasks.pop(name, None)

    async def _read_all(self, response: Any) -> None:
        patience = None  # Ray's queue may take long; a replica that has begun may not
        while True:
            async with asyncio.timeout(patience):
                part = await anext(response, None)
            if part is None:
                return
            patience = SILENT_SECONDS
            for message in json.loads(part):
                self._on_message(message)

    def _on_message(self, message: WireMessage) -> None:
        if message["kind"] == "outputs":
            self._deliver_outputs(message["outputs"])
        elif message["kind"] == "died":
            self.fail(message["id"], _died(message["error"]))
        else:
            self._deliver_answer(message)

    # --- replicas -----------------------------------------------------------------------------

    async def _watch_replicas(self) -> None:
        while True:
            try:
                asked = self._engines.broadcast("report")
                found = await asked.results_async(
                    timeout_s=POLL_TIMEOUT_SECONDS, return_exceptions=True
                )
                self._hear([report for report in found if isinstance(report, dict)])
            except DeploymentUnavailableError:
                self._hear([])
            except TimeoutError:
                log.warning("a replica does not answer; statistics are those of before")
            except Exception:  # the next poll may succeed; if we stop, figures freeze
                log.exception("replicas cannot be asked")
            await asyncio.sleep(POLL_SECONDS)

    def _hear(self, reports: list[dict[str, Any]]) -> None:
        healthy = [report for report in reports if report["replica"]["is_healthy"]]
        if healthy:
            self.facts, self.state = healthy[0]["facts"], "ready"
        else:
            self.state = "restarting" if self.facts else "starting"
        added: WireMessage = {}
        for report in reports:
            added = add_stats(added, report["stats"])
        self.stats = {**added, "replicas": [report["replica"] for report in reports]}


async def _prefix_keys(request: Request | None) -> bytes:
    """The keys that the router looks up; computed off the event loop for a long prompt."""
    if request is None:
        return b""
    ids, salt = request.prompt_ids, request.cache_salt
    if len(ids) <= QUICK_IDS:
        return b"".join(block_keys(ids, salt))
    return b"".join(await asyncio.to_thread(block_keys, ids, salt))


def _died(why: str) -> ApiError:
    text = f"the replica stopped in the middle of this request ({why}); it is being replaced"
    return ApiError(503, text, code="engine_died", retry_after=2)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:500]


def add_stats(one: WireMessage, other: WireMessage) -> WireMessage:
    """Add up the statistics of two engines; the slower last step counts."""
    if not one or not other:
        return one or other
    found: WireMessage = {"last_step_s": max(one["last_step_s"], other["last_step_s"])}
    for name in one.keys() & other.keys() - {"last_step_s", "step_sizes"}:
        mine, theirs = one[name], other[name]
        if isinstance(mine, dict):
            both = mine.keys() | theirs.keys()
            found[name] = {key: mine.get(key, 0) + theirs.get(key, 0) for key in both}
        else:
            found[name] = mine + theirs
    return found


def merge_metrics(texts: Iterable[tuple[dict[str, str], bytes]]) -> bytes:
    """Merge expositions, adding labels to the samples of each. If two have the same metric family
    with different labels, the first wins."""
    families: dict[str, Metric] = {}
    sources: dict[str, frozenset[str]] = {}
    for labels, text in texts:
        for family in text_string_to_metric_families(text.decode()):
            name, kind = family.name, frozenset(labels)
            if sources.setdefault(name, kind) != kind:
                continue
            target = families.setdefault(name, Metric(name, family.documentation, family.type))
            target.samples += [
                sample._replace(labels={**labels, **sample.labels}) for sample in family.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Fixed(families))
    return generate_latest(registry)


class _Fixed:
    def __init__(self, families: dict[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


class ReplicaService(Service):
    def __init__(
        self, model: str, options: ServerOptions, engines: DeploymentHandle, name: str
    ) -> None:
        super().__init__(model, options, ReplicaLink(engines, options.max_waiting))
        self._engines = engines
        self._name = name  # of this ingress
        self._all = serve.get_deployment_handle(serve.get_replica_context().deployment)

    async def metrics_text(self) -> bytes:
        """Metrics of all ingress processes and all engines, each with its label."""
        engines, others = await asyncio.gather(_texts(self._engines), _texts(self._all))
        ingresses = {**others, self._name: self.metrics.text()}
        model = {"model_name": self.names[0]}
        return merge_metrics(
            [
                *(({**model, "replica": name}, text) for name, text in engines.items()),
                *(({"ingress": name}, text) for name, text in ingresses.items()),
            ]
        )


async def _texts(handle: DeploymentHandle) -> dict[str, bytes]:
    """The metrics of each replica of a deployment, by its id."""
    try:
        asked = handle.broadcast("metrics_text")
        found = await asked.results_async(timeout_s=POLL_TIMEOUT_SECONDS, return_exceptions=True)
    except (RayError, RayServeException, TimeoutError) as error:
        log.warning("metrics are missing: %s", _first_line(error))
        return {}
    return dict(item for item in found if isinstance(item, tuple))


class Ingress:
    """Reads key files itself: keys must not enter deployment arguments, which Ray stores."""

    def __init__(
        self,
        engines: DeploymentHandle,
        model: str,
        options: ServerOptions,
        key_file: str | None = None,
        priority_key_file: str | None = None,
    ) -> None:
        log_requests()
        urgent = read_keys(Path(priority_key_file) if priority_key_file else None, "priority keys")
        keys = read_keys(Path(key_file) if key_file else None, "api keys")
        options = replace(
            options,
            api_keys=(*options.api_keys, *keys, *urgent),
            priority_keys=(*options.priority_keys, *urgent),
        )
        if not options.api_keys and not is_loopback(options.host):
            log.warning("no API key is set: everyone who reaches Ray's HTTP port may use this")
        self._name = serve.get_replica_context().replica_id.unique_id
        self._service = ReplicaService(model, options, engines, self._name)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service)

    async def metrics_text(self) -> tuple[str, bytes]:
        return self._name, self._service.metrics.text()

    async def is_ready(self) -> bool:
        return self._service.link.is_healthy

    async def drain(self) -> int:
        """Refuse new requests; returns how many still run."""
        self._service.is_draining = True
        return self._service.link.num_live
