"""The ragged batch as ops see it: several sequences, each with its new tokens in a row."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """Index tensors (int64) of one step over `tokens` new tokens of `sequences` sequences.

    The new tokens of a sequence are consecutive rows with consecutive positions.
    """

    positions: Tensor  # [tokens] absolute position of each new token
    seq_idx: Tensor  # [tokens] which sequence a token belongs to
    first_rows: Tensor  # [sequences] row of the sequence's first new token
    starts: Tensor  # [sequences] position of that token
    ends: Tensor  # [sequences] position after its last new token
    slots: Tensor  # [sequences] where the sequence's fixed-size state lies

    @property
    def device(self) -> torch.device:
        return self.positions.device

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]


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
    tensors = (positions, seq_idx, first_rows, begin, begin + counts, torch.tensor(slots))
    return Ragged(*(tensor.to(device=device, dtype=long) for tensor in tensors))
