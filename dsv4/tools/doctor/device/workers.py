"""Checks ops in worker processes: a kernel that destroys its CUDA context or its process, or never
ends, takes no other case with it.

Cold kernels are compiled first, each once and on all cores (`compile_only`), by a worker that runs
none of them; the others find them in Triton's cache. Workers are forked from a process that has
imported torch but not touched the GPU; they end with the process that started them.

    to a worker     device, kernels, kinds; then what to compile, or a task at a time
    from a worker   ready, or failed; compiled, or for each case running and results; done
"""

import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from dsv4.ops import OPS
from dsv4.ops.core.context import EngineOps, changed
from dsv4.ops.core.op import AnyOp
from dsv4.parallel.commands import Link, RankMessage
from dsv4.parallel.fork_server import START_SECONDS, ForkServer
from dsv4.tools.doctor.device.ops import OpResult, Task, arguments_of, check_case, task_cases
from dsv4.tools.doctor.device.steps import STEP
from dsv4.util.readiness import readable

log = logging.getLogger(__name__)

WORKERS = "dsv4.tools.doctor.device.workers"
MOST = 8
MOST_COMPILERS = 32
GPU_BYTES = 3 << 29  # of a worker: its context, kernels and a case
HOST_BYTES = 2 << 30
COMPILE_UNTIL = 30.0  # seconds before the time limit; what is not compiled then, workers compile
GRACE_SECONDS = 15.0  # after the time limit, for cases that have begun
CASE_SECONDS = 300.0  # no case takes this long, with compiling


def num_workers(cores: int, num_tasks: int, gpu_bytes: int, host_bytes: int) -> int:
    room = min(gpu_bytes // GPU_BYTES, host_bytes // HOST_BYTES)
    return max(1, min(MOST, cores, num_tasks, room))


def num_compilers(cores: int, host_bytes: int) -> int:
    return max(1, min(MOST_COMPILERS, cores, host_bytes // HOST_BYTES))


@dataclass
class _Worker:
    pid: int
    link: Link
    task: Task | None = None
    running: tuple[int, str] | None = None  # which case of its task, and its name
    since: float = field(default_factory=time.monotonic)  # it runs this case

    def fileno(self) -> int:
        return self.link.fileno()

    def tell(self, message: RankMessage) -> None:
        with contextlib.suppress(OSError):  # it has ended, which is read next
            self.link.send(message)


class WorkerPool:
    """Yields (task, number of the case, results) as workers find them. The caller sees from what is
    missing which cases were not reached."""

    def __init__(self, setup: RankMessage, module: str = WORKERS) -> None:
        self._setup = setup
        self._server = ForkServer.of(module)
        self._workers: list[_Worker] = []
        self._waiting: deque[Task] = deque()
        self.failures: list[str] = []  # of workers that could not start

    def check(
        self, tasks: Sequence[Task], count: int, end: float
    ) -> Iterator[tuple[Task, int, list[OpResult]]]:
        """No task begins after `end`."""
        self._waiting = deque(tasks)
        try:
            self._start(count)
            while self._workers:
                for worker in readable(self._workers, 0.2):
                    received = worker.link.receive()
                    if received is None:
                        yield from self._ended(worker, end)
                    else:
                        yield from self._receive(worker, received[0], end)
                yield from self._overdue(end)
        finally:
            self._server.kill([worker.pid for worker in self._workers])
            for worker in self._workers:
                worker.link.close()

    def compile(self, tasks: Sequence[Task], processes: int, end: float) -> bool:
        """Compile the kernels of all tasks before any of them runs; whether all were in time."""
        until = end - COMPILE_UNTIL
        try:
            self._start(1)
            [worker] = self._workers
            while (now := time.monotonic()) < until:
                ready = readable([worker], min(0.2, until - now))
                received = worker.link.receive() if ready else ({"kind": "none"}, b"")
                kind = None if received is None else received[0]["kind"]
                if kind == "ready":
                    pairs = [asdict(task) for task in tasks]
                    worker.tell({"kind": "compile", "tasks": pairs, "processes": processes})
                elif kind != "none":
                    return kind == "compiled"
            return False
        finally:
            for worker in list(self._workers):
                self._remove(worker)

    def _start(self, count: int) -> None:
        pids, sockets = self._server.start(count, START_SECONDS)
        for pid, connection in zip(pids, sockets, strict=True):
            worker = _Worker(pid, Link(connection))
            self._workers.append(worker)
            worker.tell(self._setup)

    def _receive(
        self, worker: _Worker, message: RankMessage, end: float
    ) -> Iterator[tuple[Task, int, list[OpResult]]]:
        kind = message["kind"]
        worker.since = time.monotonic()
        if kind == "failed":
            self.failures.append(message["error"])
            self._remove(worker)
        elif kind == "running":
            worker.running = (message["number"], message["case"])
        elif kind == "results":
            assert worker.task is not None
            worker.running = None
            found = [OpResult(**result) for result in message["results"]]
            yield worker.task, message["number"], found
        elif self._waiting and time.monotonic() < end:
            worker.task = self._waiting.popleft()
            worker.tell({"kind": "task", **asdict(worker.task)})
        else:
            self._remove(worker)

    def _ended(self, worker: _Worker, end: float) -> Iterator[tuple[Task, int, list[OpResult]]]:
        """A worker whose context is lost reports its case and ends by itself; any other end is a
        finding about the case it ran."""
        status = self._server.status(worker.pid, timeout=5.0)
        self._remove(worker)
        if worker.task is None:
            self.failures.append(f"a worker ended at its start ({_how(status)})")
            return
        if worker.running is not None:
            yield _finding(worker, f"its process ended ({_how(status)})")
        if self._waiting and time.monotonic() < end:
            self._start(1)

    def _overdue(self, end: float) -> Iterator[tuple[Task, int, list[OpResult]]]:
        now = time.monotonic()
        for worker in list(self._workers):
            if now - worker.since > CASE_SECONDS:
                if worker.task is not None and worker.running is not None:
                    yield _finding(worker, f"did not end within {CASE_SECONDS:g} s")
                self._remove(worker)
                if self._waiting and now < end:
                    self._start(1)
            elif now > end + GRACE_SECONDS:
                if worker.task is not None and worker.running is not None:
                    detail = f"still ran when time was over, after {now - worker.since:.0f} s"
                    yield _finding(worker, detail, status="skipped")
                self._remove(worker)

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._server.kill([worker.pid])
        worker.link.close()


def _finding(
    worker: _Worker, detail: str, status: str = "wrong"
) -> tuple[Task, int, list[OpResult]]:
    assert worker.task is not None
    assert worker.running is not None
    number, case = worker.running
    error = float("inf") if status == "wrong" else 0.0
    result = OpResult(worker.task.op, case, "kernel", status, error, detail=detail)
    return worker.task, number, [result]


def _how(status: int | None) -> str:
    if status is None:
        return "unknown how"
    if status < 0:
        return f"signal {-status}, {signal.strsignal(-status)}"
    return f"exit code {status}"


# --- the worker's side ----------------------------------------------------------------------------


KNOWN_OPS = {**OPS, STEP.name: STEP}


def main(connection: socket.socket, ops: Mapping[str, AnyOp] = KNOWN_OPS) -> int:
    os.dup2(2, 1)  # the client's output may be JSON
    torch.set_num_threads(1)
    link = Link(connection)
    received = link.receive()
    if received is None:
        return 1
    setup = received[0]
    device, use_kernels = setup["device"], setup["use_kernels"]
    try:
        torch.zeros(1, device=device)
    except Exception as error:
        link.send({"kind": "failed", "error": f"a worker cannot use {device}: {error!r}"})
        return 1
    link.send({"kind": "ready"})
    while (received := link.receive()) is not None:
        message = received[0]
        if message["kind"] == "compile":
            tasks = [Task(**task) for task in message["tasks"]]
            compile_tasks(ops, tasks, device, message["processes"])
            link.send({"kind": "compiled"})
            continue
        op, place = ops[message["op"]], message["place"]
        for number, case in enumerate(task_cases(op, place, setup["kinds"])):
            link.send({"kind": "running", "number": number, "case": case.name})
            found = check_case(op, case, device, use_kernels, scaled=number > 0)
            results = [asdict(result) for result in found]
            link.send({"kind": "results", "number": number, "results": results})
            if any(result.status == "wrong" for result in found) and not _is_alive(device):
                return 1
        if device != "cpu":
            torch.cuda.empty_cache()
        link.send({"kind": "done"})
    return 0


def compile_tasks(
    ops: Mapping[str, AnyOp], tasks: Sequence[Task], device: str, processes: int
) -> None:
    """The kernels of each task's first case; harder ones have the same."""
    from dsv4.ops.core.compile_triton import compile_only  # needs Triton, which a CPU does not

    with compile_only(processes), changed(compiling=False), EngineOps().active():
        for task in tasks:
            op = ops[task.op]
            try:
                arguments = arguments_of(task_cases(op, task.place, ())[0], device)
                for kernel in op.kernels:
                    if kernel.supports(arguments) is None:
                        kernel.run(arguments)
                if op is STEP:
                    op.reference(**arguments)
            except Exception:  # the worker that checks this case reports it
                log.debug("compiling %s", task, exc_info=True)


def _is_alive(device: str) -> bool:
    """False after an illegal memory access: every later call in this process fails."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        log.debug("the context of a worker is lost", exc_info=True)
        return False
    return True
