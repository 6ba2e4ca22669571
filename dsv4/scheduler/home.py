"""A home: where sequences have their state, and the prefixes cached beside it. No tensors.

An engine has one home, unless its ranks share layers with data-parallel attention: then every rank
of a tensor group is one, with pages, slots and cached prefixes of its own.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from dsv4.cache.geometry import (
    GROWING_POOLS,
    PAGE_ENTRIES,
    POOLS,
    SHARED_TOKENS,
    TOKENS_PER_ENTRY,
)
from dsv4.cache.pages import SequencePages, StatePages
from dsv4.cache.prefix import PrefixCache, Snapshot, StateCopier, Store
from dsv4.errors import NumericsError
from dsv4.scheduler.sequence import SequenceState

PAGE_COST = 64  # prompt tokens that a sequence would rather compute than join one more page in use


@dataclass(frozen=True, eq=False)
class Home:
    pages: StatePages
    prefix: PrefixCache | None = None

    @property
    def has_slot(self) -> bool:
        return self.pages.num_free_slots > 0

    def find(self, sequence: SequenceState) -> Snapshot | None:
        """The longest cached prefix that the sequence can start from."""
        if self.prefix is None or not sequence.uses_prefix_cache or not self.has_slot:
            return None
        return self.prefix.find(usable_keys(sequence))

    def has_room(
        self,
        sequence: SequenceState,
        found: Snapshot | None,
        running: Sequence[SequenceState],
    ) -> bool:
        """Whether pages suffice for all known tokens of this and the `running` sequences here, plus
        one page to grow, unless it ends first.

        A sequence that would run alone is always admitted: if it does not fit now, it never will.
        """
        if not running or not self.has_slot:
            return self.has_slot
        geometry = self.pages.geometry
        for pool in GROWING_POOLS:
            grown = len(sequence.token_ids) + PAGE_ENTRIES[pool] * TOKENS_PER_ENTRY[pool]
            needed = len(geometry.pages_needed(pool, 0, min(grown, sequence.max_len)))
            if found is not None and self.prefix is not None:
                needed -= len(found.columns[pool])
                needed += self.prefix.num_fresh(found, pool)
            for other in running:
                known = geometry.pages_needed(pool, 0, len(other.token_ids))
                assert other.pages is not None
                needed += max(len(known) - len(other.pages.columns[pool]), 0)
            if needed > self.pages.allocators[pool].num_available:
                return False
        return True

    def could_hold(
        self,
        sequence: SequenceState,
        running: Sequence[SequenceState],
        later: Sequence[SequenceState],
    ) -> bool:
        """Whether there would be pages for a sequence without the `later` ones of `running`."""
        geometry = self.pages.geometry
        staying = [other for other in running if other not in later]
        for pool in GROWING_POOLS:
            lengths = (len(other.token_ids) for other in (sequence, *staying))
            needed = sum(len(geometry.pages_needed(pool, 0, length)) for length in lengths)
            if needed > self.pages.allocators[pool].num_pages:
                return False
        return True

    def cost(
        self,
        sequence: SequenceState,
        found: Snapshot | None,
        running: Sequence[SequenceState],
    ) -> int:
        """What speaks against this home, in prompt tokens: those to compute, and the pages of the
        sequences that run here."""
        geometry, in_use = self.pages.geometry, 0
        for other in running:
            assert other.pages is not None
            length = len(other.token_ids)
            in_use += len(geometry.pages_needed("window", other.num_computed, length))
            in_use += sum(len(geometry.pages_needed(pool, 0, length)) for pool in GROWING_POOLS)
        left = len(sequence.token_ids) - (0 if found is None else found.length)
        return left + PAGE_COST * in_use

    def open(self, sequence: SequenceState, found: Snapshot | None) -> None:
        """Give a sequence its slot, and the state of the prefix `found`."""
        sequence.pages = self.pages.open()
        try:
            if self.prefix is not None and sequence.uses_prefix_cache:
                self._begin(self.prefix, sequence, found)
        except BaseException:
            self.close(sequence)
            raise

    def _begin(self, prefix: PrefixCache, sequence: SequenceState, found: Snapshot | None) -> None:
        assert sequence.pages is not None
        keys = usable_keys(sequence)
        if found is not None:
            prefix.begin(sequence.pages, found)
        if sequence.num_cached is None:
            prefix.num_asked += len(sequence.token_ids)
            prefix.num_hit += sequence.num_computed
        # worth a snapshot: the prompt's end, and where it diverges from earlier ones
        sequence.snapshot_lens = frozenset(
            (len(keys) * SHARED_TOKENS, prefix.seen_prefix_len(keys))
        )

    def close(self, sequence: SequenceState) -> None:
        assert sequence.pages is not None
        self.pages.close(sequence.pages)
        sequence.pages = None

    def fits(self, growing: Sequence[tuple[SequencePages, int]]) -> bool:
        """Whether pages suffice for these sequences to grow by so many tokens."""
        growing = [pair for pair in growing if pair[0].length + pair[1] > pair[0].full_at]
        for pool in POOLS:
            needed = sum(len(self.pages.missing(pages, pool, new)) for pages, new in growing)
            if needed > self.pages.allocators[pool].num_available:
                return False
        return True

    def keep(self, sequence: SequenceState, length: int, *, has_tokens: bool) -> None:
        """Keep the prefix of this length that the sequence has reached, if it ends on a
        boundary."""
        if self.prefix is None or not sequence.uses_prefix_cache:
            return
        if length == 0 or length % SHARED_TOKENS:
            return
        assert sequence.pages is not None
        key = sequence.keys()[length // SHARED_TOKENS - 1]
        if length in sequence.snapshot_lens:
            self.prefix.keep(sequence.pages, key, length)
        elif length < len(sequence.token_ids) - has_tokens:
            self.prefix.keep(sequence.pages, key, length, only_if_free=True)
        elif self.prefix.keep(sequence.pages, key, length, instead_of=sequence.kept_key):
            sequence.kept_key = key


def open_homes(
    pages: Sequence[StatePages], copiers: Sequence[StateCopier], store: Store | None
) -> list[Home]:
    """One home for each of `pages`, with a cache for the prefixes that its geometry keeps."""
    num_snapshots = pages[0].geometry.kept_prefixes * pages[0].num_free_slots
    if not num_snapshots:
        return [Home(each) for each in pages]
    seen: OrderedDict[bytes, None] = OrderedDict()
    return [
        Home(each, PrefixCache(each, copier, num_snapshots, store, seen))
        for each, copier in zip(pages, copiers, strict=True)
    ]


def check_finite(
    homes: Sequence[Home], sequence: SequenceState, logprob: float
) -> NumericsError | None:
    """Why a token does not count: its log-probability is no number. The state behind it has NaN, so
    all prefixes that the sequence added or started from are dropped."""
    if math.isfinite(logprob):
        return None
    for home in homes:
        if home.prefix is not None:
            home.prefix.discard(sequence.keys())
    return NumericsError()


def usable_keys(sequence: SequenceState) -> list[bytes]:
    """Keys of the blocks before the last known token, which is always recomputed for its logits."""
    return sequence.keys()[: (len(sequence.token_ids) - 1) // SHARED_TOKENS]
