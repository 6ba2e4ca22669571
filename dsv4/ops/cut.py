"""Splits K of a matrix into ranges. Each is summed separately, then they are added in ascending
order: the split fixes the order of summation, so every kernel that reads the matrix must use it.
"""

from collections.abc import Callable

import torch

from dsv4.formats.quantized import Weight

STEP = 128  # columns of K that one tile of a weight covers
WIDE_PROGRAMS = 512  # K is split until a matrix gives about this many programs

Ranges = Callable[[int, int], tuple[int, int]]


def num_ranges(rows: int, columns: int) -> tuple[int, int]:
    """(ranges, steps of 128 columns in each) of a whole matrix, a pure function of its shape."""
    steps = -(-columns // STEP)
    wanted = -(-WIDE_PROGRAMS // -(-rows // 64))
    ranges = max(1, min(wanted, columns // 512))
    per_range = -(-steps // ranges)
    return -(-steps // per_range), per_range


def cut_of(weight: Weight, step: int = STEP, ranges_of: Ranges = num_ranges) -> tuple[int, int]:
    """(ranges, steps in each) for a weight that may be a rank's rows of a larger matrix. The
    weight's own `k_ranges` are used if they end on steps."""
    rows, columns = weight.shape
    if isinstance(weight, torch.Tensor):
        return ranges_of(rows, columns)
    if weight.k_ranges and columns % (weight.k_ranges * step) == 0:
        return weight.k_ranges, columns // weight.k_ranges // step
    return ranges_of(weight.whole_rows or rows, columns)
