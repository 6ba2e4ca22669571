"""Who guesses the next tokens of a sequence; `drafts.py` decides how many are verified."""

from collections.abc import Sequence
from typing import Protocol

NGRAMS = (4, 3, 2)
MOST_INDEXED = 8192  # newest tokens of a sequence that a drafter searches
INDEXED_AT_ONCE = 2048  # tokens of a long prompt indexed per step


class Drafter(Protocol):
    """Drafts for one sequence."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]: ...


class Lookup:
    """Proposes what followed the newest earlier occurrence of the last tokens."""

    def __init__(self, sequence: object) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # last tokens -> place of what followed
        self._next = -1  # the first token that is not indexed yet

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """`tokens`: the whole sequence, which only grows."""
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
                for at in range(first, first + most):  # a repetition continues into its own drafts
                    found.append(tokens[at] if at < end else found[at - end])
                return found
        return []


class Given:
    """Drafts that a block of the model made after the last step."""

    def __init__(self, sequence: object = None) -> None:
        self._at, self._drafts = 0, list[int]()
        self.chances: Sequence[float] = ()  # of each, if those before are right; empty: unknown

    def give(self, length: int, drafts: list[int], chances: Sequence[float] = ()) -> None:
        """Set the drafts that follow the first `length` tokens; -1 where the block's logits were
        NaN."""
        self._at, self._drafts, self.chances = length, drafts, chances

    @property
    def was_nan(self) -> bool:
        """Whether the newest drafts were NaN."""
        return -1 in self._drafts

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        return self._drafts[:most] if len(tokens) == self._at else []
