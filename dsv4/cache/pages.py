"""Ownership of pages and slots. No tensors.

`prepare` allocates all the pages a step needs or none of them; `apply` commits the growth and frees
the pages behind the window; `cancel` rolls the preparation back.

A page may have several holders: running sequences and the prefix cache. A page held only by the
cache is *idle*: it is evicted as soon as a sequence needs room.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dsv4.cache.geometry import GROWING_POOLS, MOST_DRAFT_ROWS, POOLS, Geometry, Pool
from dsv4.errors import CapacityError

Columns = dict[int, int]  # table column to page


class PageAllocator:
    """Page numbers `0 .. num_pages - 1`, with holders counted: sequences and the prefix cache."""

    def __init__(self, name: str, num_pages: int) -> None:
        self.name = name
        self._references = [0] * num_pages
        self._cached = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_idle = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages that only the cache holds."""
        return self._num_idle

    @property
    def num_available(self) -> int:
        return len(self._free) + self._num_idle

    @property
    def num_used(self) -> int:
        return len(self._references) - self.num_available

    @property
    def num_pages(self) -> int:
        return len(self._references)

    def is_idle(self, page: int) -> bool:
        return self._references[page] == 0 and self._cached[page] > 0

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise CapacityError(
                f"{count} {self.name} pages wanted, {len(self._free)} of {self.num_pages} free; "
                "fewer or shorter sequences at once will fit"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._check_held(page)
            self._num_idle -= self._references[page] == 0
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._references[page] > 0, f"{self.name} page {page} was freed twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._let_go(page)

    def cache(self, pages: Iterable[int]) -> None:
        """The prefix cache holds these pages too."""
        for page in pages:
            self._check_held(page)
            self._cached[page] += 1

    def uncache(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._cached[page] > 0, f"{self.name} page {page} is not cached"
            self._cached[page] -= 1
            if self._cached[page] == 0 and self._references[page] == 0:
                self._num_idle -= 1
                self._free.append(page)

    def _check_held(self, page: int) -> None:
        held = self._references[page] + self._cached[page]
        assert held > 0, f"{self.name} page {page} is free"

    def _let_go(self, page: int) -> None:
        if self._cached[page]:
            self._num_idle += 1
        else:
            self._free.append(page)

    def check_integrity(
        self, held: Counter[int] | None = None, cached: Counter[int] | None = None
    ) -> None:
        """Every page is free exactly once, or its count equals its number of holders."""
        free = set(self._free)
        assert len(free) == len(self._free), f"{self.name}: a page is free twice"
        idle = 0
        for page, count in enumerate(self._references):
            if held is not None:
                assert count == held[page], f"{self.name}: page {page} counts {count} holders"
            kept = self._cached[page]
            if cached is not None:
                assert kept == cached[page], f"{self.name}: page {page} is cached {kept} times"
            assert (count + kept == 0) == (page in free), f"{self.name}: page {page} is lost"
            idle += count == 0 and kept > 0
        assert idle == self._num_idle, f"{self.name}: {idle} pages idle, not {self._num_idle}"


@dataclass(eq=False)
class SequencePages:
    """A sequence's slot, its length in tokens, and its pages by table column. Slots are numbered
    over all homes, pages within one."""

    slot: int
    home: int = 0
    length: int = 0
    columns: dict[Pool, Columns] = field(default_factory=lambda: {pool: {} for pool in POOLS})
    full_at: int = 0  # its pages suffice up to this length
    leaves_at: int = 0  # its oldest window page is unused from this length on


@dataclass
class Growth:
    """A prepared step: once applied, sequence `i` grows by `num_new[i]` tokens and keeps at least
    `least[i]` of them."""

    sequences: list[SequencePages]
    num_new: list[int]
    least: list[int]
    taken: list[tuple[SequencePages, Pool, int]]


class StatePages:
    """Slots and pages of all running sequences, or of those at one home."""

    def __init__(
        self, geometry: Geometry, num_slots: int, num_pages: dict[Pool, int], home: int = 0
    ) -> None:
        self.geometry = geometry
        self.home = home
        self.allocators = {pool: PageAllocator(pool, num_pages[pool]) for pool in POOLS}
        self.reclaim: Callable[[Pool, int], None] | None = None  # frees this many pages
        first = home * num_slots
        self._free_slots = list(range(first + num_slots - 1, first - 1, -1))
        self._open: list[SequencePages] = []

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def open(self) -> SequencePages:
        if not self._free_slots:
            raise CapacityError("all sequence slots are taken; wait for a sequence to end")
        sequence = SequencePages(self._free_slots.pop(), self.home)
        self._open.append(sequence)
        return sequence

    def close(self, sequence: SequencePages) -> None:
        self._open.remove(sequence)
        for pool, columns in sequence.columns.items():
            self.allocators[pool].release(columns.values())
            columns.clear()
        self._free_slots.append(sequence.slot)

    def share(self, sequence: SequencePages, pool: Pool, columns: Columns) -> None:
        """Start a fresh sequence on pages shared with other holders."""
        self.allocators[pool].retain(columns.values())
        sequence.columns[pool].update(columns)

    def take(self, pool: Pool, count: int) -> list[int]:
        """Allocate pages, evicting idle ones of the prefix cache if needed."""
        allocator = self.allocators[pool]
        if self.reclaim is not None and allocator.num_free < count <= allocator.num_available:
            self.reclaim(pool, count)
        return allocator.take(count)

    def missing(self, sequence: SequencePages, pool: Pool, count: int) -> list[int]:
        """Columns that still need a page if the sequence grows by `count` tokens."""
        start, held = sequence.length, sequence.columns[pool]
        spare = self.geometry.spare_tokens
        if start + count + spare <= sequence.full_at:
            return []
        end = start + count + (spare if pool == "window" else 0)
        needed = self.geometry.pages_needed(pool, start, end)
        if pool in GROWING_POOLS:  # contiguous from the first; a long sequence has thousands
            return list(range(len(held), len(needed)))
        return [column for column in needed if column not in held]

    def prepare(
        self,
        sequences: Sequence[SequencePages],
        num_new: Sequence[int],
        least: Sequence[int] | None = None,
    ) -> Growth:
        """`least`: tokens that are not drafts; default: all. See `retract`."""
        growth = Growth(list(sequences), list(num_new), list(least or num_new), [])
        try:
            for sequence, count in zip(sequences, num_new, strict=True):
                assert 0 < count <= max(self.geometry.chunk_tokens, MOST_DRAFT_ROWS)
                if sequence.length + count + self.geometry.spare_tokens > sequence.full_at:
                    self._take(growth, sequence, count)
        except BaseException:
            self.cancel(growth)
            raise
        return growth

    def _take(self, growth: Growth, sequence: SequencePages, count: int) -> None:
        for pool in POOLS:
            missing = self.missing(sequence, pool, count)
            if not missing:
                continue
            pages = self.take(pool, len(missing))
            for column, page in zip(missing, pages, strict=True):
                sequence.columns[pool][column] = page
                growth.taken.append((sequence, pool, column))
        sequence.full_at = self.geometry.most_tokens(
            {pool: next(reversed(columns), -1) + 1 for pool, columns in sequence.columns.items()}
        )

    def cancel(self, growth: Growth) -> None:
        for sequence, pool, column in growth.taken:
            self.allocators[pool].release([sequence.columns[pool].pop(column)])
            sequence.full_at = 0  # recomputed on the next growth
        growth.taken.clear()

    def apply(self, growth: Growth) -> None:
        for sequence, count, least in zip(
            growth.sequences, growth.num_new, growth.least, strict=True
        ):
            shortest = sequence.length + least
            sequence.length += count
            if shortest >= sequence.leaves_at:
                held = sequence.columns["window"]
                oldest = self.geometry.oldest_column(shortest)
                left = [column for column in held if column < oldest]
                self.allocators["window"].release([held.pop(column) for column in left])
                sequence.leaves_at = self.geometry.last_use(next(iter(held))) + 1
        growth.taken.clear()

    def retract(self, sequence: SequencePages, count: int) -> None:
        """Reject the last `count` tokens, which were drafts. The state needs no undo: what they
        wrote is overwritten before it is read (docs/drafting.md). Their pages are kept."""
        sequence.length -= count

    def table_row(self, sequence: SequencePages, pool: Pool, width: int) -> list[int]:
        """The sequence's row of the page table; the window's columns form a ring."""
        row = [0] * width
        for column, page in sequence.columns[pool].items():
            row[column % width] = page
        return row

    def check_integrity(self, cached: dict[Pool, Counter[int]] | None = None) -> None:
        """`cached`: the pages that the prefix cache says it holds."""
        for pool, allocator in self.allocators.items():
            held = Counter(page for s in self._open for page in s.columns[pool].values())
            allocator.check_integrity(held, cached[pool] if cached is not None else None)
        slots = [*self._free_slots, *(sequence.slot for sequence in self._open)]
        assert len(set(slots)) == len(slots), "a slot is held twice"
