"""How ranks hand tensors to each other. Nothing here adds: no sum ever crosses ranks.

A rank sends finished rows or partial sums; the receiver adds them in a fixed order. So results do
not depend on how a library would have reduced them, nor on the number of ranks.

`gather` and `exchange` are calls of a whole tensor group, in the same order on each of its ranks;
`send` and `receive` are between two ranks of the world. Tensors travel as bytes.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Comm(Protocol):
    """One rank's end. Every call writes into the buffer it is given."""

    def gather(self, out: Tensor, x: Tensor) -> None:
        """`out` `[tp, *x.shape]`: each rank's `x`, by place in the tensor group."""
        ...

    def exchange(
        self, out: Tensor, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        """`sent[i]` rows of `x`, in order, go to place i; `out` has `received[i]` rows of it."""
        ...

    def send(self, x: Tensor, to: int) -> None: ...

    def receive(self, out: Tensor, source: int) -> None: ...


class SingleRankComm:
    """A world of one rank: there is no peer."""

    def gather(self, out: Tensor, x: Tensor) -> None:
        out[0].copy_(x)

    def exchange(
        self, out: Tensor, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        out.copy_(x)

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError(f"a rank alone sends to {to}")

    def receive(self, out: Tensor, source: int) -> None:
        raise AssertionError(f"a rank alone receives from {source}")


def as_bytes(x: Tensor) -> Tensor:
    """The same memory, one byte after the other: back ends do not know all dtypes."""
    assert x.is_contiguous(), "only contiguous tensors travel"
    return x.view(-1).view(torch.uint8)
