"""The ragged batch as ops see it: several sequences, each with its new tokens in a row."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """Index tensors (int64) of one step over `tokens` new tokens of `sequences` sequences.

    The new tokens of a sequence are consecutive rows with consecutive positions. Behind the last
    sequence may come padding rows with token id and position -1, which leave no trace in the
    state and visit no expert; their results hold anything. A padding sequence has no tokens:
    `starts == ends == 0`.
    """

    positions: Tensor  # [tokens] absolute position of each new token
    seq_idx: Tensor  # [tokens] which sequence a token belongs to
    first_rows: Tensor  # [sequences] row of the sequence's first new token
    starts: Tensor  # [sequences] position of that token
    ends: Tensor  # [sequences] position after its last new token
    slots: Tensor  # [sequences] where the sequence's fixed-size state lies
    keep: "Kept | None" = None
    is_padded: bool = False  # padding may be there, so rows and sequences need not match

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


@dataclass(frozen=True)
class Kept:
    """States to keep of boundaries inside the new tokens, one for each sequence at most."""

    ends: Tensor  # [sequences] length at the boundary, at least 4 beyond the start; 0: none
    rows: Tensor  # [sequences] where what the compressors carry over it goes


def make_ragged(
    starts: list[int], num_new: list[int], slots: list[int], device: torch.device
) -> Ragged:
    """The batch in which sequence `i` contributes `num_new[i]` tokens from `starts[i]` on."""
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
