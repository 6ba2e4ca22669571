"""Pipelined steps: on a GPU the next step is submitted before the last one is read.

The next step reads its input tokens on the device, so the host schedules, detokenises and answers
while the GPU computes. A sequence that turns out to have ended wastes one row of the next step,
unless it ended at its maximum length. A guide's mask depends on the previous token: such a step is
submitted early too, but sampled only once that token is known.

A step with drafts can give a sequence several tokens. They are taken in rounds: `advance` returns
the first of each sequence; once the engine has accepted it, `next_round` returns the next one if
the draft matched the accepted token. The step after it is submitted early if its drafts are made on
the device (`_follow`), else when all tokens are known.

With several stages (`pp`), one step per stage is in flight. These *lanes* hold different sequences
or chunks of one prompt. A sequence with a token in flight is in no other step.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dsv4.errors import StallError
from dsv4.ops.kv.begin_step import NEWEST
from dsv4.ops.sample.draft_rows import DRAFTED
from dsv4.request import TokenLogprobs
from dsv4.runner.runner import PENDING, Chunk, Runner, SubmittedStep
from dsv4.sampling import SamplingRow
from dsv4.scheduler import ScheduledTokens, Scheduler, SequenceState
from dsv4.scheduler.drafts import Drafting

MANY_WAITED = 8  # steps in a row that waited for the host: more will

Failure = tuple[list[SequenceState], Exception]  # the sequences whose requests it ends


@dataclass
class InFlightStep:
    """A step in flight."""

    scheduled: list[ScheduledTokens]
    sampled: list[SequenceState]
    chunks: list[Chunk]
    submitted: SubmittedStep
    dropped: set[SequenceState] = field(
        default_factory=set
    )  # computed from a token that was replaced
    # for a step with drafts:
    answers: list[list[TokenLogprobs]] = field(default_factory=list)  # drawn so far
    going: list[int] = field(default_factory=list)  # places whose drafts were right so far
    taken: list[int] = field(default_factory=list)  # tokens taken at each place
    begin: float = 0.0
    is_plain: bool = True  # no drafts are made after it
    is_ahead: bool = False  # submitted before the previous step was read

    @property
    def drafts(self) -> list[tuple[int, ...]]:
        return [item.drafts for item in self.scheduled]

    @property
    def num_rows(self) -> list[int]:
        """Of each sequence. The device may verify fewer drafts than the host allowed."""
        results = self.submitted.results
        if self.submitted.is_drawn and results is not None and results.verified is not None:
            return results.rows
        return [item.num_new for item in self.scheduled]


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
        drafting: Drafting | None = None,
    ) -> None:
        """`sampling_row` returns how to sample a sequence's next token, given what is known now."""
        self._drafting = drafting
        self._accepting: InFlightStep | None = None  # its tokens are being accepted
        self.runs_ahead = runner.runs_ahead
        self._scheduler, self._runner = scheduler, runner
        self._is_live, self._sampling_row, self._is_guided = is_live, sampling_row, is_guided
        self._ahead: InFlightStep | None = None  # submitted, not read yet
        self._lanes: deque[InFlightStep] = deque()  # with several stages: submitted, not sampled
        self._settled = (False, 0.0)  # whether the last step ran ahead, and when it was done
        self._num_waited = 0  # steps since one ran ahead

    def advance(self) -> StepOutcome:
        """Submit the next step if possible, then read the oldest one."""
        outcome = StepOutcome(clock=[time.perf_counter()])
        step, self._ahead = self._ahead, None
        if self._runner.num_lanes > 1:
            step = self._next_lane(outcome.failures)
        elif step is None or not self._live_of(step):
            step = self._sample_step(self._start(outcome.failures), outcome.failures, early=True)
        if step is None:
            return outcome
        outcome.clock.append(time.perf_counter())
        step.begin = outcome.clock[0]
        is_verified = step.submitted.verify is not None
        if not is_verified and self._runner.num_lanes == 1:
            self._scheduler.done(step.scheduled)
            if self._may_run_ahead:
                following = self._start(outcome.failures)
                self._ahead = self._sample_step(following, outcome.failures, early=True)
                if self._ahead is not None:
                    self._ahead.is_ahead = True
        elif is_verified:
            self._ahead = self._follow(step, outcome.failures)
        try:
            step.answers = self._runner.read(step.submitted)
            results = [answer[0] for answer in step.answers]
        except Exception as error:  # the step's requests end with the reason; the others go on
            outcome.failures.append((self._live_of(step), error))
            return outcome
        outcome.clock.append(time.perf_counter())
        failed = step.submitted.failures
        for row, (sequence, result) in enumerate(zip(step.sampled, results, strict=True)):
            if sequence in step.dropped or not self._is_live(sequence):
                continue
            sequence.num_pending -= 1
            if found := failed.get(row) or self._scheduler.check_finite(sequence, result.logprob):
                outcome.failures.append(([sequence], found))
            else:
                outcome.results.append((sequence, result))
        outcome.scheduled = step.scheduled
        step.taken = [1] * len(step.sampled)
        if is_verified:
            step.going = list(range(len(step.sampled)))
            for item, rows in zip(step.scheduled, step.num_rows, strict=True):
                item.sequence.num_drafted += rows - 1
        if self._drafting is not None:
            self._accepting = step
        return outcome

    def _next_lane(self, failures: list[Failure]) -> InFlightStep | None:
        """The oldest step in flight, once every stage has work. Steps whose requests were all
        aborted are dropped here; their logits are dropped when they arrive."""
        self._lanes = deque(step for step in self._lanes if self._live_of(step))
        while len(self._lanes) < self._runner.num_lanes:
            step = self._start(failures)
            if step is None:
                break
            self._scheduler.done(step.scheduled)  # before a later step changes their state
            self._lanes.append(step)
        return self._sample_step(self._lanes.popleft(), failures) if self._lanes else None

    @property
    def _may_run_ahead(self) -> bool:
        """Not while drafting: drafts depend on the previous tokens, which the host must know."""
        return self.runs_ahead and (self._drafting is None or self._drafting.rests)

    def _follow(self, step: InFlightStep, failures: list[Failure]) -> InFlightStep | None:
        """Submit the step after one with drafts before that is read: the device knows its tokens,
        how many count, and the next drafts. Not if these have chances by which the host chooses, or
        if best tokens are wanted, whose rows it must know."""
        drafting, pending = self._drafting, step.submitted.drafts
        if not self.runs_ahead or drafting is None or drafting.rests or not step.submitted.is_drawn:
            return None
        if pending is None or pending.chances is not None:
            return None
        if any(sequence.request.params.logprobs for sequence in step.sampled):
            return None
        scheduled = self._scheduler.follow(step.scheduled, [DRAFTED] * pending.num_drafts)
        rows = [self._sampling_row(item.sequence) for item in scheduled]
        how = rows, self._num_wanted(step.sampled) if rows else 0
        following = self._sample_step(self._start(failures, scheduled, *how), failures)
        if following is not None:
            following.is_ahead = True
        return following

    def _num_wanted(self, sequences: list[SequenceState]) -> int:
        drafting, drafter = self._drafting, self._runner.drafter
        assert drafting is not None
        assert drafter is not None
        return drafting.num_wanted(sequences, all_or_none=drafter.makes_all)

    def next_round(self) -> StepOutcome | None:
        """The next tokens of a step with drafts, once the previous ones are accepted. None if there
        are no more; sequence lengths then match the answers."""
        step = self._accepting
        if step is None:
            return None
        step.going = [place for place in step.going if self._goes_on(step, place)]
        if not step.going:
            self._settle(step)
            return None
        outcome, sequences = StepOutcome(), [step.sampled[place] for place in step.going]
        for sequence in sequences:
            sequence.num_accepted += 1
        try:
            missing = [p for p in step.going if len(step.answers[p]) <= step.taken[p]]
            if missing:
                rows = [self._sampling_row(step.sampled[place]) for place in missing]
                self._runner.sample_round(step.submitted, missing, rows)
                for place, answer in zip(missing, self._runner.read(step.submitted), strict=True):
                    step.answers[place] += answer
            failures = step.submitted.failures if missing else {}
            failed = {missing[row]: error for row, error in failures.items()}
        except Exception as error:
            outcome.failures.append((sequences, error))
            step.going = []
            return outcome
        for place, sequence in zip(step.going, sequences, strict=True):
            result = step.answers[place][step.taken[place]]
            if found := failed.get(place) or self._scheduler.check_finite(sequence, result.logprob):
                outcome.failures.append(([sequence], found))
            else:
                outcome.results.append((sequence, result))
                step.taken[place] += 1
        return outcome

    def _goes_on(self, step: InFlightStep, place: int) -> bool:
        """Whether the last accepted token equals its draft."""
        sequence, drafts, count = step.sampled[place], step.drafts[place], step.taken[place]
        if not self._is_live(sequence) or count > len(drafts):
            return False
        if step.submitted.is_drawn:
            return count < len(step.answers[place])
        return drafts[count - 1] == sequence.token_ids[-1]

    def _settle(self, step: InFlightStep) -> None:
        """Finish a step, once all its tokens are accepted."""
        self._accepting = None
        drafting = self._drafting
        assert drafting is not None
        if step.submitted.verify is not None:
            for item, rows, count in zip(step.scheduled, step.num_rows, step.taken, strict=True):
                drafting.observe(item.sequence, rows - 1, count - 1)
                if item.sequence.pages is not None:  # otherwise it has ended
                    self._runner.pages.retract(item.sequence.pages, item.num_new - count)
            ahead = () if self._ahead is None else self._ahead.scheduled
            self._scheduler.done(step.scheduled, ahead, has_tokens=True)
        drafting.check_given([sequence for sequence in step.sampled if self._is_live(sequence)])
        if not step.submitted.is_drawn:
            places = [place for place, s in enumerate(step.sampled) if self._is_live(s)]
            self._queue_drafts(step, places, step.taken)
        if self._ahead is None:
            self._collect_drafts(step)
        if step.is_plain:
            drafting.pass_step([s for s in step.sampled if self._is_live(s)])
        self._time(drafting, step)

    def _queue_drafts(
        self, step: InFlightStep, places: list[int], counts: Sequence[int] = ()
    ) -> None:
        """Run the model's draft blocks: they must see every token, but draft only where wanted."""
        drafting = self._drafting
        if drafting is None or self._runner.drafter is None or drafting.is_off:
            return
        wanted = 0 if step.is_plain else self._num_wanted([step.sampled[p] for p in places])
        places = places if wanted else []
        if not places and not drafting.needs_keys and step.submitted.shape.one_each:
            return
        try:
            rows = []
            if counts:
                sampling = (self._sampling_row(step.sampled[place]) for place in places)
                rows = [replace(row, mask=None) for row in sampling]
            self._runner.queue_drafts(step.submitted, places, wanted, counts, rows)
        except Exception as error:  # answers go on without drafts
            drafting.switch_off(error)

    def _collect_drafts(self, step: InFlightStep) -> None:
        drafting, pending = self._drafting, step.submitted.drafts
        if drafting is None or pending is None:
            return
        try:
            for place, found in pending.wait().items():
                sequence = step.sampled[place]
                if self._is_live(sequence) and sequence.may_draft:
                    drafting.give(sequence, found.token_ids, found.chances)
        except Exception as error:
            drafting.switch_off(error)

    def _time(self, drafting: Drafting, step: InFlightStep) -> None:
        """Time a step; one that ran ahead counts from the end of the previous step."""
        self._num_waited = 0 if step.is_ahead else self._num_waited + 1
        now = time.perf_counter()
        before, self._settled = self._settled, (step.is_ahead, now)
        if not all(item.num_new == 1 + len(item.drafts) for item in step.scheduled):
            return
        begin = step.begin
        if step.is_ahead:
            if step.is_plain and not before[0]:
                return
            begin = before[1]
        rows = sum(step.num_rows)
        sequences = [item.sequence for item in step.scheduled]
        ms = (now - begin) * 1e3
        typical = self._is_typical(step, rows)
        tokens = sum(step.taken)
        drafting.time_step(sequences, rows, tokens, ms, plain=step.is_plain, typical=typical)

    def _is_typical(self, step: InFlightStep, rows: int) -> bool:
        """Whether a step takes as long as others with its rows: it made as many drafts as it
        verified, and did not wait for the host if few do."""
        drafter, made = self._runner.drafter, step.submitted.drafts
        if drafter is None or drafter.makes_all:
            return True
        if len(step.sampled) == 1 and (made is None or made.num_drafts != rows - 1):
            return False
        return step.is_ahead or not self.runs_ahead or self._num_waited > MANY_WAITED

    def sample_ahead(self) -> list[Failure]:
        """Sample the step in flight if it waited for the tokens just taken."""
        failures: list[Failure] = []
        if self._ahead is not None and not self._ahead.submitted.is_sampled:
            self._ahead = self._sample_step(self._ahead, failures)
        return failures

    def discard_pending(self, sequence: SequenceState) -> None:
        """The token just taken was replaced: discard what was computed from it."""
        if self._ahead is not None and sequence.num_pending:
            self._ahead.dropped.add(sequence)
            sequence.num_pending = 0
            self._scheduler.preempt(sequence)

    def _start(
        self, failures: list[Failure], scheduled: list[ScheduledTokens] | None = None, *how: Any
    ) -> InFlightStep | None:
        """Submit the next step, or the one that is `scheduled` already; `how`: see `submit`."""
        try:
            scheduled = self._scheduler.next_step() if scheduled is None else scheduled
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
            begun = functools.partial(self._scheduler.started, scheduled)
            submitted = self._runner.submit(chunks, begun, *how)
        except Exception as error:  # the step's requests end with the reason; the others go on
            self._scheduler.failed(scheduled)
            failures.append(([item.sequence for item in scheduled], error))
            return None
        sampled = [item.sequence for item in scheduled if item.samples]
        is_plain = self._drafting is None or self._drafting.rests
        step = InFlightStep(scheduled, sampled, chunks, submitted, is_plain=is_plain)
        for sequence in step.sampled:
            sequence.num_pending += 1
        return step

    def _sample_step(
        self, step: InFlightStep | None, failures: list[Failure], *, early: bool = False
    ) -> InFlightStep | None:
        """Sample a step; with `early`, only if that does not depend on tokens in flight."""
        if step is None:
            return None
        if step.submitted.is_sampled:
            return step
        if early and any(s.num_pending > 1 and self._is_guided(s) for s in step.sampled):
            return step
        try:
            rows = [self._sampling_row(sequence) for sequence in step.sampled]
            self._runner.sample(step.submitted, rows)
        except Exception as error:
            failures.append((self._live_of(step), error))
            return None
        if step.submitted.is_drawn:
            self._queue_drafts(step, list(range(len(step.sampled))))
        return step

    def _live_of(self, step: InFlightStep) -> list[SequenceState]:
        return [item.sequence for item in step.scheduled if self._is_live(item.sequence)]


def _chunk(item: ScheduledTokens) -> Chunk:
    sequence = item.sequence
    assert sequence.pages is not None
    start = sequence.num_computed
    new = sequence.token_ids[start : start + item.num_new] or PENDING
    if item.drafts:
        new = [*new[:1], *item.drafts]
    wanted = 1 if item.samples else 0
    following = NEWEST if item.samples else sequence.token_ids[start + item.num_new]
    kept = item.keep_len, item.keep_row
    drafts = len(item.drafts), item.num_unsure
    return Chunk(sequence.pages, new, wanted, *kept, *drafts, following)
