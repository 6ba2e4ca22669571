"""Drafts: tokens proposed for the next step, and how many of them are worth verifying. No tensors.

A drafter proposes; the step verifies (docs/drafting.md). Nothing here can change an answer, only
how many tokens a step adds to it. Verifying costs time, so drafts are taken in the order of their
survival, the chance that they and all before them are right, as long as the step's tokens per
millisecond grow. Costs of steps are measured while they run; survival is the acceptance of the
sequence's own drafts in each place, with old ones forgotten.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsv4.scheduler.sequence import SequenceState

log = logging.getLogger(__name__)

NGRAMS = (4, 3, 2)
MOST_INDEXED = 8192  # newest tokens of a sequence in which a drafter looks
INDEXED_AT_ONCE = 2048  # tokens of a long prompt that are indexed in one step
PRIOR = 0.7  # acceptance of a place before anything is known
FORGET = 0.15  # weight of the newest observation
REST_AFTER, REST_STEPS = 32, 256  # steps without a draft worth its cost, and steps of rest then
FEW_ACCEPTED, MANY_DRAFTS = 0.2, 1000  # worth one warning


class Drafter(Protocol):
    """Drafts for one sequence."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]: ...


class Lookup:
    """Proposes what followed the newest earlier occurrence of the last tokens."""

    def __init__(self, sequence: SequenceState) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # last tokens -> place of what followed
        self._next = -1  # the first token that is not indexed yet

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """`tokens`: all of the sequence; they only grow."""
        end = len(tokens)
        if self._next < 0:
            self._next = max(1, end - MOST_INDEXED)
        for place in range(self._next, min(end, self._next + INDEXED_AT_ONCE)):
            for n in NGRAMS:
                if place >= n:
                    self._places[tuple(tokens[place - n : place])] = place
            self._next = place + 1
        if self._next < end:
            return []
        for n in NGRAMS:
            first = self._places.get(tuple(tokens[end - n :])) if end >= n else None
            if first is not None:
                found: list[int] = []
                for at in range(first, first + most):  # a repetition goes on in its own drafts
                    found.append(tokens[at] if at < end else found[at - end])
                return found
        return []


class Given:
    """Drafts that a block of the model made after the last step."""

    def __init__(self, sequence: SequenceState | None = None) -> None:
        self._at, self._drafts = 0, list[int]()

    def give(self, length: int, drafts: list[int]) -> None:
        """To follow the first `length` tokens."""
        self._at, self._drafts = length, drafts

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        return self._drafts[:most] if len(tokens) == self._at else []


class Acceptance:
    """How often the drafts of a sequence were right, by place, given that those before were."""

    def __init__(self, places: int) -> None:
        self._rates = [PRIOR] * places

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        for place in range(min(num_drafts, num_accepted + 1)):
            right = place < num_accepted
            self._rates[place] += FORGET * (right - self._rates[place])

    def survival(self, num_drafts: int) -> list[float]:
        """Of each draft, the chance that it is accepted."""
        return list(itertools.accumulate(self._rates[:num_drafts], lambda a, b: a * b))


class StepTimes:
    """Milliseconds of steps by their number of rows, as measured; a line between two of them."""

    def __init__(self, ms: dict[int, float] | None = None) -> None:
        self._ms: dict[int, float] = dict(ms or {})

    def observe(self, rows: int, ms: float) -> None:
        known = self._ms.get(rows)
        if known is None:
            self._ms[rows] = ms
        else:  # a step that was held up by something else counts little
            weight = 0.5 if ms < known else 0.1
            self._ms[rows] = known + weight * (min(ms, 2 * known) - known)

    def at(self, rows: int) -> float | None:
        """None: too little is known."""
        known = sorted(self._ms.items())
        if len(known) < 2:
            return None
        below = [pair for pair in known if pair[0] <= rows][-1:] or known[:1]
        above = [pair for pair in known if pair[0] >= rows][:1] or known[-1:]
        (a, low), (b, high) = below[0], above[0]
        if a == b:
            if a == rows:
                return low
            (a, low), (b, high) = known[:2] if rows < a else known[-2:]
        return max(low + (high - low) * (rows - a) / (b - a), 0.0)


def num_worth(
    survivals: Sequence[Sequence[float]], cost: Callable[[int], float | None]
) -> list[int]:
    """How many drafts of each sequence to verify: as many, over all sequences, as give the most
    tokens per millisecond. `cost`: of a step with this many rows, None where it is unknown; then
    all drafts are taken, so that it becomes known."""
    plain = cost(len(survivals))
    if plain is None:
        return [len(drafts) for drafts in survivals]
    # survivals of a sequence never rise, so that the best drafts of all are prefixes
    order = sorted(
        (-chance, place, seq)
        for seq, drafts in enumerate(survivals)
        for place, chance in enumerate(drafts)
    )
    tokens = float(len(survivals))
    best, taken = tokens / plain if plain > 0 else 0.0, 0
    for number, (chance, _, _) in enumerate(order, 1):
        tokens -= chance
        ms = cost(len(survivals) + number)
        if ms is None or (ms > 0 and tokens / ms > best):
            best, taken = (tokens / ms if ms else best), number
    counts = [0] * len(survivals)
    for _, _, seq in order[:taken]:
        counts[seq] += 1
    return counts


@dataclass
class DraftStats:
    """Counters since the start."""

    num_drafts: int = 0  # times that a sequence had drafts verified
    num_tokens: int = 0
    num_accepted: int = 0
    num_failures: int = 0  # drafters that raised
    accepted_by_place: list[int] = field(default_factory=list)


class Drafting:
    """Drafts of all sequences by one kind of drafter."""

    def __init__(
        self,
        most: int,
        vocab_size: int,
        allow: Callable[[SequenceState, list[int]], list[int]] = lambda sequence, drafts: drafts,
        make: Callable[[SequenceState], Drafter] = Lookup,
        room: Callable[[int], int] = lambda num_sequences: 7,
    ) -> None:
        """`allow`: the first drafts of a sequence, as many as its guide can follow. `room`: drafts
        of each sequence for which steps of so many sequences are prepared."""
        self._allow, self._room = allow, room
        self.stats = DraftStats(accepted_by_place=[0] * most)
        self.times = StepTimes()
        self._most, self._vocab_size, self._make = most, vocab_size, make
        self.draft_ms = 0.0  # to make the drafts of a step, where the model makes them
        self._num_idle = 0  # steps since drafts were last worth their cost
        self._rest = 0  # steps left of a rest
        self.is_off = False
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
        """Whether no drafts are proposed, since they do not pay now."""
        return self._rest > 0 or self.is_off

    def switch_off(self, error: Exception) -> None:
        """For good: the drafter of all sequences has failed. Answers go on without drafts."""
        self.is_off = True
        self.stats.num_failures += 1
        log.error("drafting is off: %s", error)

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        """Drafts of each sequence, at most as many as it can take."""
        if self.rests:
            self._rest -= self._rest > 0
            return [[] for _ in wanted]
        limit = min(self._most, self._room(len(wanted)))
        found = [self._of(sequence, min(most, limit)) for sequence, most in wanted]
        chances = [
            sequence.acceptance.survival(len(drafts)) if sequence.acceptance is not None else []
            for (sequence, _), drafts in zip(wanted, found, strict=True)
        ]
        counts = num_worth(chances, lambda rows: self._cost(rows, len(wanted)))
        self._num_idle = 0 if any(counts) or not any(found) else self._num_idle + 1
        if self._num_idle >= REST_AFTER:
            self._num_idle, self._rest = 0, REST_STEPS
            for sequence, _ in wanted:  # tried again afterwards
                sequence.acceptance = None
        return [drafts[:count] for drafts, count in zip(found, counts, strict=True)]

    def _cost(self, rows: int, plain: int) -> float | None:
        ms = self.times.at(rows)
        return ms if ms is None or rows == plain else ms + self.draft_ms

    def _of(self, sequence: SequenceState, most: int) -> list[int]:
        if most < 1 or not sequence.may_draft:
            return []
        if sequence.acceptance is None:
            sequence.acceptance = Acceptance(self._most)
        try:
            drafts = self.drafter_of(sequence).propose(sequence.token_ids, most)[:most]
            known = itertools.takewhile(lambda token: 0 <= token < self._vocab_size, drafts)
            return self._allow(sequence, list(known))
        except Exception as error:  # the answer goes on without drafts
            sequence.may_draft = False
            self.stats.num_failures += 1
            log.error("drafting is off for request %r: %s", sequence.request.id, error)
            return []

    def drafter_of(self, sequence: SequenceState) -> Drafter:
        if sequence.drafter is None:
            sequence.drafter = self._make(sequence)
        return sequence.drafter

    def observe(self, sequence: SequenceState, num_drafts: int, num_accepted: int) -> None:
        """So many drafts of a sequence were verified, and so many of them were right."""
        if not num_drafts:
            return
        stats = self.stats
        stats.num_drafts += 1
        stats.num_tokens += num_drafts
        stats.num_accepted += num_accepted
        for place in range(num_accepted):
            stats.accepted_by_place[place] += 1
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
