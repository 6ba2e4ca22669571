"""Pages and slots under random work, and the sizes the model's specification states."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv4.cache.geometry import PAGE_ENTRIES, POOLS, Geometry, Pool
from dsv4.cache.pages import Growth, PageAllocator, SequencePages, StatePages
from dsv4.config import ModelConfig
from dsv4.errors import CapacityError
from dsv4.testing import small_config

CHUNK = 100
WINDOW = 70
CONFIG = small_config(sliding_window=WINDOW, max_positions=100_000)
GEOMETRY = Geometry(CONFIG, "fp8", "fp4", CHUNK)


# --- the allocator ----------------------------------------------------------------------------


def test_allocator_takes_all_or_nothing() -> None:
    pages = PageAllocator("csa", 5)
    held = pages.take(3)
    assert len(set(held)) == 3
    with pytest.raises(CapacityError, match=r"3 csa pages wanted, 2 of 5 free"):
        pages.take(3)
    assert pages.num_free == 2
    pages.check_integrity()
    pages.release(held)
    assert pages.num_free == 5
    assert sorted(pages.take(5)) == list(range(5))


def test_a_shared_page_is_free_when_the_last_holder_lets_go() -> None:
    pages = PageAllocator("window", 2)
    held = pages.take(1)
    pages.retain(held)
    pages.release(held)
    assert pages.num_free == 1
    pages.release(held)
    assert pages.num_free == 2
    pages.check_integrity()


@pytest.mark.parametrize("wrong", ["release", "retain"])
def test_a_free_page_cannot_be_touched(wrong: str) -> None:
    pages = PageAllocator("window", 2)
    held = pages.take(1)
    pages.release(held)
    with pytest.raises(AssertionError):
        getattr(pages, wrong)(held)


def test_integrity_sees_a_lost_page() -> None:
    pages = PageAllocator("window", 2)
    pages._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pages.check_integrity()
    pages._free += [0, 0]
    with pytest.raises(AssertionError, match="twice"):
        pages.check_integrity()


# --- the state of sequences under random work -------------------------------------------------


def expected_columns(pool: Pool, length: int) -> set[int]:
    """Columns a sequence of `length` tokens holds between steps, counted entry by entry."""
    if pool == "window":
        needed = range(max(length - WINDOW + 1, 0), length)  # what the next token looks back on
        return {token // 64 for token in needed}
    ratio = {"csa": 4, "hca": 128}[pool]
    return {entry // 32 for entry in range(length // ratio)}


class PagesMachine(RuleBasedStateMachine):
    """Open, grow, cancel and close in any order; few pages, so that capacity runs out often."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: dict[Pool, int] = {"window": 9, "csa": 8, "hca": 2}
        self.pages = StatePages(GEOMETRY, 3, self.limits)
        self.open: list[SequencePages] = []
        self.lengths: dict[int, int] = {}
        self.growth: Growth | None = None

    def snapshot(self) -> tuple[object, ...]:
        return (
            [{pool: dict(columns) for pool, columns in s.columns.items()} for s in self.open],
            [s.length for s in self.open],
            {pool: sorted(a._free) for pool, a in self.pages.allocators.items()},
            self.pages.num_free_slots,
        )

    @rule()
    def open_sequence(self) -> None:
        if len(self.open) == 3:
            before = self.snapshot()
            with pytest.raises(CapacityError, match="slots"):
                self.pages.open()
            assert self.snapshot() == before
            return
        sequence = self.pages.open()
        assert sequence.slot not in {other.slot for other in self.open}
        assert sequence.length == 0
        self.open.append(sequence)
        self.lengths[id(sequence)] = 0

    @precondition(lambda self: self.open and self.growth is None)
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        chosen = data.draw(
            st.lists(st.sampled_from(range(len(self.open))), min_size=1, unique=True)
        )
        sequences = [self.open[i] for i in chosen]
        num_new = [data.draw(st.integers(1, CHUNK)) for _ in chosen]
        before = self.snapshot()
        try:
            self.growth = self.pages.prepare(sequences, num_new)
        except CapacityError:
            assert self.snapshot() == before
            return
        for sequence, count in zip(sequences, num_new, strict=True):
            start = sequence.length
            assert start == self.lengths[id(sequence)]  # nothing is final yet
            for token in range(max(start - WINDOW + 1, 0), start + count):
                assert token // 64 in sequence.columns["window"]
            for pool, ratio in (("csa", 4), ("hca", 128)):
                for entry in range((start + count) // ratio):
                    assert entry // 32 in sequence.columns[pool]

    @precondition(lambda self: self.growth is not None)
    @rule()
    def apply(self) -> None:
        assert self.growth is not None
        for sequence, count in zip(self.growth.sequences, self.growth.num_new, strict=True):
            self.lengths[id(sequence)] += count
        self.pages.apply(self.growth)
        self.growth = None

    @precondition(lambda self: self.growth is not None)
    @rule()
    def cancel(self) -> None:
        assert self.growth is not None
        self.pages.cancel(self.growth)
        self.growth = None

    @precondition(lambda self: self.open and self.growth is None)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.pages.close(sequence)

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        self.pages.check_integrity()
        for pool in POOLS:
            held = [page for s in self.open for page in s.columns[pool].values()]
            assert len(held) == len(set(held))
            assert len(held) + self.pages.allocators[pool].num_free == self.limits[pool]

    @invariant()
    def between_steps_a_sequence_holds_what_it_needs(self) -> None:
        if self.growth is not None:
            return
        for sequence in self.open:
            assert sequence.length == self.lengths[id(sequence)]
            for pool in POOLS:
                assert set(sequence.columns[pool]) == expected_columns(pool, sequence.length)

    def teardown(self) -> None:
        if self.growth is not None:
            self.pages.cancel(self.growth)
        for sequence in self.open:
            self.pages.close(sequence)
        assert self.pages.num_free_slots == 3
        assert {p: a.num_free for p, a in self.pages.allocators.items()} == self.limits


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    # a failing run is short enough to read; shrinking it would take minutes
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_long_sequence_stays_within_its_most_pages() -> None:
    """The ring is wide enough for every start and chunk, and old window pages come back."""
    steps = [1, 63, 64, 65, 100, 1, 1, 99, 100, 100, 37] * 5
    pages = StatePages(GEOMETRY, 1, GEOMETRY.num_pages(sum(steps), 1))
    sequence = pages.open()
    for count in steps:
        growth = pages.prepare([sequence], [count])
        held = sequence.columns["window"]
        assert len(held) <= GEOMETRY.window_columns
        # no two columns in use fall on one place of the ring
        assert len({column % GEOMETRY.window_columns for column in held}) == len(held)
        pages.apply(growth)
    assert sequence.length == sum(steps)
    assert len(sequence.columns["window"]) <= -(-WINDOW // 64) + 1


def test_table_rows_go_round() -> None:
    pages = StatePages(GEOMETRY, 1, {"window": 9, "csa": 9, "hca": 9})
    sequence = pages.open()
    for _ in range(3):
        pages.apply(pages.prepare([sequence], [100]))
    width = GEOMETRY.window_columns
    row = pages.table_row(sequence, "window", width)
    assert len(row) == width
    for column, page in sequence.columns["window"].items():
        assert row[column % width] == page
    assert pages.table_row(sequence, "csa", 5)[:3] == [sequence.columns["csa"][i] for i in range(3)]


def test_a_failed_batch_gives_back_the_first_ones_pages() -> None:
    pages = StatePages(GEOMETRY, 2, {"window": 3, "csa": 3, "hca": 1})
    first, second = pages.open(), pages.open()
    with pytest.raises(CapacityError, match="window"):
        pages.prepare([first, second], [100, 100])
    assert first.columns == second.columns == {"window": {}, "csa": {}, "hca": {}}
    assert pages.allocators["window"].num_free == 3
    pages.apply(pages.prepare([first, second], [100, 60]))


# --- sizes ------------------------------------------------------------------------------------

FLASH, PRO = ModelConfig.builtin("flash"), ModelConfig.builtin("pro")


def test_bytes_of_entries() -> None:
    assert Geometry(FLASH, "fp8", "fp4", 256).kv_entry_bytes() == 584
    assert Geometry(FLASH, "fp8", "fp4", 256).index_entry_bytes() == 68
    assert Geometry(FLASH, "fp8", "fp8", 256).index_entry_bytes() == 132
    assert Geometry(FLASH, "bf16", "bf16", 256).kv_entry_bytes() == 1024
    assert Geometry(FLASH, "bf16", "bf16", 256).index_entry_bytes() == 256
    assert Geometry(FLASH, "fp32", "fp32", 256).kv_entry_bytes() == 2048


def growth(config: ModelConfig, index_format: str) -> float:
    geometry = Geometry(config, "fp8", index_format, 256)
    return sum(geometry.bytes_per_token(pool) for pool in POOLS)


def test_growth_per_token() -> None:
    assert growth(FLASH, "fp4") == 3514.25
    assert growth(PRO, "fp4") == 5031.4375
    assert growth(FLASH, "fp8") == 3850.25
    assert growth(PRO, "fp8") == 5511.4375
    million = 1_048_576
    assert growth(FLASH, "fp4") * million == pytest.approx(3.69e9, rel=2e-3)
    assert growth(PRO, "fp8") * million == pytest.approx(5.78e9, rel=2e-3)


def test_fixed_state() -> None:
    # compressors in the reference layout (12.2 MB and 18.7 MB), with twice the rows for ratio 4
    assert Geometry(FLASH, "fp8", "fp4", 256).slot_bytes() == 42 * (65536 + 16384) + 20 * 524288
    assert Geometry(PRO, "fp8", "fp4", 256).slot_bytes() == 60 * (65536 + 16384) + 31 * 524288
    # 128 window keys of all layers: 3.21 MB and 4.56 MB
    for config, layers in ((FLASH, 43), (PRO, 61)):
        page = Geometry(config, "fp8", "fp4", 256).page_bytes("window")
        assert page * 128 // PAGE_ENTRIES["window"] == layers * 74752


def test_a_models_missing_kinds_take_no_pages() -> None:
    only_window = small_config(compress_ratios=(0,) * 7)
    geometry = Geometry(only_window, "fp8", "fp4", 64)
    assert geometry.most_pages("csa", 4096) == geometry.most_pages("hca", 4096) == 0
    assert geometry.page_bytes("csa") == 0
    assert geometry.slot_bytes() == 0


def test_sequence_bytes_are_pages_and_slot() -> None:
    geometry = Geometry(FLASH, "fp8", "fp4", 256)
    one_million = geometry.sequence_bytes(1_048_576)
    growing = growth(FLASH, "fp4") * 1_048_576
    window = geometry.page_bytes("window") * 4  # 128 keys span at most 3 pages; one to grow
    assert one_million == growing + window + geometry.slot_bytes()


def test_full_slots_and_a_full_chunk_always_fit() -> None:
    """Every slot at its worst alignment, and one step's prompt tokens spread over all of them."""
    max_sequences, max_context = 3, 1000
    pages = StatePages(GEOMETRY, max_sequences, GEOMETRY.num_pages(max_context, max_sequences))
    sequences = [pages.open() for _ in range(max_sequences)]
    rng = random.Random(0)
    while min(s.length for s in sequences) < max_context - GEOMETRY.chunk_tokens:
        cuts = sorted(rng.randint(1, GEOMETRY.chunk_tokens) for _ in range(max_sequences - 1))
        shares = [b - a for a, b in itertools.pairwise([0, *cuts, GEOMETRY.chunk_tokens])]
        step = [(s, min(n, max_context - s.length)) for s, n in zip(sequences, shares, strict=True)]
        step = [(s, n) for s, n in step if n > 0]
        pages.apply(pages.prepare([s for s, _ in step], [n for _, n in step]))


def test_a_page_in_use_stays_taken_when_the_cache_lets_it_go() -> None:
    allocator = PageAllocator("csa", 2)
    pages = allocator.take(1)
    allocator.cache(pages)
    allocator.uncache(pages)
    assert (allocator.num_free, allocator.num_idle) == (1, 0)
    allocator.check_integrity(Counter(pages), Counter())
    assert allocator.take(1) != pages
