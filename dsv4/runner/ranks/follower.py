"""A rank that follows: loads its slices, then runs rank 0's commands. Decides nothing.

The main thread runs commands; another one reads the socket and answers pings, so rank 0 can tell a
rank that waits for others from one that hangs. When rank 0 is gone, this process ends.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import threading

import numpy as np

from dsv4.cache.fingerprint import sampled_digest
from dsv4.errors import RankError
from dsv4.parallel.commands import Command, Link, RankMessage
from dsv4.parallel.layout import RankLayout
from dsv4.parallel.probe import probe
from dsv4.parallel.team import describe
from dsv4.runner.ranks.devices import check_own_gpu
from dsv4.runner.ranks.start import build, connect, load_rank
from dsv4.runner.ranks.state_copier import COPIES, copy_state
from dsv4.runner.ranks.versions import differences, versions
from dsv4.runner.runner import Runner
from dsv4.runner.settings import Settings
from dsv4.runner.step.shape import StepShape
from dsv4.util.models import model_folder

log = logging.getLogger(__name__)


def main(connection: socket.socket, gone_code: int = 1) -> int:
    """`gone_code`: exit code if rank 0 disappears without a word."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return Follower(Link(connection), gone_code).run()


class Follower:
    def __init__(self, link: Link, gone_code: int = 1) -> None:
        self._link, self._gone_code = link, gone_code
        self._inbox: queue.SimpleQueue[tuple[RankMessage, bytes]] = queue.SimpleQueue()
        self._finished = 0

    def run(self) -> int:
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            runner = self._start(self._inbox.get()[0])
        except Exception as error:
            log.debug("a rank cannot start", exc_info=True)
            self._link.send({"kind": "failed", "n": 0, "error": describe(error)})
            return 1
        while True:
            command = Command.from_message(*self._inbox.get(), self._finished + 1)
            if command.kind == "end":
                return 0
            answer: RankMessage = {"kind": "done", "n": command.number}
            try:
                found = self.execute(runner, command)
                if found is not None:
                    answer["sum"] = found
            except Exception as error:
                log.debug("command %d failed", command.number, exc_info=True)
                answer = {"kind": "failed", "n": command.number, "error": describe(error)}
            self._finished = command.number
            self._link.send(answer)

    def _start(self, told: RankMessage) -> Runner:
        logging.basicConfig(level=told["log_level"], format=f"rank {told['rank']}: %(message)s")
        stages = tuple(range(*pair) for pair in told["stages"])
        shared = told["split_experts"], told["data_attention"]
        layout = RankLayout(told["tp"], told["pp"], told["rank"], stages, *shared)
        settings = Settings(**told["settings"])
        if settings.device != "cpu":
            check_own_gpu(settings.device, layout)
        other = differences(versions(settings.device), told["versions"])
        if other:
            raise RankError(f"found {other} as on rank 0; use the same on all ranks")
        folder = model_folder(told["folder"])
        found = sampled_digest(folder)
        if found != told["digest"]:
            raise RankError(
                f"found another checkpoint here ({found[:12]}), expected rank 0's "
                f"({told['digest'][:12]}); use the same files on all ranks"
            )

        def progress(done: int, total: int) -> None:
            self._link.send({"kind": "progress", "done": done, "total": total})

        weights, config = load_rank(folder, settings, layout, progress)
        self._link.send({"kind": "loaded"})
        message, _ = self._inbox.get()
        assert message["kind"] == "connect", message
        meeting = told["store"], told["timeout"], told["address"], told["comm"]
        comm = connect(layout, config, settings, *meeting)
        model = build(layout, comm, config, weights, settings)
        self._link.send({"kind": "connected"})
        runner = Runner(model, settings)
        self._link.send({"kind": "ready"})
        return runner

    def execute(self, runner: Runner, command: Command) -> int | None:
        """Run a command; a `check` returns a checksum."""
        numbers = command.numbers
        if command.kind in ("step", "home_step"):
            shape = StepShape.from_numbers(numbers)
            runner.follow_step(shape, np.frombuffer(command.line, dtype=np.int64))
        elif command.kind == "share":
            runner.follow_share()
        elif command.kind == "score":
            runner.follow_score(numbers, np.frombuffer(command.line, dtype=np.int64))
        elif command.kind in COPIES:
            if numbers[0] in (-1, runner.place):
                copy_state(runner.state, command.kind, numbers[1:])
        elif command.kind == "write_state":
            runner.state.write_part(numbers[0], numbers[1], numbers[2:], command.line)
        elif command.kind == "check":
            return runner.state.checksum(*numbers)
        elif command.kind == "probe":
            exchange = runner.model.exchange
            probe(exchange.comm, exchange.layout, numbers[0], numbers[1], runner.device)
        return None

    def _listen(self) -> None:
        """Ends the process when rank 0 is gone: the main thread may be waiting for other ranks."""
        with contextlib.suppress(OSError, RankError):
            while (found := self._link.receive()) is not None:
                if found[0].get("kind") == "ping":
                    self._link.send({"kind": "pong", "n": self._finished})
                else:
                    self._inbox.put(found)
                if found[0].get("kind") == "end":
                    return  # the main thread ends the process when it gets there
        os._exit(self._gone_code)
