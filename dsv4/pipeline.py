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
from dsv4.runner.runner import PENDING, Chunk, Runner, SubmittedStep
from dsv4.sampling import SamplingRow
from dsv4.scheduler import ScheduledTokens, Scheduler, SequenceState

Failure = tuple[list[SequenceState], Exception]  # the sequences whose requests it ends


@dataclass
class InFlightStep:
    """A step in flight."""

    scheduled: list[ScheduledTokens]
    sampled: list[SequenceState]
    submitted: SubmittedStep
    dropped: set[SequenceState] = field(
        default_factory=set
    )  # computed from a token that was replaced


@dataclass
class StepOutcome:
    """A step's results; `scheduled` is None if nothing could run."""

    scheduled: list[ScheduledTokens] | None = None
    results: list[tuple[SequenceState, TokenLogprobs]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)  # begin, submitted, read


class Pipeline:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        is_live: Callable[[SequenceState], bool],
        sampling_row: Callable[[SequenceState], SamplingRow],
        is_guided: Callable[[SequenceState], bool],
    ) -> None:
        """`sampling_row` returns how to sample a sequence's next token, given what is known now."""
        self.runs_ahead = runner.device.type == "cuda"
        self._scheduler, self._runner = scheduler, runner
        self._is_live, self._sampling_row, self._is_guided = is_live, sampling_row, is_guided
        self._ahead: InFlightStep | None = None  # submitted, not read yet

    def take(self) -> StepOutcome:
        """Read the oldest step, after submitting the next one where that is possible."""
        outcome = StepOutcome(clock=[time.perf_counter()])
        step, self._ahead = self._ahead, None
        if step is None or not any(self._is_live(item.sequence) for item in step.scheduled):
            step = self._start(outcome.failures)
        if step is None:
            return outcome
        outcome.clock.append(time.perf_counter())
        self._scheduler.done(step.scheduled)
        if self.runs_ahead:
            self._ahead = self._start(outcome.failures)
        try:
            results = self._runner.read(step.submitted)
        except Exception as error:  # the step's requests end with the reason; the others go on
            outcome.failures.append((self._live_of(step), error))
            return outcome
        outcome.clock.append(time.perf_counter())
        failed = step.submitted.failures
        for row, (sequence, result) in enumerate(zip(step.sampled, results, strict=True)):
            if sequence in step.dropped or not self._is_live(sequence):
                continue
            sequence.num_pending -= 1
            if row in failed:
                outcome.failures.append(([sequence], failed[row]))
            else:
                outcome.results.append((sequence, result))
        outcome.scheduled = step.scheduled
        return outcome

    def sample_ahead(self) -> list[Failure]:
        """Sample the step in flight if it waited for the tokens just taken."""
        failures: list[Failure] = []
        if self._ahead is not None and not self._ahead.submitted.is_sampled:
            self._ahead = self._sample_step(self._ahead, failures)
        return failures

    def discard_pending(self, sequence: SequenceState) -> None:
        """The token just outcome was replaced: discard what was computed from it."""
        if self._ahead is not None and sequence.num_pending:
            self._ahead.dropped.add(sequence)
            sequence.num_pending = 0
            self._scheduler.preempt(sequence)

    def _start(self, failures: list[Failure]) -> InFlightStep | None:
        """Submit the next step."""
        try:
            scheduled = self._scheduler.next_step()
        except StallError as error:
            failures.append((self._scheduler.sequences(), error))
            return None
        except Exception as error:
            if self._scheduler.admitting is None:
                raise
            failures.append(([self._scheduler.admitting], error))
            return None
        if not scheduled:
            return None
        try:
            chunks = [_chunk(item) for item in scheduled]
            submitted = self._runner.submit(chunks, lambda: self._scheduler.started(scheduled))
        except Exception as error:  # the step's requests end with the reason; the others go on
            self._scheduler.failed(scheduled)
            failures.append(([item.sequence for item in scheduled], error))
            return None
        step = InFlightStep(
            scheduled, [item.sequence for item in scheduled if item.samples], submitted
        )
        waits = any(s.num_pending > 0 and self._is_guided(s) for s in step.sampled)
        for sequence in step.sampled:
            sequence.num_pending += 1
        return step if waits else self._sample_step(step, failures)

    def _sample_step(self, step: InFlightStep, failures: list[Failure]) -> InFlightStep | None:
        try:
            self._runner.sample(
                step.submitted, [self._sampling_row(sequence) for sequence in step.sampled]
            )
        except Exception as error:
            failures.append((self._live_of(step), error))
            return None
        return step

    def _live_of(self, step: InFlightStep) -> list[SequenceState]:
        return [item.sequence for item in step.scheduled if self._is_live(item.sequence)]


def _chunk(item: ScheduledTokens) -> Chunk:
    sequence = item.sequence
    assert sequence.pages is not None
    start = sequence.num_computed
    new = sequence.token_ids[start : start + item.num_new] or PENDING
    return Chunk(sequence.pages, new, 1 if item.samples else 0, item.keep_len, item.keep_row)
