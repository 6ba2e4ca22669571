"""Which sequences run, with how many new tokens. No tensors.

Every sequence has a rank, given once when it arrives: its place in time, where one level of
priority is worth `PRIORITY_STEPS` steps of waiting. So a later arrival can overtake only for a
while, and nobody starves. Lower ranks are admitted first; when pages run out the highest rank
gives its pages back and waits, to be computed again.

A step holds one token of every sequence that is past its prompt, so that no prompt stalls a
stream for longer than one chunk. The chunk's tokens go to the prompts in turn, in shares of whole
128-token blocks. All of it depends on the order of arrivals alone.
"""

import bisect
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from dsv4.cache.geometry import GROWING_POOLS, SHARED_TOKENS
from dsv4.cache.pages import StatePages
from dsv4.cache.prefix import PrefixCache, Snapshot
from dsv4.scheduler.sequence import Sequence

log = logging.getLogger(__name__)

PRIORITY_STEPS = 1000
WORTH_WAITING = 2 * SHARED_TOKENS  # of a common beginning that another is just computing


@dataclass(frozen=True)
class Work:
    """One sequence's share of a step."""

    sequence: Sequence
    num_new: int
    samples: bool  # the step reaches the sequence's last known token


class Scheduler:
    def __init__(
        self,
        pages: StatePages,
        chunk_tokens: int,
        prefix: PrefixCache | None = None,
        tell: Callable[[str, Sequence], None] = lambda kind, sequence: None,
    ) -> None:
        self._pages = pages
        self._chunk_tokens = chunk_tokens
        self._prefix = prefix
        self._tell = tell
        self._waiting: list[Sequence] = []  # both lists by rank
        self._running: list[Sequence] = []
        self._num_added = self._num_steps = 0
        self.num_preemptions = 0
        self.beginning: Sequence | None = None  # being admitted; stays set if that fails

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def sequences(self) -> list[Sequence]:
        return [*self._running, *self._waiting]

    def rank(self, sequence: Sequence) -> None:
        """Give a sequence its place in the order; it may be added later."""
        self._num_added += 1
        virtual = self._num_steps - PRIORITY_STEPS * sequence.request.priority
        sequence.rank = (virtual, self._num_added)

    def add(self, sequence: Sequence) -> None:
        if sequence.rank == (0, 0):
            self.rank(sequence)
        _insert(self._waiting, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Finished or aborted: its pages and slot are free again."""
        if sequence.pages is None:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        self._close(sequence)

    def next_step(self) -> list[Work]:
        self._num_steps += 1
        self._admit()
        while True:
            work = self._plan()
            if self._fits(work) or len(self._running) < 2:
                return work
            self._preempt(self._running[-1])

    def done(self, work: list[Work]) -> None:
        """The step has been computed: remember who was served, keep prefixes worth it."""
        for item in work:
            item.sequence.last_served = self._num_steps
            if self._prefix is not None and item.sequence.shares:
                try:
                    self._keep(self._prefix, item.sequence)
                except Exception as error:  # the answer goes on; only its prefix is not kept
                    log.error("a prefix could not be kept: %s", error)

    # --- who runs -----------------------------------------------------------------------------

    def _admit(self) -> None:
        place = 0
        while place < len(self._waiting):
            first = self.beginning = self._waiting[place]
            found = self._find(first)
            if self._is_coming(first, found):
                place += 1  # others may go before; the wait ends with the other's prompt
            elif self._has_room(first, found):
                self._waiting.pop(place)
                self._open(first, found)
            elif self._running and first.rank < self._running[-1].rank:
                self._preempt(self._running[-1])
            else:
                break  # nobody overtakes the first: it could wait for ever
        self.beginning = None

    def _is_coming(self, sequence: Sequence, found: Snapshot | None) -> bool:
        """Whether a running prompt is about to compute much of this one's beginning.

        Then it is asked to keep it, and this one waits instead of computing the same.
        """
        if self._prefix is None or not sequence.shares:
            return False
        keys = self._usable_keys(sequence)
        known = found.length if found is not None else 0
        for other in self._running:
            if not other.shares or other.num_left <= 1:
                continue
            common = SHARED_TOKENS * _num_common(keys, self._usable_keys(other))
            if common >= known + WORTH_WAITING and other.num_computed < common:
                other.cuts |= {common}
                return True
        return False

    def _usable_keys(self, sequence: Sequence) -> list[bytes]:
        """Of the blocks before the last known token, which is always computed: its logits are
        wanted."""
        return sequence.keys()[: (len(sequence.token_ids) - 1) // SHARED_TOKENS]

    def _find(self, sequence: Sequence) -> Snapshot | None:
        if self._prefix is None or not sequence.shares or not self._pages.num_free_slots:
            return None
        return self._prefix.find(self._usable_keys(sequence))

    def _has_room(self, sequence: Sequence, found: Snapshot | None) -> bool:
        """Pages for all tokens known of the running ones and of this one, and one to grow.

        Alone it may always try: if it does not fit then, it never will.
        """
        if not self._running or not self._pages.num_free_slots:
            return self._pages.num_free_slots > 0
        geometry = self._pages.geometry
        for pool in GROWING_POOLS:
            allocator = self._pages.allocators[pool]
            needed = len(geometry.pages_needed(pool, 0, len(sequence.token_ids))) + 1
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

    def _open(self, sequence: Sequence, found: Snapshot | None) -> None:
        sequence.pages = self._pages.open()
        try:
            if self._prefix is not None and sequence.shares:
                self._begin(self._prefix, sequence, found)
        except BaseException:
            self._close(sequence)
            _insert(self._waiting, sequence)
            raise
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        _insert(self._running, sequence)
        self._tell("began", sequence)

    def _begin(self, prefix: PrefixCache, sequence: Sequence, found: Snapshot | None) -> None:
        assert sequence.pages is not None
        keys = self._usable_keys(sequence)
        if found is not None:
            prefix.begin(sequence.pages, found)
        if sequence.num_cached is None:
            prefix.num_asked += len(sequence.token_ids)
            prefix.num_hit += sequence.num_computed
        # worth keeping: the end of the prompt, and where it parts from earlier ones
        sequence.cuts = frozenset((len(keys) * SHARED_TOKENS, prefix.parting(keys)))

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._close(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        _insert(self._waiting, sequence)
        self._tell("preempted", sequence)

    def _close(self, sequence: Sequence) -> None:
        assert sequence.pages is not None
        self._pages.close(sequence.pages)
        sequence.pages = None

    # --- with how many tokens -----------------------------------------------------------------

    def _plan(self) -> list[Work]:
        work = [Work(s, 1, samples=True) for s in self._running if s.num_left == 1]
        prompts = [s for s in self._running if s.num_left > 1]
        prompts.sort(key=lambda s: (s.last_served, s.rank))
        counts = self._share_out(prompts)
        for sequence in prompts:
            count = counts[sequence]
            if count:
                work.append(Work(sequence, count, samples=count == sequence.num_left))
        return work

    def _share_out(self, prompts: list[Sequence]) -> dict[Sequence, int]:
        """Tokens of the chunk for each prompt: equal shares first, then what is left over."""
        counts = dict.fromkeys(prompts, 0)
        budget = self._chunk_tokens
        if not prompts:
            return counts
        share = budget // len(prompts) // SHARED_TOKENS * SHARED_TOKENS
        for room, sequence in itertools.product((max(share, SHARED_TOKENS), budget), prompts):
            more = _cut(sequence, counts[sequence], min(room, budget))
            counts[sequence] += more
            budget -= more
        return counts

    def _fits(self, work: list[Work]) -> bool:
        for pool, allocator in self._pages.allocators.items():
            needed = 0
            for item in work:
                assert item.sequence.pages is not None
                needed += len(self._pages.missing(item.sequence.pages, pool, item.num_new))
            if needed > allocator.num_available:
                return False
        return True

    # --- what is kept -------------------------------------------------------------------------

    def _keep(self, prefix: PrefixCache, sequence: Sequence) -> None:
        length = sequence.num_computed
        if length == 0 or length % SHARED_TOKENS:
            return
        assert sequence.pages is not None
        key = sequence.keys()[length // SHARED_TOKENS - 1]
        if length in sequence.cuts:
            prefix.keep(sequence.pages, key)
        elif length < len(sequence.token_ids):
            prefix.keep(sequence.pages, key, only_if_free=True)
        elif prefix.keep(sequence.pages, key, instead_of=sequence.kept_key):
            sequence.kept_key = key


def _insert(sequences: list[Sequence], sequence: Sequence) -> None:
    bisect.insort(sequences, sequence, key=lambda s: s.rank)


def _num_common(a: list[bytes], b: list[bytes]) -> int:
    """Equal keys at the beginning; where one is equal, all before it are."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[middle - 1] == b[middle - 1] else (low, middle - 1)
    return low


def _cut(sequence: Sequence, planned: int, room: int) -> int:
    """How many of `room` tokens to add to those planned: up to the next cut, or whole blocks."""
    start = sequence.num_computed + planned
    if planned and start in sequence.cuts:
        return 0
    left = sequence.num_left - planned
    count = min(left, room)
    for cut in sequence.cuts:
        if start < cut < start + count:
            count = cut - start
    end = start + count
    if count < left and end not in sequence.cuts:
        whole = end // SHARED_TOKENS * SHARED_TOKENS
        if whole > start or planned:
            count = max(whole - start, 0)
    return count
