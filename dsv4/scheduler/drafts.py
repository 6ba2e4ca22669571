"""Drafts, and how many are worth verifying. No tensors.

A drafter proposes; the step verifies (docs/drafting.md). Nothing here can change an answer, only
how many tokens a step adds to it. Verifying costs time, so drafts are taken in order of survival,
the chance that they and all before them are right, as long as that raises the step's tokens per
millisecond above plain decoding. Step costs are measured at run time; survival is the acceptance
rate of the sequence's own drafts at each place, with old ones forgotten.

When drafts do not pay off, drafting *rests*: steps are plain, which also measures their cost. A
rest is twice as long as the last one if drafts did not pay off in between.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4.cache.geometry import SHARED_TOKENS
from dsv4.errors import KernelError
from dsv4.scheduler.acceptance import Acceptance
from dsv4.scheduler.drafters import Drafter, Given, Lookup
from dsv4.scheduler.sequence import SequenceState

log = logging.getLogger(__name__)

REST_AFTER = 4  # steps in a row without a draft worth its cost
REST_STEPS, LONGEST_REST = 512, 4096
LEARN_STEPS = 8  # plain ones, if their cost is unknown
PAYS_AFTER = 64  # steps with drafts after which they count as paying off
GAIN_WEIGHT, FIRST_WEIGHT = 0.02, 0.04  # weight of the newest step; of the first
LEAST_GAIN = 0.88, 0.93  # in tokens per ms relative to plain decoding: at first, and later
TRIES = 2  # measurements of a row count before its cost counts as known
JUDGED_AFTER = 16  # steps with drafts: the first ones are slow for other reasons too
FEW_ACCEPTED, MANY_DRAFTS = 0.2, 1000  # worth one warning


class StepTimes:
    """Milliseconds of steps by row count, as measured; linear in between, unknown above: further
    rows often cost less than the last, since they share experts."""

    def __init__(self, ms: dict[int, float] | None = None) -> None:
        self._ms: dict[int, float] = dict(ms or {})
        self._num_tries = dict.fromkeys(self._ms, TRIES)

    def observe(self, rows: int, ms: float) -> None:
        known = self._ms.get(rows)
        self._num_tries[rows] = self._num_tries.get(rows, 0) + 1
        if known is None or (self._num_tries[rows] <= TRIES and ms < known):
            self._ms[rows] = ms
        else:  # a step that was held up by something else counts little
            weight = 0.5 if ms < known else 0.1
            self._ms[rows] = known + weight * (min(ms, 2 * known) - known)

    def at(self, rows: int, plain: tuple[int, float] | None = None) -> float | None:
        """None: too little is known. `plain`: rows and milliseconds of a step without drafts, which
        counts as measured too."""
        if rows in self._ms:
            return self._ms[rows] if self._num_tries[rows] >= TRIES else None
        known = sorted({**dict([plain] if plain else []), **self._ms}.items())
        if len(known) < 2 or rows > known[-1][0]:
            return None
        below = [pair for pair in known if pair[0] <= rows][-1:] or known[:1]
        above = [pair for pair in known if pair[0] >= rows][:1]
        (a, low), (b, high) = below[0], above[0]
        if a == b:
            (a, low), (b, high) = known[:2]
        return max(low + (high - low) * (rows - a) / (b - a), 0.0)

    def near(self, rows: int) -> float | None:
        """For about this many rows: in between of, or nearest to, those measured within a factor of
        two; None if there are none."""
        if rows in self._ms:
            return self._ms[rows]
        known = [r for r in sorted(self._ms) if r <= 2 * rows and rows <= 2 * r]
        if not known:
            return None
        between = self.at(rows) if len(known) > 1 else None
        nearest = min(known, key=lambda r: abs(r - rows))
        return self._ms[nearest] if between is None else between


def num_worth(
    survivals: Sequence[Sequence[float]],
    cost: Callable[[int], float | None],
    numbers: Sequence[int] = (),
) -> list[int]:
    """How many drafts of each sequence to verify: the number, over all sequences, that gives the
    most tokens per millisecond. `cost`: of a step with this many rows, None if unknown. Then the
    next number is tried after those that are known to pay off, to find out. A single sequence gets
    one of `numbers`, if given: others would leave rows of a step unused."""
    plain = cost(len(survivals))
    # survivals of a sequence never rise, so the best drafts overall are prefixes
    order = sorted(
        (-chance, place, seq)
        for seq, drafts in enumerate(survivals)
        for place, chance in enumerate(drafts)
    )
    tokens = float(len(survivals))
    best, taken, tried, before = tokens / plain if plain else 0.0, 0, -1, 0
    for number, (chance, place, _) in enumerate(order, 1):
        tokens -= chance
        leaves_rows = len(survivals) == 1 and numbers and number not in numbers
        if leaves_rows and number < len(order):
            continue
        ms = cost(len(survivals) + number)
        if ms is None:
            if tried < 0 and taken == before:
                tried = place
            if place > tried:
                break
            taken = number
        elif ms > 0 and tokens / ms > best:
            best, taken = tokens / ms, number
        before = number
    counts = [0] * len(survivals)
    for _, _, seq in order[:taken]:
        counts[seq] += 1
    return counts


@dataclass
class DraftStats:
    """Counters since the start."""

    num_drafts: int = 0  # times a sequence had drafts verified
    num_tokens: int = 0
    num_accepted: int = 0
    num_failures: int = 0  # drafters and guides that raised
    accepted_by_place: list[int] = field(default_factory=list)


class Drafting:
    """Drafts of all sequences by one kind of drafter."""

    def __init__(
        self,
        most: int,
        vocab_size: int,
        allow: Callable[[SequenceState, list[int]], list[int]] = lambda sequence, drafts: drafts,
        make: Callable[[SequenceState], Drafter] = Lookup,
        room: Callable[[int], Sequence[int]] = lambda num_sequences: range(1, 8),
        *,
        learns: bool = False,
        peeks: bool = False,
    ) -> None:
        """`allow`: the leading drafts of a sequence that its guide allows. `room`: the numbers of
        drafts per sequence that fill a step of this many sequences. `learns`: no drafts until the
        cost of plain steps is known. `peeks`: drafters need no step to propose, so plain steps run
        until one has something."""
        self._allow, self._room, self._learns, self._peeks = allow, room, learns, peeks
        self.stats = DraftStats(accepted_by_place=[0] * most)
        self._all: Acceptance | None = None  # of the batch's sequences, if there are several
        self.times = StepTimes()  # of steps with drafts, including making the next ones
        self.plain = StepTimes()  # of steps during a rest
        self._most, self._vocab_size, self._make = most, vocab_size, make
        self._num_idle = 0  # steps since drafts were last worth their cost
        self._rest = 0  # steps left of a rest
        self._waits = False  # until a drafter has something to propose
        self._next_rest = REST_STEPS
        self._gain, self._num_paid = 1.0, 0  # tokens per ms relative to plain, since the last rest
        self.is_off = False
        self.judges = True  # False: every draft is verified, whatever that costs
        self._warned = False

    def counts(self) -> dict[str, Any]:
        """Fields of `Stats`."""
        found = self.stats
        return {
            "num_verified": found.num_drafts,
            "num_drafted": found.num_tokens,
            "num_accepted": found.num_accepted,
            "accepted_by_place": tuple(found.accepted_by_place),
        }

    @property
    def rests(self) -> bool:
        """Whether no drafts are proposed, because they do not pay off now or there are none."""
        return self._rest > 0 or self._waits or self.is_off

    def pass_step(self, sequences: Sequence[SequenceState]) -> None:
        """A plain step of these sequences is done, and its tokens are known."""
        self._rest -= self._rest > 0
        if self._waits and any(self._of(sequence, 1) for sequence in sequences):
            self._waits = False

    def switch_off(self, error: Exception) -> None:
        """Stop drafting for good: a drafter has failed. Answers go on without drafts."""
        self.is_off = True
        self.stats.num_failures += 1
        log.error("drafting is off: %s", error)

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        """Drafts for each sequence, no more than it can take."""
        plain, nothing = self.plain.near(len(wanted)), [list[int]() for _ in wanted]
        if self.rests:
            return nothing
        numbers = self._room(len(wanted))
        limit = min(self._most, max(numbers, default=0))
        if not limit or (self._learns and self.judges and plain is None):
            self._rest = LEARN_STEPS if limit else REST_STEPS
            return nothing
        found = [self._of(sequence, min(most, limit)) for sequence, most in wanted]
        others = self._others(len(wanted))
        chances = [
            sequence.acceptance.survival(
                len(drafts), getattr(sequence.drafter, "chances", ()), others
            )
            if sequence.acceptance is not None
            else []
            for (sequence, _), drafts in zip(wanted, found, strict=True)
        ]
        counts = [len(drafts) for drafts in found]
        if self.judges:
            counts = num_worth(chances, self._cost(len(wanted)), numbers)
        self._num_idle = 0 if any(counts) else self._num_idle + 1
        if self._num_idle >= REST_AFTER and self._peeks and not any(found):
            self._waits, self._num_idle = True, 0
        elif self._num_idle >= REST_AFTER:
            self._begin_rest([sequence for sequence, _ in wanted])
        return [drafts[:count] for drafts, count in zip(found, counts, strict=True)]

    def num_wanted(self, sequences: Sequence[SequenceState], *, all_or_none: bool = False) -> int:
        """How many drafts the model's blocks should make for each of these sequences: no more than
        are worth verifying, as far as is known before they are made; or all, if any."""
        numbers = self._room(len(sequences))
        limit = min(self._most, max(numbers, default=0))
        learns = self._learns and self.judges and self.plain.near(len(sequences)) is None
        if self.rests or not limit or learns:
            return 0
        if not self.judges:
            return self._most if all_or_none else limit
        others = self._others(len(sequences))
        survivals = [self._acceptance(s).expected(limit, others) for s in sequences if s.may_draft]
        survivals += [[] for s in sequences if not s.may_draft]
        most = max(num_worth(survivals, self._cost(len(sequences)), numbers), default=0)
        return self._most if most and all_or_none else most

    def _cost(self, num_sequences: int) -> Callable[[int], float | None]:
        """Of a step, by its rows."""
        plain = self.plain.near(num_sequences)
        if plain is None:
            return self.times.at
        point = num_sequences, plain
        return lambda rows: plain if rows == num_sequences else self.times.at(rows, point)

    def _others(self, num_sequences: int) -> Acceptance | None:
        if num_sequences == 1:
            self._all = None
        elif self._all is None:
            self._all = Acceptance.of_all(self._most)
        return self._all

    def _acceptance(self, sequence: SequenceState) -> Acceptance:
        if sequence.acceptance is None:
            sequence.acceptance = Acceptance(self._most)
        return sequence.acceptance

    def _begin_rest(self, sequences: Sequence[SequenceState]) -> None:
        if self._num_paid >= PAYS_AFTER:
            self._next_rest = REST_STEPS
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        self._num_idle, self._num_paid, self._gain = 0, 0, 1.0
        self._all = None
        self.times = StepTimes()  # measured again afterwards: a slow step may have been chance
        for sequence in sequences:
            sequence.acceptance = None

    @property
    def needs_keys(self) -> bool:
        """Whether draft blocks must see the tokens of plain steps: the rest may end before those
        have left the window."""
        return not self.is_off and self._rest <= SHARED_TOKENS

    def time_step(
        self,
        sequences: Sequence[SequenceState],
        rows: int,
        tokens: int,
        ms: float,
        *,
        plain: bool,
        typical: bool = True,
    ) -> None:
        """Record the time of a step in which all decode, with its rows and new tokens. Only
        `typical` ones tell what so many rows cost."""
        if plain:
            self.plain.observe(len(sequences), ms)
        if plain or not self.judges:
            return
        if rows == len(sequences):  # drafts were made, none verified: neither kind of step
            return
        if typical:
            self.times.observe(rows, ms)
        before = self.plain.near(len(sequences))
        if before is None or ms <= 0 or self.rests:
            return
        gain = tokens / len(sequences) * before / ms
        weight = max(GAIN_WEIGHT, 1 / (1 / FIRST_WEIGHT + self._num_paid))
        self._gain += weight * (min(gain, 8.0) - self._gain)
        self._num_paid += 1
        if self._gain < LEAST_GAIN[self._num_paid >= JUDGED_AFTER]:
            self._begin_rest(sequences)

    def _of(self, sequence: SequenceState, most: int) -> list[int]:
        if most < 1 or self.is_off or not sequence.may_draft:
            return []
        self._acceptance(sequence)
        try:
            drafts = self._drafter_of(sequence).propose(sequence.token_ids, most)[:most]
            ids = list(itertools.takewhile(lambda token: 0 <= token < self._vocab_size, drafts))
        except Exception as error:  # answers go on without drafts
            self.switch_off(error)
            return []
        try:
            return self._allow(sequence, ids)
        except Exception as error:  # a request's guide does not decide about the others
            sequence.may_draft = False
            self.stats.num_failures += 1
            log.error("drafting is off for request %r: %s", sequence.request.id, error)
            return []

    def _drafter_of(self, sequence: SequenceState) -> Drafter:
        if sequence.drafter is None:
            sequence.drafter = self._make(sequence)
        return sequence.drafter

    def give(self, sequence: SequenceState, drafts: list[int], chances: Sequence[float]) -> None:
        """Set the drafts that the model's blocks made after a sequence's newest token."""
        drafter = self._drafter_of(sequence)
        assert isinstance(drafter, Given)
        drafter.give(len(sequence.token_ids), drafts, chances)

    def check_given(self, sequences: Sequence[SequenceState]) -> None:
        """These have drawn a token from finite logits: NaN in the drafts before it was the draft
        block's own, not the request's. A cached prefix may lack draft keys if it comes from a rest,
        so only those that have left it behind tell."""
        given = [s.drafter for s in sequences if _computed_its_window(s)]
        if not self.is_off and any(isinstance(d, Given) and d.was_nan for d in given):
            self.switch_off(KernelError("the draft blocks' logits are no numbers (NaN)"))

    def observe(self, sequence: SequenceState, num_drafts: int, num_accepted: int) -> None:
        """Record how many drafts of a sequence were verified in a step with drafts, and how many
        were right."""
        if not num_drafts:
            if sequence.acceptance is not None and self._all is not None:
                sequence.acceptance.approach(self._all)
            return
        stats = self.stats
        stats.num_drafts += 1
        stats.num_tokens += num_drafts
        stats.num_accepted += num_accepted
        for place in range(num_accepted):
            stats.accepted_by_place[place] += 1
        if self._all is not None:
            self._all.observe(num_drafts, num_accepted)
        if sequence.acceptance is not None:
            sequence.acceptance.observe(num_drafts, num_accepted)
        few = stats.accepted_by_place[0] < FEW_ACCEPTED * stats.num_drafts
        if few and stats.num_drafts >= MANY_DRAFTS and not self._warned:
            self._warned = True
            log.warning(
                "of %d first drafts only %d were accepted; is this the model's own drafter?",
                stats.num_drafts,
                stats.accepted_by_place[0],
            )


def _computed_its_window(sequence: SequenceState) -> bool:
    if sequence.num_preemptions:  # it may have begun again from any prefix
        return False
    cached = sequence.num_cached or 0
    return not cached or sequence.num_computed - cached > SHARED_TOKENS
