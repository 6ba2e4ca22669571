"""Answers with a minimum length: no end marker is allowed before it."""

from collections.abc import Collection

import torch
from torch import Tensor

from dsv4.sampling.guided import Matcher

_WORD_BITS = 32


class MinTokens:
    """Used like a matcher, around one or alone. A guide that is complete still ends the answer."""

    def __init__(
        self, inner: Matcher | None, ends: Collection[int], min_tokens: int, vocab_size: int
    ) -> None:
        self._inner = inner
        self._num_left = min_tokens
        bits = torch.ones(-(-vocab_size // _WORD_BITS) * _WORD_BITS, dtype=torch.int64)
        bits[list(ends)] = 0
        words = (bits.view(-1, _WORD_BITS) << torch.arange(_WORD_BITS)).sum(1)
        self._others = words.where(words < 2**31, words - 2**32).to(torch.int32)

    @property
    def is_stuck(self) -> bool:
        return self._inner is not None and self._inner.is_stuck

    def mask(self) -> Tensor | None:
        """Bits of the tokens that may come next, int32 words; None: every token may."""
        allowed = None if self._inner is None else self._inner.mask()
        if self._num_left <= 0 or self.is_stuck:
            return allowed
        if allowed is None:
            return self._others
        longer = allowed & self._others
        return longer if longer.any() else allowed

    def allowed(self, drafts: list[int]) -> list[int]:
        return drafts if self._inner is None else self._inner.allowed(drafts)

    def replacement(self, token_id: int, ends: Collection[int]) -> int:
        return token_id if self._inner is None else self._inner.replacement(token_id, ends)

    def accept(self, token_id: int) -> bool:
        self._num_left -= 1
        return self._inner is not None and self._inner.accept(token_id)
