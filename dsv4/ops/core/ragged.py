"""The ragged batch: several sequences, each with consecutive rows of new tokens."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """Index tensors (int64) of one step over `tokens` new tokens of `sequences` sequences.

    The new tokens of a sequence are consecutive rows with consecutive positions. Padding rows may
    follow the last sequence, with token id and position -1; they do not change the state and visit
    no expert, and their results are undefined. A padding sequence has no tokens:
    `starts == ends == 0`.
    """

    positions: Tensor  # [tokens] absolute position of each new token
    seq_idx: Tensor  # [tokens] which sequence a token belongs to
    first_rows: Tensor  # [sequences] row of the sequence's first new token
    starts: Tensor  # [sequences] position of that token
    ends: Tensor  # [sequences] position after its last new token
    slots: Tensor  # [sequences] slot of the sequence's fixed-size state
    keep: "Kept | None" = None
    is_padded: bool = False  # may contain padding, so rows and sequences need not match
    is_few: bool = False  # at most 8 rows per sequence, none beyond the next multiple of 128

    @cached_property
    def shared(self) -> dict[Any, Any]:
        """A cache that a step's layers share on a CPU; the tensors stay fixed during a step."""
        return {}

    @property
    def device(self) -> torch.device:
        return self.positions.device

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def one_each(self) -> bool:
        """Whether row `i` is the only new token of sequence `i`."""
        return not self.is_padded and self.num_tokens == self.starts.shape[0]

    @property
    def appends_at_once(self) -> bool:
        """Whether its tokens overwrite no compressor row that its blocks read: of 16 rows (ratio 4)
        a block reads the 7 before the step's tokens, of 128 rows those of its own block."""
        return self.one_each or self.is_few


@dataclass(frozen=True)
class Kept:
    """Boundaries inside the new tokens at which state is saved, at most one per sequence."""

    ends: Tensor  # [sequences] length at the boundary, at least 4 beyond the start; 0: none
    rows: Tensor  # [sequences] destination of the compressor rows carried over it


def make_ragged(
    starts: list[int], num_new: list[int], slots: list[int], device: torch.device
) -> Ragged:
    """A batch in which sequence `i` contributes `num_new[i]` tokens from `starts[i]` on."""
    long = torch.int64
    counts = torch.tensor(num_new, dtype=long)
    begin = torch.tensor(starts, dtype=long)
    seq_idx = torch.repeat_interleave(torch.arange(len(starts)), counts)
    first_rows = torch.cumsum(counts, 0) - counts
    rows = torch.arange(int(counts.sum()))
    positions = rows - first_rows[seq_idx] + begin[seq_idx]

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=long)

    return Ragged(
        positions=moved(positions),
        seq_idx=moved(seq_idx),
        first_rows=moved(first_rows),
        starts=moved(begin),
        ends=moved(begin + counts),
        slots=moved(torch.tensor(slots)),
    )
