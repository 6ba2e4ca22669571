"""Splits K of a matrix into ranges. Each is summed separately, then they are added in ascending
order: the split fixes the order of summation, so every kernel that reads the matrix must use it.
`PartialSums` leaves that addition to the consumer, which saves a launch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.formats.quantized import Weight

STEP = 128  # columns of K that one tile of a weight covers
WIDE_PROGRAMS = 512  # K is split until a matrix gives about this many programs

Ranges = Callable[[int, int], tuple[int, int]]


def num_ranges(
    rows: int, columns: int, step: int = STEP, programs: int = WIDE_PROGRAMS, tile_rows: int = 64
) -> tuple[int, int]:
    """(ranges, steps in each) of a whole matrix, a pure function of its shape: about this many
    programs of `tile_rows`, each with four steps or more."""
    steps = -(-columns // step)
    wanted = -(-programs // -(-rows // tile_rows))
    ranges = max(1, min(wanted, columns // (4 * step)))
    per_range = -(-steps // ranges)
    return -(-steps // per_range), per_range


def split_k(weight: Weight, step: int = STEP, ranges_of: Ranges = num_ranges) -> tuple[int, int]:
    """(ranges, steps in each) for a weight that may be a rank's rows of a larger matrix. The
    weight's own `k_ranges` are used if they are whole steps."""
    rows, columns = weight.shape
    if isinstance(weight, torch.Tensor):
        return ranges_of(rows, columns)
    if weight.k_ranges and columns % (weight.k_ranges * step) == 0:
        return weight.k_ranges, columns // weight.k_ranges // step
    return ranges_of(weight.whole_rows or rows, columns)


@dataclass(frozen=True)
class PartialSums:
    """`values` `[groups, ranges, tokens, size]`: ranges are summed first, then groups, each in
    fp32 in ascending order. Channel c is then multiplied by `factor[c * len(factor) // size]` and
    rounded to `dtype`."""

    values: Tensor
    factor: Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape[2:]

    def __getitem__(self, rows: Tensor) -> "PartialSums":
        return PartialSums(self.values[:, :, rows], self.factor, self.dtype)

    def total(self) -> Tensor:
        total = torch.zeros_like(self.values[0, 0], dtype=torch.float32)
        for group in self.values:
            part = torch.zeros_like(total)
            for value in group:
                part = part + value
            total = total + part
        if self.factor is not None:
            total = total * self.factor.repeat_interleave(total.shape[1] // len(self.factor))
        return total.to(self.dtype)
