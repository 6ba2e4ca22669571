"""The prefix cache: snapshots of a sequence's state at 128-token boundaries, reused by others.

At a boundary B every layer kind can restore exactly B tokens: entry and window pages are full, the
newest hca page is never rewritten below B, and the compressors carry four rows. A *snapshot* holds
all of this, so a sequence that starts from one has exactly the state it would have computed. Keys
are digests over the salt and all tokens up to B.

Pages are shared, not copied. Only the newest hca page may be partly filled; a new holder gets a
copy, because it appends its own entries after the shared ones.
"""

import hashlib
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dsv4.cache.geometry import (
    MOST_DRAFT_ROWS,
    PAGE_ENTRIES,
    POOLS,
    SHARED_TOKENS,
    TOKENS_PER_ENTRY,
    Pool,
)
from dsv4.cache.pages import Columns, SequencePages, StatePages

log = logging.getLogger(__name__)

MAX_SEEN = 65536  # prompt prefixes remembered by key, to find where prompts diverge


class StateCopier(Protocol):
    """The tensor copies that the cache needs (`StateTensors`)."""

    def copy_page(self, pool: Pool, source: int, target: int) -> None: ...
    def save_rows(self, slot: int, row: int) -> None: ...
    def restore_rows(self, row: int, slot: int) -> None: ...
    def read(self, pages: dict[Pool, list[int]], row: int) -> dict[str, Any]: ...
    def write(self, tensors: dict[str, Any], pages: dict[Pool, list[int]], row: int) -> None: ...


class Store(Protocol):
    """Storage for cold prefixes (`DiskStore`)."""

    def __contains__(self, key: bytes) -> bool: ...
    def save(self, key: bytes, length: int, tensors: dict[str, Any]) -> None: ...
    def load(self, key: bytes, length: int, counts: dict[Pool, int]) -> dict[str, Any] | None: ...
    def forget(self, key: bytes) -> None: ...


def block_keys(token_ids: Sequence[int], salt: str, known: Sequence[bytes] = ()) -> list[bytes]:
    """One key per whole block of 128 tokens; `known`: keys already computed for the first ones."""
    keys = list(known)
    last = keys[-1] if keys else hashlib.blake2b(salt.encode(), digest_size=16).digest()
    for start in range(
        len(keys) * SHARED_TOKENS, len(token_ids) - SHARED_TOKENS + 1, SHARED_TOKENS
    ):
        block = array("q", token_ids[start : start + SHARED_TOKENS])
        last = hashlib.blake2b(last + block.tobytes(), digest_size=16).digest()
        keys.append(last)
    return keys


@dataclass(eq=False)
class Snapshot:
    """The state after `length` tokens."""

    key: bytes
    length: int
    columns: dict[Pool, Columns]
    row: int
    on_purpose: bool  # requested, rather than kept because there was room
    num_hits: int = 0

    @property
    def worth_storing(self) -> bool:
        return self.on_purpose or self.num_hits > 0


class PrefixCache:
    def __init__(
        self,
        pages: StatePages,
        copier: StateCopier,
        num_snapshots: int,
        store: Store | None = None,
        seen: "OrderedDict[bytes, None] | None" = None,
    ) -> None:
        """`seen`: shared by the caches of several homes, for `seen_prefix_len`."""
        self._pages = pages
        self._copier = copier
        self._store = store
        self._free_rows = list(range(num_snapshots - 1, -1, -1))
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()  # least recently used first
        self._seen: OrderedDict[bytes, None] = OrderedDict() if seen is None else seen
        self.num_asked = self.num_hit = self.num_evicted = 0
        pages.reclaim = self._reclaim

    def __len__(self) -> int:
        return len(self._snapshots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._snapshots

    def keys(self) -> list[bytes]:
        """Keys of the snapshots in memory, least recently used first."""
        return list(self._snapshots)

    # --- lookup -------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> Snapshot | None:
        """The longest cached prefix, from memory or from the store."""
        for place in range(len(keys) - 1, -1, -1):
            key = keys[place]
            found = self._snapshots.get(key)
            if found is None and self._store is not None and key in self._store:
                found = self._load(key, (place + 1) * SHARED_TOKENS)
            if found is not None:
                self._snapshots.move_to_end(key)
                return found
        return None

    def num_fresh(self, snapshot: Snapshot, pool: Pool) -> int:
        """Available pages that starting from a snapshot would use up."""
        allocator, columns = self._pages.allocators[pool], snapshot.columns[pool]
        copies = pool == "hca" and _partial_column(snapshot) in columns
        return sum(map(allocator.is_idle, columns.values())) + copies

    def begin(self, sequence: SequencePages, snapshot: Snapshot) -> None:
        """Start a fresh sequence from a snapshot."""
        assert sequence.length == 0
        partial = _partial_column(snapshot)
        for pool in POOLS:
            self._pages.share(sequence, pool, snapshot.columns[pool])
        self._copier.restore_rows(snapshot.row, sequence.slot)
        if partial in snapshot.columns["hca"]:
            # may evict the snapshot itself; its pages and row are ours by now
            [copy] = self._pages.take("hca", 1)
            source = sequence.columns["hca"][partial]
            sequence.columns["hca"][partial] = copy
            try:
                self._copier.copy_page("hca", source, copy)
            finally:
                self._pages.allocators["hca"].release([source])
        sequence.length = snapshot.length
        snapshot.num_hits += 1

    def seen_prefix_len(self, keys: Sequence[bytes]) -> int:
        """Tokens this prompt shares with an earlier one; also remembers this prompt."""
        common = 0
        while common < len(keys) and keys[common] in self._seen:
            common += 1
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return common * SHARED_TOKENS

    # --- snapshots ----------------------------------------------------------------------------

    def keep(
        self,
        sequence: SequencePages,
        key: bytes,
        length: int,
        *,
        only_if_free: bool = False,
        instead_of: bytes | None = None,
    ) -> bool:
        """Snapshot a sequence that has reached a boundary, or is at most one verify step past it:
        so few rows overwrite none that the boundary needs.

        `only_if_free`: evict no other snapshot. `instead_of`: an older snapshot of the same
        sequence, replaced unless it was used.
        """
        assert length % SHARED_TOKENS == 0
        assert length <= sequence.length <= length + MOST_DRAFT_ROWS
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            return False
        older = self._snapshots.get(instead_of) if instead_of is not None else None
        if older is not None and older.num_hits == 0:
            self._drop(older)
        if only_if_free and not self._free_rows:
            return False
        row = self._take_row()
        try:
            self._copier.save_rows(sequence.slot, row)
        except BaseException:
            self._free_rows.append(row)
            raise
        self._add(sequence, key, length, row, on_purpose=not only_if_free)
        return True

    def reserve(self, key: bytes) -> int | None:
        """A row for a boundary inside the next step's tokens, written by that step; None if that
        prefix is already cached."""
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            return None
        return self._take_row()

    def give_back(self, row: int) -> None:
        self._free_rows.append(row)

    def keep_inside(self, sequence: SequencePages, key: bytes, length: int, row: int) -> None:
        """Snapshot the first `length` tokens while the step that computes them is in flight and
        the pages it will free are still held."""
        if key in self._snapshots:  # kept by another sequence in the same step
            self.give_back(row)
        else:
            self._add(sequence, key, length, row, on_purpose=True)

    def _take_row(self) -> int:
        if not self._free_rows:
            self._evict()
        return self._free_rows.pop()

    def _add(
        self, sequence: SequencePages, key: bytes, length: int, row: int, *, on_purpose: bool
    ) -> None:
        columns: dict[Pool, Columns] = {}
        for pool in POOLS:
            needed = self._pages.geometry.pages_needed(pool, length, length)
            columns[pool] = {column: sequence.columns[pool][column] for column in needed}
        self._hold(Snapshot(key, length, columns, row, on_purpose))

    def _hold(self, snapshot: Snapshot) -> None:
        for pool, columns in snapshot.columns.items():
            self._pages.allocators[pool].cache(columns.values())
        self._snapshots[snapshot.key] = snapshot

    # --- eviction -----------------------------------------------------------------------------

    def _reclaim(self, pool: Pool, count: int) -> None:
        """Free `count` pages; least recently used snapshots are evicted first."""
        allocator = self._pages.allocators[pool]
        while allocator.num_free < count and self._snapshots:
            self._evict()

    def _evict(self) -> None:
        snapshot = next(iter(self._snapshots.values()))
        if self._store is not None and snapshot.worth_storing and snapshot.key not in self._store:
            self._save(snapshot)
        self._drop(snapshot)
        self.num_evicted += 1

    def _drop(self, snapshot: Snapshot) -> None:
        del self._snapshots[snapshot.key]
        for pool, columns in snapshot.columns.items():
            self._pages.allocators[pool].uncache(columns.values())
        self._free_rows.append(snapshot.row)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Drop these prefixes, on disk too."""
        for key in keys:
            if key in self._snapshots:
                self._drop(self._snapshots[key])
            if self._store is not None and key in self._store:
                self._store.forget(key)

    def clear(self) -> None:
        """Drop everything in memory; files on disk stay."""
        while self._snapshots:
            self._drop(next(iter(self._snapshots.values())))
        self._seen.clear()

    # --- the store ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Write every prefix worth keeping to the store, most recently used last."""
        for snapshot in list(self._snapshots.values()):
            if self._store is not None and snapshot.worth_storing:
                self._save(snapshot)

    def _save(self, snapshot: Snapshot) -> None:
        assert self._store is not None
        if snapshot.key in self._store:
            return
        pages = {pool: list(columns.values()) for pool, columns in snapshot.columns.items()}
        self._store.save(snapshot.key, snapshot.length, self._copier.read(pages, snapshot.row))

    def _load(self, key: bytes, length: int) -> Snapshot | None:
        assert self._store is not None
        geometry = self._pages.geometry
        needed = {pool: list(geometry.pages_needed(pool, length, length)) for pool in POOLS}
        counts = {pool: len(columns) for pool, columns in needed.items()}
        if any(counts[pool] > self._pages.allocators[pool].num_available for pool in POOLS):
            return None
        tensors = self._store.load(key, length, counts)
        if tensors is None:
            return None
        taken: dict[Pool, list[int]] = {}
        try:
            for pool in POOLS:
                taken[pool] = self._pages.take(pool, counts[pool])
            row = self._take_row()
            try:
                self._copier.write(tensors, taken, row)
            except BaseException:
                self._free_rows.append(row)
                raise
        except BaseException:
            for pool, pages in taken.items():
                self._pages.allocators[pool].release(pages)
            raise
        columns = {p: dict(zip(needed[p], taken[p], strict=True)) for p in POOLS}
        snapshot = Snapshot(key, length, columns, row, on_purpose=True)
        self._hold(snapshot)
        for pool, pages in taken.items():  # now held only by the cache
            self._pages.allocators[pool].release(pages)
        return snapshot

    def check_integrity(self) -> None:
        cached: dict[Pool, Counter[int]] = {
            pool: Counter(p for s in self._snapshots.values() for p in s.columns[pool].values())
            for pool in POOLS
        }
        self._pages.check_integrity(cached)
        rows = [*self._free_rows, *(s.row for s in self._snapshots.values())]
        assert len(set(rows)) == len(rows), "a row is held twice"


def _partial_column(snapshot: Snapshot) -> int:
    """The hca column whose page is partly filled at the snapshot's end; -1 if none."""
    entries = snapshot.length // TOKENS_PER_ENTRY["hca"]
    page = PAGE_ENTRIES["hca"]
    return entries // page if entries % page else -1
