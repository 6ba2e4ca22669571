"""A scheduler without a model: steps take pages and give a token each, nothing is computed."""

from typing import Any

from dsv4.cache.geometry import Geometry, Pool
from dsv4.cache.pages import SequencePages, StatePages
from dsv4.request import Request, SamplingParams
from dsv4.scheduler import ScheduledTokens, Scheduler, SequenceState
from dsv4.scheduler.home import open_homes
from tests.models import quick_config

CONTEXT = 1024


class NoTensors:
    def copy_page(self, pool: Pool, source: int, target: int) -> None:
        assert source != target

    def save_rows(self, slot: int, row: int) -> None: ...

    def restore_rows(self, row: int, slot: int) -> None: ...

    def read(self, pages: dict[Pool, list[int]], row: int) -> dict[str, Any]:
        return {"pages": pages, "row": row}

    def write(self, tensors: dict[str, Any], pages: dict[Pool, list[int]], row: int) -> None: ...


class Simulator:
    def __init__(
        self,
        *,
        max_sequences: int = 3,
        chunk_tokens: int = 256,
        state_tokens: int | None = None,
        prefix: bool = True,
        store: Any = None,
        lanes: int = 1,
        homes: int = 1,
    ) -> None:
        """`max_sequences` and `state_tokens`: of each home."""
        geometry = Geometry(quick_config(), "fp32", "fp32", chunk_tokens, 4 if prefix else 0)
        num_pages = geometry.num_pages(CONTEXT, max_sequences, state_tokens)
        pages = [StatePages(geometry, max_sequences, num_pages, home) for home in range(homes)]
        self.homes = open_homes(pages, [NoTensors() for _ in pages], store)
        self.pages, self.prefix = pages[0], self.homes[0].prefix
        self.told: list[tuple[str, str]] = []
        self.scheduler = Scheduler(
            self.homes,
            chunk_tokens,
            lambda k, s: self.told.append((k, s.request.id)),
            lanes=lanes,
        )
        self.finished: list[str] = []

    def add(
        self, name: str, prompt: list[int], max_tokens: int = 4, **fields: Any
    ) -> SequenceState:
        params = SamplingParams(max_tokens=max_tokens)
        sequence = SequenceState(Request(name, tuple(prompt), params, **fields), seed=0)
        sequence.max_len = min(len(prompt) + max_tokens, CONTEXT)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[ScheduledTokens]:
        work = self.scheduler.next_step()
        if not work:
            return work
        growths = []
        for number, home in enumerate(self.homes):
            mine = [(pages_of(item.sequence), item.num_new) for item in work]
            own = [pair for pair in mine if pair[0].home == number]
            counts = [count for _, count in own]
            growths.append(home.pages.prepare([pages for pages, _ in own], counts))
        self.scheduler.started(work)
        for home, growth in zip(self.homes, growths, strict=True):
            home.pages.apply(growth)
        self.scheduler.done(work)
        for item in work:
            if item.samples:
                self._accept(item.sequence)
        return work

    def _accept(self, sequence: SequenceState) -> None:
        sequence.token_ids.append(sequence.num_output % 256)  # the same whatever happened before
        full = len(sequence.token_ids) >= CONTEXT
        if full or sequence.num_output >= sequence.request.params.max_tokens:
            self.scheduler.remove(sequence)
            self.finished.append(sequence.request.id)

    def run(self, most_steps: int = 2000) -> None:
        for _ in range(most_steps):
            if self.scheduler.num_unfinished == 0:
                return
            self.step()
        raise AssertionError(f"still unfinished: {self.scheduler.num_unfinished}")

    def check(self) -> None:
        for home in self.homes:
            (home.prefix or home.pages).check_integrity()

    def check_idle(self) -> None:
        self.check()
        for home in self.homes:
            for allocator in home.pages.allocators.values():
                assert allocator.num_available == allocator.num_pages


def pages_of(sequence: SequenceState) -> SequencePages:
    assert sequence.pages is not None
    return sequence.pages
