"""Which sequences run, with how many new tokens. No tensors.

Every sequence gets a rank on arrival: its arrival step, where one priority level is worth
`PRIORITY_STEPS` steps of waiting. A later arrival can therefore overtake only for a while, and no
request starves. Lower ranks are admitted first. When pages run out, the highest rank is preempted:
its pages are freed and it is recomputed later.

A step holds one token of every decoding sequence. Prompts fill the rest of the step's token budget:
`chunk_tokens`, or, if step costs were measured, the most tokens that keep the gap between two
tokens of a stream within its bound. The budget is shared among prompts in whole 128-token blocks.

A step may be planned while the previous one runs. A sequence then counts the token in flight
(`num_pending`) before its value is known.
"""

import bisect
import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Some
from dataclasses import dataclass, replace

from dsv4.cache.geometry import (
    CARRIED_ROWS,
    GROWING_POOLS,
    PAGE_ENTRIES,
    SHARED_TOKENS,
    TOKENS_PER_ENTRY,
)
from dsv4.cache.pages import StatePages
from dsv4.cache.prefix import PrefixCache, Snapshot
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


class Scheduler:
    def __init__(
        self,
        pages: StatePages,
        chunk_tokens: int,
        prefix: PrefixCache | None = None,
        emit: Callable[[str, SequenceState], None] = lambda kind, sequence: None,
        budget: Callable[[int], int] | None = None,
        propose: Propose | None = None,
        lanes: int = 1,
    ) -> None:
        """`budget`: prompt tokens allowed in a step, by its number of decoding sequences.
        `propose`: drafts for sequences, given how many each can take. `lanes`: steps in flight
        together, among which decoding sequences are divided."""
        self._pages, self._lanes = pages, lanes
        self._propose = propose
        self._budget = budget
        self._chunk_tokens = chunk_tokens
        self._prefix = prefix
        self._emit = emit
        self._waiting: list[SequenceState] = []  # both lists are sorted by rank
        self._running: list[SequenceState] = []
        self._num_added = self._num_steps = 0
        self._stalls = StallDetector(pages, chunk_tokens)
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
        self._close(sequence)

    def next_step(self) -> list[ScheduledTokens]:
        self._num_steps += 1
        self._admit()
        while True:
            scheduled = self._plan()
            if self._fits(scheduled) or len(self._running) < 2:
                self._stalls.check(self._running, self._waiting, bool(scheduled))
                return [self._reserve(item) for item in self._with_drafts(scheduled)]
            self._preempt(self._running[-1])

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
        return drafted if self._fits(drafted) else scheduled

    def _reserve(self, item: ScheduledTokens) -> ScheduledTokens:
        """Reserve a row for the prefix that ends inside the step's tokens, unless it is cached."""
        if self._prefix is None or not item.keep_len:
            return item
        row = self._prefix.reserve(item.sequence.keys()[item.keep_len // SHARED_TOKENS - 1])
        return replace(item, keep_len=0) if row is None else replace(item, keep_row=row)

    def started(self, scheduled: list[ScheduledTokens]) -> None:
        """The step is in flight and its pages are still held: keep prefixes that end inside it."""
        for item in scheduled:
            item.sequence.last_served = self._num_steps
            if self._prefix is not None and item.keep_len:
                assert item.sequence.pages is not None
                key = item.sequence.keys()[item.keep_len // SHARED_TOKENS - 1]
                self._prefix.keep_inside(item.sequence.pages, key, item.keep_len, item.keep_row)
                item.keep_len = 0  # the prefix owns the row now

    def failed(self, scheduled: list[ScheduledTokens]) -> None:
        """The step failed to start."""
        for item in scheduled:
            if self._prefix is not None and item.keep_len:
                self._prefix.give_back(item.keep_row)

    def done(self, scheduled: list[ScheduledTokens], *, has_tokens: bool = False) -> None:
        """Keep the prefixes that end with this step; no later step may be submitted yet.
        `has_tokens`: the step's sampled tokens are already known."""
        for item in scheduled:
            if item.sequence.pages is None:
                continue  # ended or preempted meanwhile
            if self._prefix is not None and item.sequence.uses_prefix_cache:
                try:
                    self._keep(self._prefix, item.sequence, has_tokens=has_tokens)
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
            found = self._find(first)
            if first.num_pending:  # preempted while its token was being sampled; read that first
                first.waits_for = "its token in flight"
                place += 1
            elif self._prefix_in_flight(first, found):
                place += 1  # others may overtake; the wait ends with the other's prompt
            elif self._has_room(first, found):
                self._waiting.pop(place)
                self._open(first, found)
            elif self._running and first.rank < self._running[-1].rank:
                self._preempt(self._running[-1])
            else:
                first.waits_for = "pages" if self._pages.num_free_slots else "a slot"
                break  # no overtaking, or the first could starve
        self.admitting = None

    def _prefix_in_flight(self, sequence: SequenceState, found: Snapshot | None) -> bool:
        """Whether a running prompt is computing a long prefix of this one.

        That prompt is then told to snapshot it, and this one waits to reuse the snapshot.
        """
        if self._prefix is None or not sequence.uses_prefix_cache:
            return False
        keys = self._usable_keys(sequence)
        known = found.length if found is not None else 0
        for other in self._running:
            if not other.uses_prefix_cache or other.num_left <= 1:
                continue
            common = SHARED_TOKENS * _num_common(keys, self._usable_keys(other))
            if common >= known + WORTH_WAITING and other.num_computed < common:
                other.snapshot_lens |= {common}
                sequence.waits_for = f"the beginning that {other.request.id!r} computes"
                return True
        return False

    def _usable_keys(self, sequence: SequenceState) -> list[bytes]:
        """Keys of the blocks before the last known token, which is always recomputed for its
        logits."""
        return sequence.keys()[: (len(sequence.token_ids) - 1) // SHARED_TOKENS]

    def _find(self, sequence: SequenceState) -> Snapshot | None:
        if self._prefix is None or not sequence.uses_prefix_cache or not self._pages.num_free_slots:
            return None
        return self._prefix.find(self._usable_keys(sequence))

    def _has_room(self, sequence: SequenceState, found: Snapshot | None) -> bool:
        """Whether pages suffice for all known tokens of this and the running sequences, plus one
        page to grow, unless it ends first.

        A sequence that would run alone is always admitted: if it does not fit now, it never will.
        """
        if not self._running or not self._pages.num_free_slots:
            return self._pages.num_free_slots > 0
        geometry = self._pages.geometry
        for pool in GROWING_POOLS:
            allocator = self._pages.allocators[pool]
            grown = len(sequence.token_ids) + PAGE_ENTRIES[pool] * TOKENS_PER_ENTRY[pool]
            needed = len(geometry.pages_needed(pool, 0, min(grown, sequence.max_len)))
            if found is not None and self._prefix is not None:
                needed -= len(found.columns[pool])
                needed += self._prefix.num_fresh(found, pool)
            for other in self._running:
                known = geometry.pages_needed(pool, 0, len(other.token_ids))
                assert other.pages is not None
                needed += max(len(known) - len(other.pages.columns[pool]), 0)
            if needed > allocator.num_available:
                return False
        return True

    def _open(self, sequence: SequenceState, found: Snapshot | None) -> None:
        sequence.pages = self._pages.open()
        try:
            if self._prefix is not None and sequence.uses_prefix_cache:
                self._begin(self._prefix, sequence, found)
        except BaseException:
            self._close(sequence)
            _insert(self._waiting, sequence)
            raise
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        sequence.waits_for = "its turn"
        _insert(self._running, sequence)
        self._emit("began", sequence)

    def _begin(self, prefix: PrefixCache, sequence: SequenceState, found: Snapshot | None) -> None:
        assert sequence.pages is not None
        keys = self._usable_keys(sequence)
        if found is not None:
            prefix.begin(sequence.pages, found)
        if sequence.num_cached is None:
            prefix.num_asked += len(sequence.token_ids)
            prefix.num_hit += sequence.num_computed
        # worth a snapshot: the prompt's end, and where it diverges from earlier ones
        sequence.snapshot_lens = frozenset(
            (len(keys) * SHARED_TOKENS, prefix.seen_prefix_len(keys))
        )

    def _preempt(self, sequence: SequenceState) -> None:
        self._stalls.preempted(self.sequences())
        self._running.remove(sequence)
        self._close(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        _insert(self._waiting, sequence)
        self._emit("preempted", sequence)

    def _close(self, sequence: SequenceState) -> None:
        assert sequence.pages is not None
        self._pages.close(sequence.pages)
        sequence.pages = None

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
        counts = _split_budget(prompts, budget)
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

    def _fits(self, scheduled: list[ScheduledTokens]) -> bool:
        growing = []
        for item in scheduled:
            pages = item.sequence.pages
            assert pages is not None
            if pages.length + item.num_new > pages.full_at:
                growing.append((pages, item.num_new))
        for pool, allocator in self._pages.allocators.items():
            needed = sum(len(self._pages.missing(pages, pool, new)) for pages, new in growing)
            if needed > allocator.num_available:
                return False
        return True

    # --- snapshots ----------------------------------------------------------------------------

    def _keep(self, prefix: PrefixCache, sequence: SequenceState, *, has_tokens: bool) -> None:
        length = sequence.num_computed
        if length == 0 or length % SHARED_TOKENS:
            return
        assert sequence.pages is not None
        key = sequence.keys()[length // SHARED_TOKENS - 1]
        if length in sequence.snapshot_lens:
            prefix.keep(sequence.pages, key)
        elif length < len(sequence.token_ids) - has_tokens:
            prefix.keep(sequence.pages, key, only_if_free=True)
        elif prefix.keep(sequence.pages, key, instead_of=sequence.kept_key):
            sequence.kept_key = key


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
    share = max(budget // len(prompts) // SHARED_TOKENS * SHARED_TOKENS, SHARED_TOKENS)
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
