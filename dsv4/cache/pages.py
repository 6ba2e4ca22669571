"""Pages and slots: who holds what. No tensors.

`prepare` takes every page a step needs or none of them; `apply` makes the step's growth final
and gives back what left the window; `cancel` undoes the preparation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4.cache.geometry import POOLS, Geometry, Pool
from dsv4.errors import CapacityError


class PageAllocator:
    """Reference-counted page numbers `0 .. num_pages - 1`."""

    def __init__(self, name: str, num_pages: int) -> None:
        self.name = name
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_pages(self) -> int:
        return len(self._references)

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

    def retain(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self._references[page] > 0, f"{self.name} page {page} is free"
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self._references[page] > 0, f"{self.name} page {page} was freed twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check_integrity(self) -> None:
        """Every page is free exactly once or referenced."""
        free = set(self._free)
        assert len(free) == len(self._free), f"{self.name}: a page is free twice"
        for page, count in enumerate(self._references):
            assert count >= 0, f"{self.name}: page {page} has a negative count"
            assert (count == 0) == (page in free), f"{self.name}: page {page} is lost"


@dataclass
class SequencePages:
    """A sequence's slot, its length in tokens, and its pages by table column."""

    slot: int
    length: int = 0
    columns: dict[Pool, dict[int, int]] = field(
        default_factory=lambda: {pool: {} for pool in POOLS}
    )


@dataclass
class Growth:
    """A prepared step: sequence `i` grows by `num_new[i]` tokens once it is applied."""

    sequences: list[SequencePages]
    num_new: list[int]
    taken: list[tuple[SequencePages, Pool, int]]


class StatePages:
    """Slots and pages of all running sequences."""

    def __init__(self, geometry: Geometry, num_slots: int, num_pages: dict[Pool, int]) -> None:
        self.geometry = geometry
        self.allocators = {pool: PageAllocator(pool, num_pages[pool]) for pool in POOLS}
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def open(self) -> SequencePages:
        if not self._free_slots:
            raise CapacityError("all sequence slots are taken; wait for a sequence to end")
        return SequencePages(self._free_slots.pop())

    def close(self, sequence: SequencePages) -> None:
        for pool, columns in sequence.columns.items():
            self.allocators[pool].release(list(columns.values()))
            columns.clear()
        self._free_slots.append(sequence.slot)

    def prepare(self, sequences: list[SequencePages], num_new: list[int]) -> Growth:
        growth = Growth(sequences, num_new, [])
        try:
            for sequence, count in zip(sequences, num_new, strict=True):
                assert 0 < count <= self.geometry.chunk_tokens
                self._take(growth, sequence, count)
        except CapacityError:
            self.cancel(growth)
            raise
        return growth

    def _take(self, growth: Growth, sequence: SequencePages, count: int) -> None:
        start, end = sequence.length, sequence.length + count
        for pool in POOLS:
            held = sequence.columns[pool]
            missing = [c for c in self.geometry.pages_needed(pool, start, end) if c not in held]
            pages = self.allocators[pool].take(len(missing))
            for column, page in zip(missing, pages, strict=True):
                held[column] = page
                growth.taken.append((sequence, pool, column))

    def cancel(self, growth: Growth) -> None:
        for sequence, pool, column in growth.taken:
            self.allocators[pool].release([sequence.columns[pool].pop(column)])
        growth.taken.clear()

    def apply(self, growth: Growth) -> None:
        for sequence, count in zip(growth.sequences, growth.num_new, strict=True):
            sequence.length += count
            held = sequence.columns["window"]
            needed = self.geometry.pages_needed("window", sequence.length, sequence.length)
            left = [column for column in held if column < needed.start]
            self.allocators["window"].release([held.pop(column) for column in left])
        growth.taken.clear()

    def table_row(self, sequence: SequencePages, pool: Pool, width: int) -> list[int]:
        """The sequence's row of the page table; the window's columns go round."""
        row = [0] * width
        for column, page in sequence.columns[pool].items():
            row[column % width] = page
        return row

    def check_integrity(self) -> None:
        for allocator in self.allocators.values():
            allocator.check_integrity()
        assert len(set(self._free_slots)) == len(self._free_slots), "a slot is free twice"
