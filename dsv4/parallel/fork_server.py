"""Starts ranks: a process that has imported torch once and forks a rank for each request.

    python -m dsv4.parallel.fork_server FD MODULE

A fresh interpreter takes seconds to import torch; a fork has it. MODULE defines `main(socket) ->
int`. When the socket FD closes, the client process is gone: all ranks are killed and this process
ends, so nothing is left behind. If this process itself is killed, Linux kills its ranks. No torch
here: MODULE imports it.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from dsv4.errors import RankError
from dsv4.util.readiness import readable

_MESSAGE = 1 << 16
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
START_SECONDS = 120.0  # to import torch on a busy machine


class ForkServer:
    """The client side. One per module and process, kept for the next engine."""

    _known: ClassVar[dict[tuple[int, str], "ForkServer"]] = {}
    _lock = threading.Lock()

    def __init__(self, module: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [
                sys.executable,
                "-m",
                "dsv4.parallel.fork_server",
                str(theirs.fileno()),
                module,
            ]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._changed = threading.Condition()
        self._started: list[list[int]] = []
        self._ended: dict[int, int] = {}  # pid -> status, negative for a signal
        self._gone = False
        threading.Thread(target=self._listen, daemon=True).start()

    @classmethod
    def of(cls, module: str) -> "ForkServer":
        with cls._lock:
            key = (os.getpid(), module)
            found = cls._known.get(key)
            if found is not None and found._gone:
                found._release()
                found = None
            if found is None:
                found = cls._known[key] = cls(module)
            return found

    def start(self, count: int, timeout: float) -> tuple[list[int], list[socket.socket]]:
        """Start `count` ranks; returns their process ids and our ends of their sockets."""
        pairs = [socket.socketpair() for _ in range(count)]
        try:
            pids = self.start_on([theirs for _, theirs in pairs], timeout)
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        return pids, [ours for ours, _ in pairs]

    def start_on(self, connections: Sequence[socket.socket], timeout: float) -> list[int]:
        """Start a rank for each connection, then close it here; returns the process ids."""
        with ForkServer._lock:  # answers come in the order of requests
            before = len(self._started)
            try:
                data = json.dumps({"start": len(connections)}).encode()
                socket.send_fds(self._control, [data], [end.fileno() for end in connections])
            except OSError as error:
                raise RankError(f"the process that starts ranks is gone ({error})") from error
            finally:
                for end in connections:
                    end.close()
            with self._changed:
                self._changed.wait_for(lambda: self._gone or len(self._started) > before, timeout)
                if len(self._started) <= before:
                    self._process.kill()  # and with it whatever it was about to start
                    why = "ended" if self._gone else f"gave no answer within {timeout:g} s"
                    raise RankError(f"the process that starts ranks {why}; is torch installed?")
                return self._started[before]

    def status(self, pid: int, timeout: float) -> int | None:
        """How a rank ended: its exit code, or minus its signal; None if it has not.

        If the fork server is gone, the code stays unknown; the rank is waited for all the same.
        """
        limit = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: self._gone or pid in self._ended, timeout)
            if pid in self._ended:
                return self._ended[pid]
        if self._gone:
            _wait_for_orphan(pid, limit - time.monotonic())
        return None

    @property
    def is_gone(self) -> bool:
        return self._gone

    def kill(self, pids: list[int]) -> None:
        try:
            self._control.send(json.dumps({"kill": pids}).encode())
        except OSError:  # it is gone; where Linux does not, end them here
            started = {pid for request in self._started for pid in request}
            for pid in (started & set(pids)) - self._ended.keys():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _release(self) -> None:
        self._process.kill()
        self._process.wait()
        self._control.close()

    def _listen(self) -> None:
        try:
            while data := self._control.recv(_MESSAGE):
                message = json.loads(data)
                with self._changed:
                    if "pids" in message:
                        self._started.append(message["pids"])
                    else:
                        self._ended[message["ended"]] = message["status"]
                    self._changed.notify_all()
        except OSError:
            return
        finally:
            with self._changed:
                self._gone = True
                self._changed.notify_all()


class ProcessHost(Protocol):
    """Where rank processes run: a `ForkServer` here, or another node."""

    @property
    def is_gone(self) -> bool: ...

    def status(self, pid: int, timeout: float) -> int | None: ...

    def kill(self, pids: list[int]) -> None: ...


@dataclass
class Member:
    """A rank other than 0, started but not yet told anything."""

    pid: int
    connection: socket.socket
    host: ProcessHost
    node: int = 0
    address: str = ""  # where other ranks reach it; empty: same as rank 0
    model: str | None = None  # its node's path to the files, if not rank 0's


def start_members(count: int, module: str) -> list[Member]:
    """Start ranks on this machine; each runs `main` of `module`."""
    server = ForkServer.of(module)
    pids, sockets = server.start(count, START_SECONDS)
    return [Member(pid, end, server) for pid, end in zip(pids, sockets, strict=True)]


def how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    names = {known.value: known.name for known in signal.Signals}  # without real-time signals
    return f"was ended by signal {-status} ({names.get(-status, 'unnamed')})"


def _wait_for_orphan(pid: int, timeout: float) -> None:
    """Wait until a process that is not our child has ended."""
    try:
        process = os.pidfd_open(pid)
    except (OSError, AttributeError):  # it is gone, or this system has no such call
        return
    try:
        readable([process], timeout)
    finally:
        os.close(process)


def serve(control: socket.socket, module: str) -> None:
    """The fork server's own loop; returns when the client process is gone."""
    follow = importlib.import_module(module).main
    children: set[int] = set()
    while True:
        if readable([control], _POLL_SECONDS):
            data, fds, _, _ = socket.recv_fds(control, _MESSAGE, 64)
            if not data:
                break
            message = json.loads(data)
            if "start" in message:
                ranks = [socket.socket(fileno=fd) for fd in fds]
                pids = [_fork(follow, control, ranks, place) for place in range(len(ranks))]
                for rank in ranks:
                    rank.close()
                children |= set(pids)
                control.send(json.dumps({"pids": pids}).encode())
            for pid in message.get("kill", ()):
                if pid in children:
                    os.kill(pid, signal.SIGKILL)
        for pid in list(children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                children.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                control.send(json.dumps({"ended": pid, "status": code}).encode())
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _fork(
    follow: Callable[[socket.socket], int],
    control: socket.socket,
    ranks: Sequence[socket.socket],
    place: int,
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _end_with(parent)
        control.close()
        for other, rank in enumerate(ranks):
            if other != place:
                rank.close()
        code = follow(ranks[place])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with(parent: int) -> None:
    """Have Linux kill this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):  # other systems have no prctl
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client process decides when to end
    with socket.socket(fileno=int(arguments[1])) as control, contextlib.suppress(ConnectionError):
        serve(control, arguments[2])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
