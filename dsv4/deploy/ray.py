"""The application on Ray Serve, and `dsv4 serve --ray`. READ FIRST in this folder.

    serve run dsv4.deploy.ray:app model=tiny replicas=3

A request passes through Ray's HTTP proxy, an ingress (`ingress.py`: the whole HTTP application,
without an engine), the router (`router.py`: which replica has its prefix) and a replica
(`replica.py`: one engine process), and returns the same way.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

import ray
from pydantic import TypeAdapter, ValidationError
from ray import serve as ray_serve
from ray.exceptions import RayError
from ray.serve import Application, RunTarget
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ReplicaState

from dsv4.config import EngineConfig
from dsv4.deploy.ingress import Ingress
from dsv4.deploy.options import DEFAULT_SEQUENCES, RayOptions
from dsv4.deploy.replica import EngineReplica
from dsv4.errors import OptionError
from dsv4.server.options import ServerOptions
from dsv4.server.run import StartError, address, bind
from dsv4.server.worker.link import ENGINE, Notify

log = logging.getLogger(__name__)

NAME = "dsv4"  # of the application
ROUTER = "dsv4.deploy.router.PrefixRouter"
STATS_SECONDS = 1.0  # between reports of cached prefixes to the router
MAX_STARTS = 3  # of a replica that may fail before a deployment counts as failed
MAX_INGRESS_REQUESTS = 4096  # concurrent, in one ingress
WATCH_SECONDS = 0.5  # between polls of the application's status
CALL_SECONDS = 5.0  # for an ingress to answer a question
OBJECT_STORE_BYTES = 200 << 20  # if Ray is started here; nothing large goes through it

T = TypeVar("T")


def app(args: dict[str, Any]) -> Application:
    """The application from arguments: `model`, fields of RayOptions, ServerOptions and
    EngineConfig, and `api_key_file` and `priority_key_file`, which every ingress reads."""
    left = {"host": "0.0.0.0", **args}  # Ray's proxy listens; only access checks read this
    model = str(left.pop("model", "tiny"))
    if "replicas" in left:
        left["replicas"] = str(left["replicas"])  # YAML reads 3 as a number, 1-8 as text
    files = (left.pop("api_key_file", None), left.pop("priority_key_file", None))
    ray_options = _take(RayOptions, left)
    options = _take(ServerOptions, left)
    choices = asdict(_take(EngineConfig, left))
    if left:
        known = [item.name for kind in (RayOptions, ServerOptions) for item in fields(kind)]
        raise OptionError(
            f"unknown argument {min(left)!r}; there are model, api_key_file, priority_key_file, "
            f"{', '.join(known)}, and the engine's options"
        )
    return build(model, choices, options, ray_options, key_files=files)


def _take(kind: type[T], left: dict[str, Any]) -> T:
    """Build an object from the arguments that are its fields; `serve run` passes strings."""
    names = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    given = {name: left.pop(name) for name in names if name in left}
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        [first, *_] = error.errors()
        place = ".".join(map(str, first["loc"]))
        raise OptionError(f"{place}: found {first['input']!r}; {first['msg']}") from error


def build(
    model: str,
    choices: dict[str, Any],
    options: ServerOptions,
    ray_options: RayOptions,
    *,
    key_files: Sequence[str | None] = (None, None),
    router: str = ROUTER,
    engine: tuple[str, ...] = ENGINE,
) -> Application:
    choices, resources = _resources(choices, ray_options)
    num_ranks = choices["tp"] * choices["pp"]
    places = choices.get("max_sequences") or DEFAULT_SEQUENCES
    common: dict[str, Any] = {
        "graceful_shutdown_timeout_s": options.drain_seconds,
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_constructor_retry_count": MAX_STARTS,
        "logging_config": {"enable_access_log": False},  # the ingress logs one line per request
    }
    together: dict[str, Any] = {}
    if num_ranks > 1:  # one bundle: all ranks of an engine are processes of one machine
        bundle = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
        bundle = {name: count for name, count in bundle.items() if count}
        together = {"placement_group_bundles": [bundle], "placement_group_strategy": "STRICT_PACK"}
    engines = ray_serve.deployment(
        EngineReplica,
        name="Engine",
        **_scale(ray_options, places),
        **common,
        **together,
        ray_actor_options=resources,
        max_ongoing_requests=2 * places,  # half of them wait in the engine, so it stays full
        max_queued_requests=max(options.max_waiting, 1),
        health_check_period_s=ray_options.health_seconds,
        health_check_timeout_s=2 * ray_options.health_seconds,
        request_router_config=RequestRouterConfig(
            request_router_class=router, request_routing_stats_period_s=STATS_SECONDS
        ),
    )
    ingress = ray_serve.deployment(
        ray_serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=ray_options.ingress_replicas,
        **common,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=MAX_INGRESS_REQUESTS,
    )
    application: Application = ingress.bind(
        engines.bind(model, choices, engine), model, options, *key_files
    )
    return application


def _scale(ray_options: RayOptions, places: int) -> dict[str, Any]:
    least, most = ray_options.limits
    if least == most:
        return {"num_replicas": least}
    config = {
        "min_replicas": least,
        "max_replicas": most,
        "target_ongoing_requests": places,
        "upscale_delay_s": ray_options.upscale_seconds,
        "downscale_delay_s": ray_options.downscale_seconds,
        "look_back_period_s": max(3 * ray_options.upscale_seconds, 1.0),
    }
    return {"autoscaling_config": config}


def _resources(
    choices: dict[str, Any], ray_options: RayOptions
) -> tuple[dict[str, Any], dict[str, float]]:
    """The engine's choices with a device, and what Ray reserves for a replica."""
    device = choices.get("device", "auto")
    if device == "auto":
        if not ray.is_initialized():
            raise OptionError("device: found auto and no cluster to look at, expected cpu or cuda")
        device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        log.warning("device: %s, as the cluster has it now", device)
    elif device not in ("cpu", "cuda"):
        raise OptionError(f"device is {device!r}, expected cpu or cuda: Ray assigns the GPUs")
    if choices.get("nodes", 1) != 1:
        raise OptionError(f"nodes is {choices['nodes']}, expected 1: a replica is on one machine")
    tp = choices.get("tp", 1)
    tp = 1 if tp == "auto" else tp  # Ray has to know how many GPUs to reserve
    pp = choices.get("pp", 1)
    num_ranks = tp * pp
    num_gpus = num_ranks if device == "cuda" else 0
    resources = {"num_cpus": ray_options.replica_cpus * num_ranks, "num_gpus": num_gpus}
    return {**choices, "device": device, "tp": tp, "pp": pp}, resources


def serve(
    model: str,
    choices: dict[str, Any],
    options: ServerOptions,
    ray_options: RayOptions,
    notify: Notify,
    *,
    router: str = ROUTER,
    engine: tuple[str, ...] = ENGINE,
) -> None:
    """Run the application until a signal arrives; then drain it and take it down."""
    with bind(options) as listener:  # a port in use fails at once; 0 becomes a free one
        url = address(listener, options)
        options = replace(options, port=listener.getsockname()[1])
    is_own = _connect(ray_options)
    signals = _Signals()
    try:
        application = build(model, choices, options, ray_options, router=router, engine=engine)
        ray_serve.start(http_options={"host": options.host, "port": options.port})
        target = RunTarget(target=application, name=NAME, route_prefix="/")
        [ingress] = ray_serve.run_many([target], wait_for_applications_running=False)
        notify({"kind": "plan", "text": f"{ray_options.replicas} engine replicas on Ray Serve"})
        if _watch(signals, lambda found: _is_up(found, ingress)):
            notify({"kind": "ready", "address": url})
            _watch(signals, lambda found: False)
            _drain(ingress, options.drain_seconds)
    finally:
        if is_own:
            ray_serve.shutdown()
        else:
            ray_serve.delete(NAME)
        ray.shutdown()


def _connect(ray_options: RayOptions) -> bool:
    """Join the cluster of RAY_ADDRESS, or the one this machine belongs to. If there is none, or
    RAY_ADDRESS is `local`, start a Ray of our own; returns whether we did."""
    level = logging.WARNING
    logging.getLogger("ray.serve").setLevel(level)
    where = os.environ.get("RAY_ADDRESS") or "auto"
    if where != "local":
        try:
            ray.init(address=where, logging_level=level)
        except ConnectionError as error:
            if where != "auto":
                raise OptionError(f"RAY_ADDRESS: found {where!r}, where no Ray answers") from error
        else:
            if ray_serve.status().proxies:
                raise OptionError(
                    "Ray Serve runs in this cluster already; deploy into it with `serve deploy` "
                    "(docs/deploy.md), or start a Ray of its own here with RAY_ADDRESS=local"
                )
            return False
    needed = ray_options.limits[1] * ray_options.replica_cpus + ray_options.ingress_replicas
    # a replica that does not answer is killed, not asked to leave
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, round(needed + 1)),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level=level,
    )
    return True


class _Signals:
    """SIGTERM and Ctrl-C; the second one exits immediately."""

    def __init__(self) -> None:
        self._came = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, number: int, _: object) -> None:
        if self._came.is_set():
            os._exit(128 + number)
        self._came.set()

    def wait(self, seconds: float) -> bool:
        return self._came.wait(seconds)


def _watch(signals: _Signals, is_enough: Callable[[ApplicationStatusOverview], bool]) -> bool:
    """Log failures until `is_enough`; False if a signal came first."""
    said = set()
    while not signals.wait(WATCH_SECONDS):
        found = ray_serve.status().applications.get(NAME)
        if found is None:
            continue
        messages = [found.message, *(item.message for item in found.deployments.values())]
        if found.status == ApplicationStatus.DEPLOY_FAILED:
            raise StartError(_reason(messages), 1)
        for message in filter(None, messages):
            reason = _reason([message])
            if "Error" in reason and reason not in said:
                said.add(reason)
                log.warning("a replica could not be started: %s", reason)
        if is_enough(found):
            return True
    return False


def _is_up(found: ApplicationStatusOverview, ingress: DeploymentHandle) -> bool:
    """An ingress runs and has heard of an engine."""
    states = [item.replica_states for item in found.deployments.values()]
    if len(states) < 2 or not all(state.get(ReplicaState.RUNNING) for state in states):
        return False
    try:
        return all(ingress.broadcast("is_ready").results(timeout_s=CALL_SECONDS))
    except (RayError, RayServeException, TimeoutError):
        return False


def _reason(messages: Sequence[str]) -> str:
    """The line that says why, from messages with whole tracebacks."""
    lines = [line.strip() for text in messages for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("RuntimeError: ") or "Error: " in line]
    return (errors or lines or ["Ray gives no reason"])[-1]


def _drain(ingress: DeploymentHandle, seconds: float) -> None:
    """New requests get 503; running ones have this long to finish."""
    log.warning("shutting down; running answers have %g s", seconds)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            asked = ingress.broadcast("drain")
            if not sum(asked.results(timeout_s=CALL_SECONDS)):
                return
            time.sleep(0.2)
    except (RayError, RayServeException, TimeoutError) as error:
        log.warning("an ingress could not be drained: %s", type(error).__name__)
