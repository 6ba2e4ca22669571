"""Ranks as threads of one process: every layout on any machine, for tests and for trying out."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Queue
from typing import TypeVar

from torch import Tensor

from dsv4.parallel.comm import share_by_mail
from dsv4.parallel.layout import RankLayout

Result = TypeVar("Result")


class _Meeting:
    """A tensor group: what each of its ranks laid down, and when all have."""

    def __init__(self, size: int) -> None:
        self.laid: list[Tensor | None] = [None] * size
        self.counts: list[Sequence[int]] = [()] * size
        self.barrier = threading.Barrier(size)


class ThreadWorld:
    """The world; `rank` gives a rank's `Comm`."""

    def __init__(self, tp: int, pp: int, timeout: float = 60.0) -> None:
        self._timeout = timeout
        self._meetings = [_Meeting(tp) for _ in range(pp)]
        world = range(tp * pp)
        self._mail: dict[tuple[int, int], Queue[Tensor]] = {
            (a, b): Queue() for a in world for b in world
        }

    def rank(self, layout: RankLayout) -> "ThreadComm":
        return ThreadComm(layout, self._meetings[layout.stage], self._mail, self._timeout)

    def run(self, works: Sequence[Callable[[], Result]]) -> list[Result]:
        """Each rank's work on a thread of its own; the first error is raised, and ends the rest."""
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def begin(rank: int, work: Callable[[], Result]) -> None:
            try:
                results[rank] = work()
            except BaseException as error:
                errors.append(error)
                for meeting in self._meetings:
                    meeting.barrier.abort()

        threads = [
            threading.Thread(target=begin, args=pair, daemon=True) for pair in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(len(works))]


class ThreadComm:
    pushes = error = None

    def __init__(
        self,
        layout: RankLayout,
        meeting: _Meeting,
        mail: dict[tuple[int, int], "Queue[Tensor]"],
        timeout: float,
    ) -> None:
        self._layout, self._meeting, self._mail, self._timeout = layout, meeting, mail, timeout

    def gather(self, out: Tensor, x: Tensor) -> None:
        for place, laid in enumerate(self._lay_down(x, ())):
            out[place].copy_(laid)
        self._meet()  # no rank overwrites what others still read

    def exchange(
        self, out: Tensor, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        place, end = self._layout.tp_rank, 0
        for source, laid in enumerate(self._lay_down(x, sent)):
            counts = self._meeting.counts[source]
            assert counts[place] == received[source], "ranks disagree about what they exchange"
            first = sum(counts[:place])
            out[end : end + counts[place]].copy_(laid[first : first + counts[place]])
            end += counts[place]
        self._meet()

    def send(self, x: Tensor, to: int) -> None:
        self._mail[self._layout.rank, to].put(x.clone())

    def receive(self, out: Tensor, source: int) -> None:
        out.copy_(self._mail[source, self._layout.rank].get(timeout=self._timeout))

    def receive_logits(self, out: Tensor) -> Callable[[], None]:
        return partial(self.receive, out, self._layout.logits_rank)

    def send_logits(self, x: Tensor) -> None:
        self.send(x, 0)

    def share(self, x: Tensor) -> None:
        share_by_mail(self, self._layout, x)

    def _lay_down(self, x: Tensor, counts: Sequence[int]) -> list[Tensor]:
        self._meeting.laid[self._layout.tp_rank] = x
        self._meeting.counts[self._layout.tp_rank] = counts
        self._meet()
        return [laid for laid in self._meeting.laid if laid is not None]

    def _meet(self) -> None:
        self._meeting.barrier.wait(self._timeout)
