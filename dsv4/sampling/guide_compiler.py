"""The engine's side of the process that compiles guides.

A client's grammar can take minutes and gigabytes, or crash the library. It is therefore compiled in
a child of a process that has the library loaded (`guide_compiler_main.py`), which kills the child
when it exceeds its time or memory, or when no request waits for it any more.
"""

import base64
import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4.errors import CapacityError, RequestError

log = logging.getLogger(__name__)

COMPILE_SECONDS = 30.0  # per guide, from the start of its compilation
MAX_PENDING = 64  # guides queued or compiling; beyond that requests are refused

PROGRAM = ("-m", "dsv4.sampling.guide_compiler_main")


@dataclass(eq=False)
class PendingGuide:
    """A grammar being compiled, shared by all requests with the same guide."""

    kind: str
    text: str
    number: int = -1
    num_users: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    grammar: Any = None
    error: str | None = None
    is_ours: bool = False  # the error is not the guide's fault

    @property
    def is_ready(self) -> bool:
        return self.done.is_set()

    def result(self) -> Any:
        if self.is_ours:
            raise CapacityError(f"the {self.kind} guide could not be compiled: {self.error}")
        if self.error is not None:
            raise RequestError(f"the {self.kind} guide cannot be used: {self.error}")
        return self.grammar

    def fail(self, error: str, *, is_ours: bool = False) -> None:
        self.error, self.is_ours = error, is_ours
        self.done.set()


class CompilerProcess:
    """Sends jobs and receives results on a reader thread. Starts with the first job."""

    def __init__(self, vocabulary: Sequence[bytes], stop_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._stop_ids = list(stop_ids)
        self._pending: dict[int, PendingGuide] = {}
        self._num_jobs = 0
        self._lock = threading.Lock()  # guards pending, shared with the reader thread
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._info: Any = None

    def submit(self, job: PendingGuide) -> None:
        with self._lock:
            if len(self._pending) >= MAX_PENDING:
                raise CapacityError(
                    f"{len(self._pending)} guides wait to be compiled, expected at most "
                    f"{MAX_PENDING}; try again later"
                )
            self._num_jobs += 1
            job.number = self._num_jobs
            self._pending[job.number] = job
        if self._process is None or self._process.poll() is not None:
            self._start()
        message = {"do": "compile", "number": job.number, "kind": job.kind, "text": job.text}
        self._outbox.put(message)

    def cancel(self, job: PendingGuide) -> None:
        with self._lock:
            self._pending.pop(job.number, None)
        job.fail("it was given up")
        self._outbox.put({"do": "cancel", "number": job.number})

    def close(self) -> None:
        """Close the socket; the process and the threads end on EOF."""
        if self._line is not None:
            with contextlib.suppress(OSError):  # it may already be gone
                self._line.shutdown(socket.SHUT_RDWR)
            self._outbox.put(None)
            self._line = self._process = None

    def _start(self) -> None:
        self.close()
        self._outbox = queue.SimpleQueue()
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        words = [base64.b64encode(token).decode() for token in self._vocabulary]
        begin = {"vocabulary": words, "stop_ids": self._stop_ids, "seconds": COMPILE_SECONDS}
        self._outbox.put({"do": "begin", **begin})
        for work, more in ((self._write, self._outbox), (self._read, self._process)):
            threading.Thread(target=work, args=(self._line, more), daemon=True).start()

    def _write(
        self, line: socket.socket, outbox: "queue.SimpleQueue[dict[str, Any] | None]"
    ) -> None:
        """Runs on a thread, because the process reads nothing while it loads the library."""
        try:
            while (message := outbox.get()) is not None:
                line.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:  # the reader sees EOF too and fails pending jobs
            log.debug("the process that compiles guides is gone: %s", error)

    def _read(self, line: socket.socket, process: subprocess.Popen[bytes]) -> None:
        try:
            with line, line.makefile("rb") as file:
                while head := file.readline():
                    message = json.loads(head)
                    data = file.read(message["num_bytes"])
                    self._on_message(message, data)
        except (OSError, ValueError) as error:
            log.warning("the process that compiles guides cannot be read: %s", error)
        finally:
            _end(process)
            with self._lock:
                lost, self._pending = self._pending, {}
            for job in lost.values():
                job.fail("the process that compiles guides ended; try again", is_ours=True)

    def _on_message(self, message: dict[str, Any], data: bytes) -> None:
        with self._lock:
            job = self._pending.pop(message["number"], None)
        if job is None:
            return  # cancelled in the meantime
        if message["error"] is not None:
            job.fail(message["error"])
            return
        try:
            job.grammar = self._load(data)
        except Exception as error:  # the library raises RuntimeError and its own types
            job.fail(f"it cannot be read back: {error}", is_ours=True)
            return
        job.done.set()

    def _load(self, data: bytes) -> Any:
        import xgrammar

        if self._info is None:
            self._info = tokenizer_info(self._vocabulary, self._stop_ids)
        return xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._info)


def tokenizer_info(vocabulary: Sequence[bytes], stop_ids: Sequence[int]) -> Any:
    import xgrammar

    return xgrammar.TokenizerInfo(
        list(vocabulary),
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=len(vocabulary),
        stop_token_ids=list(stop_ids),
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, which share its session."""
    with contextlib.suppress(ProcessLookupError):  # they may already have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
