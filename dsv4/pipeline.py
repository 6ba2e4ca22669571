"""Pipelined steps: on a GPU the next step is submitted before the last one is read.

The next step reads its input tokens on the device, so the host schedules, detokenises and answers
while the GPU computes. A sequence that turns out to have ended wastes one row of the next step; one
that ends by its length does not. A guide's mask depends on the previous token: such a step is
submitted too, but sampled only once that token is known.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dsv4.errors import StallError
from dsv4.request import TokenLogprobs
from dsv4.runner.runner import PENDING, Chunk, Flight, Runner
from dsv4.sampling import Draw
from dsv4.scheduler import Scheduler, Sequence, Work

Failure = tuple[list[Sequence], Exception]  # the sequences whose requests it ends


@dataclass
class Step:
    """A step in flight."""

    work: list[Work]
    sampled: list[Sequence]
    flight: Flight
    dropped: set[Sequence] = field(default_factory=set)  # computed from a token that was replaced


@dataclass
class Taken:
    """A step's results; `work` is None if nothing could run."""

    work: list[Work] | None = None
    results: list[tuple[Sequence, TokenLogprobs]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)  # begin, submitted, read


class Pipeline:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        is_live: Callable[[Sequence], bool],
        draw: Callable[[Sequence], Draw],
        is_guided: Callable[[Sequence], bool],
    ) -> None:
        """`draw` returns how to sample a sequence's next token, given what is known now."""
        self.runs_ahead = runner.device.type == "cuda"
        self._scheduler, self._runner = scheduler, runner
        self._is_live, self._draw, self._is_guided = is_live, draw, is_guided
        self._ahead: Step | None = None  # submitted, not read yet

    def take(self) -> Taken:
        """Read the oldest step, after submitting the next one where that is possible."""
        taken = Taken(clock=[time.perf_counter()])
        step, self._ahead = self._ahead, None
        if step is None or not any(self._is_live(item.sequence) for item in step.work):
            step = self._start(taken.failures)
        if step is None:
            return taken
        taken.clock.append(time.perf_counter())
        self._scheduler.done(step.work)
        if self.runs_ahead:
            self._ahead = self._start(taken.failures)
        try:
            results = self._runner.read(step.flight)
        except Exception as error:  # the step's requests end with the reason; the others go on
            taken.failures.append((self._live_of(step), error))
            return taken
        taken.clock.append(time.perf_counter())
        failed = step.flight.failures
        for row, (sequence, result) in enumerate(zip(step.sampled, results, strict=True)):
            if sequence in step.dropped or not self._is_live(sequence):
                continue
            sequence.num_pending -= 1
            if row in failed:
                taken.failures.append(([sequence], failed[row]))
            else:
                taken.results.append((sequence, result))
        taken.work = step.work
        return taken

    def draw_ahead(self) -> list[Failure]:
        """Sample the step in flight if it waited for the tokens just taken."""
        failures: list[Failure] = []
        if self._ahead is not None and not self._ahead.flight.is_drawn:
            self._ahead = self._draw_step(self._ahead, failures)
        return failures

    def take_back(self, sequence: Sequence) -> None:
        """The token just taken was replaced: discard what was computed from it."""
        if self._ahead is not None and sequence.num_pending:
            self._ahead.dropped.add(sequence)
            sequence.num_pending = 0
            self._scheduler.preempt(sequence)

    def _start(self, failures: list[Failure]) -> Step | None:
        """Submit the next step."""
        try:
            work = self._scheduler.next_step()
        except StallError as error:
            failures.append((self._scheduler.sequences(), error))
            return None
        except Exception as error:
            if self._scheduler.beginning is None:
                raise
            failures.append(([self._scheduler.beginning], error))
            return None
        if not work:
            return None
        try:
            chunks = [_chunk(item) for item in work]
            flight = self._runner.submit(chunks, lambda: self._scheduler.started(work))
        except Exception as error:  # the step's requests end with the reason; the others go on
            self._scheduler.failed(work)
            failures.append(([item.sequence for item in work], error))
            return None
        step = Step(work, [item.sequence for item in work if item.samples], flight)
        waits = any(s.num_pending > 0 and self._is_guided(s) for s in step.sampled)
        for sequence in step.sampled:
            sequence.num_pending += 1
        return step if waits else self._draw_step(step, failures)

    def _draw_step(self, step: Step, failures: list[Failure]) -> Step | None:
        try:
            self._runner.draw(step.flight, [self._draw(sequence) for sequence in step.sampled])
        except Exception as error:
            failures.append((self._live_of(step), error))
            return None
        return step

    def _live_of(self, step: Step) -> list[Sequence]:
        return [item.sequence for item in step.work if self._is_live(item.sequence)]


def _chunk(work: Work) -> Chunk:
    sequence = work.sequence
    assert sequence.pages is not None
    start = sequence.num_computed
    new = sequence.token_ids[start : start + work.num_new] or PENDING
    return Chunk(sequence.pages, new, 1 if work.samples else 0, work.keep_len, work.keep_row)
