"""Split-K partial sums of a row. The consumer reduces them, which saves a launch or a program that
waits for the others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parts:
    """`values` fp32 `[groups, ranges, tokens, size]`: ranges are summed first, then groups, each in
    ascending order. Channel c is then multiplied by `factor[c * len(factor) // size]` and rounded
    to `dtype`."""

    values: Tensor
    factor: Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape[2:]

    def __getitem__(self, rows: Tensor) -> "Parts":
        return Parts(self.values[:, :, rows], self.factor, self.dtype)

    def total(self) -> Tensor:
        total = torch.zeros_like(self.values[0, 0])
        for group in self.values:
            part = torch.zeros_like(total)
            for value in group:
                part = part + value
            total = total + part
        if self.factor is not None:
            total = total * self.factor.repeat_interleave(total.shape[1] // len(self.factor))
        return total.to(self.dtype)
