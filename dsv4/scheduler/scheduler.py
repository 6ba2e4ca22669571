"""Which sequences run, with how many new tokens. No tensors.

Every sequence gets a rank on arrival: its arrival step, where one priority level is worth
`PRIORITY_STEPS` steps of waiting. A later arrival can therefore overtake only for a while, and no
request starves. Lower ranks are admitted first. When pages run out, the highest rank is preempted:
its pages are freed and it is recomputed later. With several homes (`attention=dp`) a sequence runs
where it has fewest tokens to compute and few pages are in use; each home has a step's budget.

A step holds one token of every decoding sequence. Prompts fill the rest of the step's token budget:
`chunk_tokens`, or, if step costs were measured, the most tokens that keep the gap between two
tokens of a stream within its bound. The budget is shared among prompts in whole 128-token blocks.

A step may be planned while the previous one runs. A sequence then counts the token in flight
(`num_pending`) before its value is known. If that step verifies drafts, a sequence's length counts
all of them until it is known how many were right.
"""

import bisect
import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Some
from dataclasses import dataclass, replace

from dsv4.cache.geometry import CARRIED_ROWS, SHARED_TOKENS
from dsv4.cache.pages import SequencePages
from dsv4.cache.prefix import Snapshot
from dsv4.errors import NumericsError
from dsv4.scheduler.home import Home, check_finite, usable_keys
from dsv4.scheduler.sequence import SequenceState
from dsv4.scheduler.stalls import StallDetector

log = logging.getLogger(__name__)

PRIORITY_STEPS = 1000
WORTH_WAITING = 2 * SHARED_TOKENS  # tokens of a shared prefix that another request is computing


Propose = Callable[[Some[tuple[SequenceState, int]]], list[list[int]]]


@dataclass(slots=True)
class ScheduledTokens:
    """One sequence's share of a step."""

    sequence: SequenceState
    num_new: int
    samples: bool  # the step computes the sequence's last known token
    keep_len: int = 0  # a boundary inside the new tokens to snapshot
    keep_row: int = -1  # where it is kept
    drafts: tuple[int, ...] = ()  # after its newest token, counted in `num_new`
    num_unsure: int = 0  # drafts before it that may still be rejected; see `follow`


class Scheduler:
    def __init__(
        self,
        homes: Some[Home],
        chunk_tokens: int,
        emit: Callable[[str, SequenceState], None] = lambda kind, sequence: None,
        budget: Callable[[int], int] | None = None,
        propose: Propose | None = None,
        lanes: int = 1,
    ) -> None:
        """`chunk_tokens`: prompt tokens of a step, at each home.
        `budget`: prompt tokens allowed in a step, by its number of decoding sequences.
        `propose`: drafts for sequences, given how many each can take. `lanes`: steps in flight
        together, among which decoding sequences are divided."""
        self._homes, self._lanes = list(homes), lanes
        self._propose, self._budget = propose, budget
        self._chunk_tokens = chunk_tokens
        self._emit = emit
        self._waiting: list[SequenceState] = []  # both lists are sorted by rank
        self._running: list[SequenceState] = []
        self._num_added = self._num_steps = 0
        self._stalls = StallDetector(self._has_slot, chunk_tokens)
        self.num_preemptions = 0
        self.admitting: SequenceState | None = None  # being admitted; stays set if that fails

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def sequences(self) -> list[SequenceState]:
        return [*self._running, *self._waiting]

    def rank(self, sequence: SequenceState) -> None:
        """Assign a sequence its rank; it may be added later."""
        self._num_added += 1
        virtual = self._num_steps - PRIORITY_STEPS * sequence.request.priority
        sequence.rank = (virtual, self._num_added)

    def add(self, sequence: SequenceState) -> None:
        if sequence.rank == (0, 0):
            self.rank(sequence)
        _insert(self._waiting, sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Finished or aborted: free its pages and slot."""
        self._stalls.ended()
        if sequence.pages is None:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        self._home(sequence).close(sequence)

    def check_finite(self, sequence: SequenceState, logprob: float) -> NumericsError | None:
        return check_finite(self._homes, sequence, logprob)

    def next_step(self) -> list[ScheduledTokens]:
        self._num_steps += 1
        self._admit()
        scheduled = self._plan()
        while (home := self._too_full(scheduled)) is not None:
            here = self._running_at(home)
            if len(here) < 2:  # the step will fail, so it is that sequence's alone
                scheduled = [item for item in scheduled if item.sequence is here[0]]
                break
            self._preempt(here[-1])
            scheduled = self._plan()
        self._stalls.check(self._running, self._waiting, bool(scheduled))
        return [self._reserve(item) for item in self._with_drafts(scheduled)]

    def follow(self, before: list[ScheduledTokens], drafts: Some[int]) -> list[ScheduledTokens]:
        """The step after one that verifies drafts, planned before that is read; `drafts` stand for
        those of each sequence on the device. Empty if there is other work, or if a sequence may end
        in that step."""
        if self._waiting or {item.sequence for item in before} != set(self._running):
            return []
        found = []
        for item in before:
            sequence = item.sequence
            room = sequence.max_len - sequence.num_computed - 2
            if room < 0:
                return []
            own = tuple(drafts[:room]) if sequence.may_draft else ()
            found.append(
                ScheduledTokens(sequence, 1 + len(own), True, 0, -1, own, item.num_new - 1)
            )
        if not any(item.drafts for item in found) or self._too_full(found) is not None:
            return []
        self._num_steps += 1
        return found

    def _home(self, sequence: SequenceState) -> Home:
        """Where a running sequence has its state."""
        return self._homes[_pages(sequence).home]

    def _running_at(self, home: Home) -> list[SequenceState]:
        return [sequence for sequence in self._running if self._home(sequence) is home]

    def _with_drafts(self, scheduled: list[ScheduledTokens]) -> list[ScheduledTokens]:
        """Add drafts to a step in which every sequence decodes, if there are pages for them."""
        decodes = (s.num_new == 1 and s.samples and not s.sequence.num_pending for s in scheduled)
        if self._propose is None or not scheduled or not all(decodes):
            return scheduled
        wanted = [(item.sequence, item.sequence.draft_room) for item in scheduled]
        drafted = [
            replace(item, num_new=1 + len(drafts), drafts=tuple(drafts))
            for item, drafts in zip(scheduled, self._propose(wanted), strict=True)
        ]
        return drafted if self._too_full(drafted) is None else scheduled

    def _reserve(self, item: ScheduledTokens) -> ScheduledTokens:
        """Reserve a row for the prefix that ends inside the step's tokens, unless it is cached."""
        prefix = self._home(item.sequence).prefix
        if prefix is None or not item.keep_len:
            return item
        row = prefix.reserve(item.sequence.keys()[item.keep_len // SHARED_TOKENS - 1])
        return replace(item, keep_len=0) if row is None else replace(item, keep_row=row)

    def started(self, scheduled: list[ScheduledTokens]) -> None:
        """The step is in flight and its pages are still held: keep prefixes that end inside it."""
        for item in scheduled:
            item.sequence.last_served = self._num_steps
            prefix = self._home(item.sequence).prefix
            if prefix is not None and item.keep_len:
                key = item.sequence.keys()[item.keep_len // SHARED_TOKENS - 1]
                prefix.keep_inside(_pages(item.sequence), key, item.keep_len, item.keep_row)
                item.keep_len = 0  # the prefix owns the row now

    def failed(self, scheduled: list[ScheduledTokens]) -> None:
        """The step failed to start."""
        for item in scheduled:
            prefix = self._home(item.sequence).prefix
            if prefix is not None and item.keep_len:
                prefix.give_back(item.keep_row)

    def done(
        self,
        scheduled: list[ScheduledTokens],
        ahead: Some[ScheduledTokens] = (),
        *,
        has_tokens: bool = False,
    ) -> None:
        """Keep the prefixes that end with this step. No later step may be submitted yet, except one
        that followed it (`ahead`). `has_tokens`: the step's sampled tokens are already known."""
        beyond = {item.sequence: item.num_new for item in ahead}
        for sequence in [item.sequence for item in scheduled]:
            if sequence.pages is None:
                continue  # ended or preempted meanwhile
            length = sequence.num_computed - beyond.get(sequence, 0)
            try:
                self._home(sequence).keep(sequence, length, has_tokens=has_tokens)
            except Exception as error:  # the answer continues; only its prefix is not cached
                log.error("a prefix could not be kept: %s", error)

    def preempt(self, sequence: SequenceState) -> None:
        """Free its state and queue it for recomputation."""
        if sequence.pages is not None:
            self._preempt(sequence)

    # --- admission ----------------------------------------------------------------------------

    def _admit(self) -> None:
        place = 0
        while place < len(self._waiting):
            first = self.admitting = self._waiting[place]
            home, found = self._choose(first)
            if first.num_pending:  # preempted while its token was being sampled; read that first
                first.waits_for = "its token in flight"
                place += 1
            elif self._prefix_in_flight(first, found):
                place += 1  # others may overtake; the wait ends with the other's prompt
            elif home is not None:
                self._waiting.pop(place)
                self._open(first, home, found)
            elif (last := self._less_urgent(first)) is not None:
                self._preempt(last)
            else:
                first.waits_for = "pages" if self._has_slot() else "a slot"
                break  # no overtaking, or the first could starve
        self.admitting = None

    def _choose(self, sequence: SequenceState) -> tuple[Home | None, Snapshot | None]:
        """The home that costs a sequence least, and the cached prefix it can start from there. No
        home: none has room; then the longest prefix of any."""
        found = [(home, home.find(sequence), self._running_at(home)) for home in self._homes]
        able = [each for each in found if each[0].has_room(sequence, *each[1:])]
        if able:
            home, prefix, _ = min(able, key=lambda each: each[0].cost(sequence, *each[1:]))
            return home, prefix
        known = [prefix for _, prefix, _ in found if prefix is not None]
        return None, max(known, key=lambda prefix: prefix.length, default=None)

    def _less_urgent(self, sequence: SequenceState) -> SequenceState | None:
        """Who is preempted for a waiting sequence: the last of all, at a home where that helps."""
        found: list[SequenceState] = []
        for home in self._homes:
            here = self._running_at(home)
            later = [other for other in here if sequence.rank < other.rank]
            if later and (len(self._homes) == 1 or home.could_hold(sequence, here, later)):
                found.append(later[-1])
        return max(found, key=lambda other: other.rank, default=None)

    def _has_slot(self) -> bool:
        return any(home.has_slot for home in self._homes)

    def _prefix_in_flight(self, sequence: SequenceState, found: Snapshot | None) -> bool:
        """Whether a running prompt is computing a long prefix of this one.

        That prompt is then told to snapshot it, and this one waits to reuse the snapshot.
        """
        if not sequence.uses_prefix_cache:
            return False
        keys = usable_keys(sequence)
        known = found.length if found is not None else 0
        for other in self._running:
            if not other.uses_prefix_cache or other.num_left <= 1:
                continue
            home = self._home(other)
            if home.prefix is None or (not home.has_slot and self._has_slot()):
                continue
            common = SHARED_TOKENS * _num_common(keys, usable_keys(other))
            if common >= known + WORTH_WAITING and other.num_computed < common:
                other.snapshot_lens |= {common}
                sequence.waits_for = f"the beginning that {other.request.id!r} computes"
                return True
        return False

    def _open(self, sequence: SequenceState, home: Home, found: Snapshot | None) -> None:
        try:
            home.open(sequence, found)
        except BaseException:
            _insert(self._waiting, sequence)
            raise
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        sequence.waits_for = "its turn"
        _insert(self._running, sequence)
        self._emit("began", sequence)

    def _preempt(self, sequence: SequenceState) -> None:
        self._stalls.preempted(self.sequences())
        self._running.remove(sequence)
        self._home(sequence).close(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        _insert(self._waiting, sequence)
        self._emit("preempted", sequence)

    # --- token budget -------------------------------------------------------------------------

    def _plan(self) -> list[ScheduledTokens]:
        prompts = [sequence for sequence in self._running if sequence.num_left > 1]
        decoding = [sequence for sequence in self._running if sequence.num_left <= 1]
        most = -(-len(decoding) // self._lanes)
        ready = [s for s in decoding if not s.num_pending or self._may_run_ahead(s)]
        scheduled = [ScheduledTokens(sequence, 1, samples=True) for sequence in ready[:most]]
        if not prompts:
            return scheduled
        prompts.sort(key=lambda s: (s.last_served, s.rank))
        budget = self._chunk_tokens
        if self._budget is not None:
            budget = min(budget, self._budget(len(scheduled)))
        counts: dict[SequenceState, int] = {}
        for home in self._homes:
            counts |= _split_budget([s for s in prompts if self._home(s) is home], budget)
        for sequence in prompts:
            count = counts[sequence]
            if count:
                samples, inside = count == sequence.num_left, _snapshots_inside(sequence, count)
                scheduled.append(
                    ScheduledTokens(sequence, count, samples, inside[0] if inside else 0)
                )
        return scheduled

    def _may_run_ahead(self, sequence: SequenceState) -> bool:
        """Whether its next token may be computed before the one in flight is known."""
        return self._lanes == 1 and not sequence.is_last_pending

    def _too_full(self, scheduled: list[ScheduledTokens]) -> Home | None:
        """A home that has too few pages for its part of a step."""
        for home in self._homes:
            mine = [item for item in scheduled if self._home(item.sequence) is home]
            if not home.fits([(_pages(item.sequence), item.num_new) for item in mine]):
                return home
        return None


def _pages(sequence: SequenceState) -> SequencePages:
    assert sequence.pages is not None
    return sequence.pages


def _insert(sequences: list[SequenceState], sequence: SequenceState) -> None:
    bisect.insort(sequences, sequence, key=lambda s: s.rank)


def _num_common(a: list[bytes], b: list[bytes]) -> int:
    """Number of equal leading keys; keys are cumulative, so one equal key implies all before."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[middle - 1] == b[middle - 1] else (low, middle - 1)
    return low


def _split_budget(prompts: list[SequenceState], budget: int) -> dict[SequenceState, int]:
    """Step tokens per prompt: equal shares first, then the remainder."""
    counts = dict.fromkeys(prompts, 0)
    share = max(budget // max(len(prompts), 1) // SHARED_TOKENS * SHARED_TOKENS, SHARED_TOKENS)
    for room, sequence in itertools.product((share, budget), prompts):
        count = _chunk_len(sequence, min(room, counts[sequence] + budget))
        if count > counts[sequence]:
            budget -= count - counts[sequence]
            counts[sequence] = count
    return counts


def _snapshots_inside(sequence: SequenceState, count: int) -> list[int]:
    """Snapshot lengths strictly inside the next `count` tokens."""
    start = sequence.num_computed
    return sorted(n for n in sequence.snapshot_lens if start < n < start + count)


def _chunk_len(sequence: SequenceState, room: int) -> int:
    """How many of `room` tokens to compute next: up to a snapshot length, or whole blocks.
    One snapshot may lie inside if the step also computes the rows that its prefix carries."""
    start = sequence.num_computed
    count = min(sequence.num_left, room)
    inside = _snapshots_inside(sequence, count)
    if inside and inside[0] - start < CARRIED_ROWS:
        return inside[0] - start
    if len(inside) > 1:
        return inside[1] - start
    end = start + count
    if count < sequence.num_left and end not in sequence.snapshot_lens:
        whole = end // SHARED_TOKENS * SHARED_TOKENS
        if whole > start:
            return whole - start
    return count
