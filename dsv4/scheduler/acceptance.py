"""How likely drafts are to be right, by what became of those before."""

import itertools
import operator
from collections.abc import Sequence

PRIOR, PRIOR_WEIGHT = 0.7, 5  # acceptance of a place before anything is known; worth observations
FORGET = 0.02  # weight of the newest observation, once there are many
FORGET_OF_ALL = 0.01  # the same for what all sequences observe


class Acceptance:
    """How often a sequence's drafts were right, by place, given that those before were. What is
    expected before anything is known comes from the batch's other sequences, if there are any. If a
    drafter reports chances itself, they are scaled by how they turned out."""

    def __init__(self, places: int, forget: float = FORGET) -> None:
        self._forget = forget
        self._rates, self._num_seen = [PRIOR] * places, [PRIOR_WEIGHT] * places
        self._told = [PRIOR] * places  # the chances the drafter reported, on average
        self._proposed: Sequence[float] = ()

    @classmethod
    def of_all(cls, places: int) -> "Acceptance":
        """Of all sequences of a batch."""
        return cls(places, FORGET_OF_ALL)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        for place in range(min(num_drafts, num_accepted + 1)):
            right = place < num_accepted
            self._num_seen[place] += 1
            weight = max(self._forget, 1 / self._num_seen[place])  # at first, a mean
            self._rates[place] += weight * (right - self._rates[place])
            if place < len(self._proposed):
                self._told[place] += weight * (self._proposed[place] - self._told[place])

    def approach(self, others: "Acceptance") -> None:
        """No drafts in a step: what was known ages, or bad luck would keep them away for good."""
        for place, rate in enumerate(others._rates):
            self._rates[place] += self._forget * (rate - self._rates[place])

    def expected(self, num_drafts: int, others: "Acceptance | None" = None) -> list[float]:
        """The chance that each draft is accepted, before they are made."""
        return list(itertools.accumulate(self._given(num_drafts, others), operator.mul))

    def _given(self, num_drafts: int, others: "Acceptance | None") -> list[float]:
        """Rates in which `others` have told what was expected at first."""
        rates = self._rates[:num_drafts]
        if others is None:
            return rates
        known = zip(rates, self._num_seen, others._rates, strict=False)
        return [min(max(r + (o - PRIOR) * PRIOR_WEIGHT / n, 0.0), 1.0) for r, n, o in known]

    def survival(
        self, num_drafts: int, chances: Sequence[float] = (), others: "Acceptance | None" = None
    ) -> list[float]:
        """The chance that each draft is accepted."""
        self._proposed = chances[:num_drafts]
        rates = self._given(num_drafts, others)
        for place, chance in enumerate(self._proposed):
            scale = rates[place] / max(self._told[place], 0.01)
            rates[place] = min(chance * scale, 1.0)
        return list(itertools.accumulate(rates, operator.mul))
