"""Stall detection: requests that would wait indefinitely are a bug, and are reported by name."""

from collections.abc import Callable

from dsv4.cache.geometry import SHARED_TOKENS
from dsv4.errors import StallError
from dsv4.scheduler.sequence import SequenceState

MOST_NAMED = 4


class StallDetector:
    def __init__(self, has_slot: Callable[[], bool], chunk_tokens: int) -> None:
        self._has_slot = has_slot
        self._block = min(chunk_tokens, SHARED_TOKENS)
        self._num_idle_steps = 0  # since a sequence last made new progress or ended
        self._num_preempted = 0  # since the last step

    def ended(self) -> None:
        """A sequence has ended."""
        self._num_idle_steps = 0

    def preempted(self, sequences: list[SequenceState]) -> None:
        self._num_preempted += 1
        if self._num_preempted > 2 * len(sequences) + 2:
            raise StallError(f"one step preempts without end: {_who_waits(sequences)}")

    def check(
        self, running: list[SequenceState], waiting: list[SequenceState], has_work: bool
    ) -> None:
        """Call after planning a step; raises StallError after too many steps without progress."""
        self._num_preempted = 0
        self._num_idle_steps += has_work
        for sequence in running:
            if sequence.num_computed > sequence.max_computed:
                sequence.max_computed = sequence.num_computed
                self._num_idle_steps = 0
        everyone = [*running, *waiting]
        # without work, `score` may hold every slot or last tokens are in flight; both end
        can_run = any(s.num_pending == 0 for s in running)
        ready = any(s.num_pending == 0 for s in waiting)
        can_run = can_run or (ready and self._has_slot() and not running)
        if (can_run and not has_work) or any(s.num_left < 1 for s in running):
            what = "requests wait although nothing is in their way"
            raise StallError(f"{what}: {_who_waits(everyone)}")
        if self._num_idle_steps > 1 and self._num_idle_steps > self._most_idle_steps(everyone):
            what = f"{self._num_idle_steps} steps brought no request further"
            raise StallError(f"{what}: {_who_waits(everyone)}")

    def _most_idle_steps(self, sequences: list[SequenceState]) -> int:
        """Enough to compute every request twice: each step computes at least one block of one."""
        return 2 * sum(len(s.token_ids) // self._block + 2 for s in sequences)


def _who_waits(sequences: list[SequenceState]) -> str:
    parts = [
        f"{s.request.id!r} waits for {s.waits_for} ({s.num_computed} of {len(s.token_ids)} tokens "
        f"computed, preempted {s.num_preemptions} times)"
        for s in sequences[:MOST_NAMED]
    ]
    left = len(sequences) - MOST_NAMED
    return "; ".join(parts) + (f"; and {left} more" if left > 0 else "")
