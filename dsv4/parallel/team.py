"""How rank 0 drives the other ranks: commands out, signs of life in, and if one fails, all end.

A thread watches for a rank that ends, fails alone or gives no sign of life for half of `timeout`
(all of it while ranks start), and for a command that does not finish in time. It keeps and logs
the first cause and kills all ranks; every later call raises that cause as a `RankError`. Over Gloo
on one machine that also ends whatever rank 0 is waiting for. It does not across a cut link, with
NCCL or in a kernel that waits: there a server's engine process, which hears of it, ends itself.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from dsv4.errors import RankError
from dsv4.parallel.commands import Command, Link, RankMessage
from dsv4.parallel.fork_server import Member, how_it_ended
from dsv4.parallel.nodes import RemoteNode
from dsv4.util.readiness import readable

log = logging.getLogger(__name__)

T = TypeVar("T")
RankFailed = Callable[[RankError], None]

# Of `timeout`. A server gives up after 1.5 of it: by then the rank must have a name.
SILENT, LATE = 0.5, 0.9
QUIET = 0.25  # two pings; of a rank that stopped while a command that is late ran
GRACE_SECONDS = 2.0  # for all ranks to report the same failure
END_SECONDS = 5.0
LEAST_START_SILENCE = 5.0  # seconds; what loads a model may hold the interpreter for a while


@dataclass
class _Rank:
    number: int
    member: Member
    link: Link
    last_message: float = field(default_factory=time.monotonic)  # when it came
    moved: float = 0.0  # when it finished a command, or got one and had finished all others
    finished: int = 0  # the last command it has finished
    said: dict[str, RankMessage] = field(default_factory=dict)  # the last message of each kind
    failed: tuple[int, str, float] | None = None  # command, error, when

    @property
    def name(self) -> str:
        node = f"node {self.member.node}, " if self.member.node else ""
        return f"rank {self.number} ({node}process {self.member.pid})"


class Team:
    def __init__(
        self,
        members: Sequence[Member],
        timeout: float,
        tp: int = 1,
        rank_failed: RankFailed | None = None,
    ) -> None:
        """`members`: ranks 1 and up. Every `tp` adjacent ranks have byte-identical state.
        `timeout`: of a step; `rank_failed` is called on a thread of its own."""
        self.timeout, self._tp, self._rank_failed = timeout, tp, rank_failed
        self._ranks = [_Rank(i + 1, m, Link(m.connection)) for i, m in enumerate(members)]
        self._sent = 0
        self._changed = threading.Condition()
        self._failure: RankError | None = None
        self._is_ready = self._is_closed = False
        self._own_failure: int | None = None  # the command in which rank 0 itself failed
        self._sums: dict[int, dict[int, int]] = {}  # command -> rank -> checksum
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [rank.member.pid for rank in self._ranks]

    @property
    def members(self) -> list[Member]:
        return [rank.member for rank in self._ranks]

    @property
    def num_commands(self) -> int:
        return self._sent

    @property
    def failure(self) -> RankError | None:
        return self._failure

    def report(self) -> tuple[dict[str, float], ...]:
        """For each rank: seconds since its last message, and the number of unfinished commands."""
        now = time.monotonic()
        return tuple(
            {
                "rank": rank.number,
                "node": rank.member.node,
                "pid": rank.member.pid,
                "silent_s": round(now - rank.last_message, 3),
                "behind": self._sent - rank.finished,
            }
            for rank in self._ranks
        )

    # --- what rank 0 says ---------------------------------------------------------------------

    def tell(self, messages: Sequence[RankMessage]) -> None:
        """Send each rank its own message, before the first command."""
        self.check()
        for rank, message in zip(self._ranks, messages, strict=True):
            self._send(rank, message)

    def command(self, kind: str, numbers: Sequence[int] = (), line: bytes = b"") -> None:
        """Send the same numbered command to all ranks."""
        self.command_each(kind, [(numbers, line)])

    def command_each(self, kind: str, parts: Sequence[tuple[Sequence[int], bytes]]) -> None:
        """Send a numbered command; `parts`: numbers and line for all ranks, or by the rank's place
        in its tensor group."""
        self.check()
        self._sent += 1
        made = [
            Command(self._sent, kind, tuple(numbers), line).to_message() for numbers, line in parts
        ]
        for rank in self._ranks:
            if rank.finished == self._sent - 1:
                rank.moved = time.monotonic()
            self._send(rank, *made[rank.number % len(made)])

    def wait_for(self, kind: str, progress: Callable[[], None] | None = None) -> list[RankMessage]:
        """Wait until each rank has said `kind`, however long: a rank that hangs fails the team."""
        with self._changed:
            while not all(kind in rank.said for rank in self._ranks):
                self.check()
                self._changed.wait(0.2)
                if progress is not None:
                    progress()
            self.check()
            return [rank.said[kind] for rank in self._ranks]

    def unless_one_fails(self, work: Callable[[], T]) -> T:
        """Rank 0's part of what all ranks start together, on a thread: if a rank fails, that may
        wait for it for minutes, and is left alone."""
        found: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                found.set_result(work())
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not futures.wait([found], 0.1).done:
            self.check()
        return found.result()

    def ready(self) -> None:
        """From here on the time of commands and the shorter silence count."""
        self._begin_clocks(time.monotonic())
        self._is_ready = True

    def _begin_clocks(self, now: float) -> None:
        for rank in self._ranks:
            rank.last_message = rank.moved = now

    def compare(self, checksum: int) -> None:
        """Rank 0's own answer to the newest command, a `check`."""
        with self._changed:
            self._take_sum(self._sent, 0, checksum)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs rank 0's own part of the newest command. If it fails, either all ranks failed alike
        and go on, or none can."""
        try:
            yield
        except Exception as error:
            self._settle(error)
            raise
        except BaseException:  # interrupted: the other ranks are in the middle of the command
            with self._changed:
                self._fail(f"rank 0 was interrupted in command {self._sent}")
            raise

    def _settle(self, error: Exception) -> None:
        """Rank 0 failed: returns if the others failed alike, else raises why all ranks end."""
        if error is self._failure:
            return
        text = describe(error)
        with self._changed:
            self._own_failure = self._sent
            self._changed.wait_for(lambda: self._failure or self._all_failed(), GRACE_SECONDS)
            texts = {rank.failed[1] for rank in self._ranks if rank.failed}
            if self._failure is None and not (self._all_failed() and texts == {text}):
                self._fail(f"rank 0 failed alone in command {self._sent}: {text}")
            if self._failure is not None:
                raise self._failure from error
            for rank in self._ranks:
                rank.failed = None

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def give_up(self, error: BaseException) -> None:
        """Rank 0 cannot start."""
        with self._changed:
            if self._failure is None:
                self._end_with(f"rank 0 cannot start: {describe(error)}")

    def close(self) -> None:
        """End all ranks; kill those that do not end."""
        if self._is_closed:
            return
        with self._changed:
            self._is_closed = True
        if self._failure is None:
            for rank in self._ranks:
                self._send(rank, *Command(self._sent + 1, "end").to_message())
        limit = time.monotonic() + END_SECONDS
        for rank in self._ranks:
            rank.member.host.status(rank.member.pid, max(0.0, limit - time.monotonic()))
        self._kill()
        for rank in self._ranks:
            rank.member.host.status(rank.member.pid, END_SECONDS)
            rank.link.close()
        for node in self._remote_nodes():
            node.end(in_order=self._failure is None)

    def _remote_nodes(self) -> list[RemoteNode]:
        hosts = {id(m.host): m.host for m in self.members}.values()
        return [host for host in hosts if isinstance(host, RemoteNode)]

    def _send(self, rank: _Rank, message: RankMessage, line: bytes = b"") -> None:
        try:
            rank.link.send(message, line)
        except OSError:
            # the watch finds out why; until then no other rank is told anything
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, GRACE_SECONDS)
            self.check()

    # --- the watch ----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Reads the ranks' messages, pings them, and notices silence and delays."""
        turn, pinged = max(0.05, min(1.0, self.timeout / 16)), 0.0
        last = time.monotonic()
        while not self._is_closed and self._failure is None:
            try:
                ready = readable([r.link for r in self._ranks], turn)
            except OSError:
                return  # closed meanwhile
            with self._changed:
                for rank in self._ranks:
                    if rank.link in ready and not self._is_closed:
                        self._take(rank)
                self._changed.notify_all()
                now = time.monotonic()
                if now - last > self.timeout / 4 + turn:  # this process itself was stalled
                    self._begin_clocks(now)
                last = now
                if self._failure is None and not self._is_closed:
                    self._look_at_clocks(now)
            if now - pinged > self.timeout / 8 and self._failure is None:
                pinged = now
                self._ping()

    def _ping(self) -> None:
        for rank in self._ranks:
            try:
                rank.link.try_send({"kind": "ping"})
            except OSError:
                continue  # its end is read above

    def _take(self, rank: _Rank) -> None:
        try:
            found = rank.link.receive()
            if found is None:
                self._fail(self._how_it_ended(rank))
            else:
                self._hear(rank, found[0])
        except (RankError, KeyError, TypeError) as error:
            self._fail(f"{rank.name} sent what is no message: {describe(error)}")

    def _hear(self, rank: _Rank, message: RankMessage) -> None:
        rank.last_message = time.monotonic()
        kind = message.get("kind", "")
        rank.said[kind] = message
        if kind in ("done", "pong", "failed") and message["n"] > rank.finished:
            rank.finished, rank.moved = message["n"], rank.last_message
        if "sum" in message:
            self._take_sum(message["n"], rank.number, message["sum"])
        elif kind == "failed":
            rank.failed = (message["n"], message["error"], rank.last_message)
            if message["n"] == 0:
                self._fail(f"rank {rank.number} cannot start: {message['error']}")

    def _take_sum(self, command: int, rank: int, checksum: int) -> None:
        """Once all have answered, each tensor group must agree; the failure names who differs."""
        sums = self._sums.setdefault(command, {})
        sums[rank] = checksum
        if len(sums) <= len(self._ranks):
            return
        del self._sums[command]
        for first in range(0, len(sums), self._tp):
            group = range(first, first + self._tp)
            common = Counter(sums[rank] for rank in group).most_common(1)[0][0]
            wrong = [rank for rank in group if sums[rank] != common]
            if wrong:
                names = ", ".join(f"rank {rank}" for rank in wrong)
                right = next(rank for rank in group if sums[rank] == common)
                self._fail(
                    f"{names} diverged: after command {command} its state has checksum "
                    f"{sums[wrong[0]]:08x}, expected that of rank {right}, {common:08x}; a device "
                    "or its memory may be faulty, see dsv4 doctor --ops"
                )
                return

    def _look_at_clocks(self, now: float) -> None:
        lost = [r for r in self._ranks if r.member.host.is_gone]
        if lost:
            self._fail(self._how_it_ended(lost[0]))
            return
        waiting = [r for r in self._ranks if self._is_ready and r.finished < self._sent]
        late = [r for r in waiting if now - r.moved > LATE * self.timeout]
        limit = self.timeout * (QUIET if late else SILENT)
        if not self._is_ready:
            limit = max(self.timeout, LEAST_START_SILENCE)
        silent = [r for r in self._ranks if now - r.last_message > limit]
        if silent:
            names = ", ".join(r.name for r in silent)
            longest = max(now - r.last_message for r in silent)
            behind = f"last finished command {min(r.finished for r in silent)} of {self._sent}"
            where = behind if self._is_ready else "it was starting"
            self._fail(f"{names} gave no sign of life for {longest:.1f} s; {where}")
            return
        broken = [r for r in self._ranks if r.failed and now - r.failed[2] > GRACE_SECONDS]
        if broken and self._own_failure != self._sent:
            rank = broken[0]
            assert rank.failed is not None
            self._fail(f"rank {rank.number} failed in command {rank.failed[0]}: {rank.failed[1]}")
            return
        if late:
            least = min(r.finished for r in late)
            names = ", ".join(r.name for r in late if r.finished == least)
            self._fail(
                f"{names} did not finish command {least + 1} within {LATE * self.timeout:g} s; "
                "raise step_timeout if steps may take that long"
            )

    def _all_failed(self) -> bool:
        return all(rank.failed and rank.failed[0] == self._sent for rank in self._ranks)

    def _how_it_ended(self, rank: _Rank) -> str:
        status = rank.member.host.status(rank.member.pid, GRACE_SECONDS)
        if status is None and rank.member.host.is_gone:
            how = "is out of reach: the process that started it has ended"
        elif status is None:
            how = "closed its connection"
        else:
            how = how_it_ended(status)
        return f"{rank.name} {how}"

    def _kill(self) -> None:
        for member in self.members:
            member.host.kill([member.pid])

    def _fail(self, message: str) -> None:
        if self._failure is None:
            log.error("%s; all ranks end", message)
            self._end_with(message, self._rank_failed)
        self._changed.notify_all()

    def _end_with(self, message: str, told: RankFailed | None = None) -> None:
        self._failure = RankError(f"{message}; all ranks end")
        if told is not None:  # it may take its time, and so may telling other nodes
            threading.Thread(target=told, args=(self._failure,), daemon=True).start()
        for node in self._remote_nodes():
            node.fail(str(self._failure), is_starting=not self._is_ready)
        self._kill()


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
