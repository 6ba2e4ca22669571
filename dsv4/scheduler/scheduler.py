"""The queue: sequences that run, sequences that wait, and the tokens of the next step.

Every running sequence that is past its prompt adds one token; what is left of the step's budget
goes to prompts in order of arrival, in chunks. A sequence waits until a slot is free.
"""

from collections import deque
from dataclasses import dataclass, field

from dsv4.cache.pages import SequencePages, StatePages
from dsv4.request import Request


@dataclass
class Sequence:
    """A request on its way: its tokens so far and how many of them the state holds."""

    request: Request
    seed: int
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    pages: SequencePages | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)

    @property
    def num_computed(self) -> int:
        return self.pages.length if self.pages is not None else 0

    @property
    def num_left(self) -> int:
        """Tokens known but not yet in the state; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_ids) :]


@dataclass(frozen=True)
class Work:
    """One sequence's share of a step."""

    sequence: Sequence
    num_new: int
    samples: bool  # the step reaches the sequence's last known token


class Scheduler:
    def __init__(self, pages: StatePages, chunk_tokens: int) -> None:
        self._pages = pages
        self._chunk_tokens = chunk_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def sequences(self) -> list[Sequence]:
        return [*self._running, *self._waiting]

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Finished or aborted: its pages and slot are free again."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        assert sequence.pages is not None
        self._pages.close(sequence.pages)
        sequence.pages = None

    def next_step(self) -> list[Work]:
        while self._waiting and self._pages.num_free_slots:
            sequence = self._waiting.popleft()
            sequence.pages = self._pages.open()
            self._running.append(sequence)
        decoding = [s for s in self._running if s.num_left == 1]
        prefilling = [s for s in self._running if s.num_left > 1]
        work = [Work(sequence, 1, samples=True) for sequence in decoding]
        budget = self._chunk_tokens
        for sequence in prefilling:
            count = min(sequence.num_left, budget)
            if count == 0:
                break
            work.append(Work(sequence, count, samples=count == sequence.num_left))
            budget -= count
        return work
