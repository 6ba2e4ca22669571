"""A rank with a fault, which `audit_folder` names: that setting reaches every rank unchanged."""

import os
import signal
import socket
import threading
import time
from typing import Any

import torch

from dsv4.errors import KernelError
from dsv4.parallel.commands import Command
from dsv4.runner.ranks import follower
from dsv4.runner.runner import Runner


class Faulty(follower.Follower):
    fault = ""
    rank = 0

    def _start(self, told: dict[str, Any]) -> Runner:
        self.fault, self.rank = told["settings"]["audit_folder"], told["rank"]
        if self.fault == "slow":
            time.sleep(3.0)
        if self.fault == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "digest":
            told = {**told, "digest": "0" * 32}
        if self.fault == "dies connecting":
            follower.connect = lambda *rest: os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._start(told)

    def execute(self, runner: Runner, command: Command) -> int | None:
        if self.fault == f"rank {self.rank} diverges" and command.number == 5:
            for pool, part in runner.state._pools.values():
                assert pool == "window" or part.numel()
                part.view(torch.float32).mul_(1.0001)  # NaN, where nothing is, stays
        if command.number == 3 and self.fault == "hangs":
            threading.Event().wait()  # the thread that answers pings does not
        if command.number == 3 and self.fault == "raises":
            raise ValueError("a wrong number")
        if command.number == 3 and self.fault == "alike":
            raise KernelError("the same everywhere")
        if self.fault == f"waits in command {command.number}":
            comm: Any = runner.model.exchange.comm
            right = comm.receive
            comm.receive = lambda *rest: (right(*rest), self._wait_for_the_next())
            try:
                return super().execute(runner, command)
            finally:
                comm.receive = right
        return super().execute(runner, command)

    def _wait_for_the_next(self) -> None:
        limit = time.monotonic() + 20.0
        while self._inbox.empty():
            if time.monotonic() > limit:
                raise KernelError("the next step did not begin meanwhile")
            time.sleep(0.001)


def main(connection: socket.socket) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return Faulty(follower.Link(connection)).run()
