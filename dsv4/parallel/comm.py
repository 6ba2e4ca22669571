"""How ranks hand tensors to each other. Nothing here adds: no sum ever crosses ranks.

A rank sends finished rows or partial sums; the receiver adds them in a fixed order. So results do
not depend on how a library would have reduced them, nor on the number of ranks.

`gather` and `exchange` are calls of a whole tensor group, in the same order on each of its ranks;
`send` and `receive` are between two ranks of the world. Tensors travel as bytes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dsv4.parallel.layout import RankLayout


class Pushes(Protocol):
    """Exchanges of a tensor group that also add up what arrives, in one launch each: for ranks
    whose memory the others can write."""

    def to_owners(self, x: Tensor, per_owner: int) -> Tensor:
        """Row t of `x` `[rows, width]` to rank `t // per_owner` -> `[own rows, ranks * width]`."""
        ...

    def sum_ranges(self, values: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`values` fp32 `[own ranges, rows, size]` -> the sum of all ranks' ranges, scaled."""
        ...

    def sum_pairs(
        self, parts: Tensor, experts: Tensor, shared: Tensor | None, per_owner: int | None
    ) -> Tensor:
        """`parts` fp32 `[rows, places, ranges, size]`, of pairs whose `experts` are not negative
        -> sums of the owned rows (None: of all). `shared`: of these rows; None: the last place."""
        ...


class Comm(Protocol):
    """One rank's end. Every call writes into the buffer it is given."""

    @property
    def pushes(self) -> Pushes | None: ...

    @property
    def error(self) -> Tensor | None:
        """`[1]` on the device: 1 + the place of a peer that a launch waited for in vain, else 0."""
        ...

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

    def receive_logits(self, out: Tensor) -> Callable[[], None]:
        """On rank 0, of the last stage: begin; the call returned ends it. So the last stage need
        not wait for rank 0, which may be sending the next step. They arrive in order."""
        ...

    def send_logits(self, x: Tensor) -> None: ...

    def share(self, x: Tensor) -> None:
        """Rank 0's `x` on every rank of the world."""
        ...


class SingleRankComm:
    """A world of one rank: there is no peer."""

    pushes = error = None

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

    def receive_logits(self, out: Tensor) -> Callable[[], None]:
        raise AssertionError("a rank alone has its logits")

    def send_logits(self, x: Tensor) -> None:
        raise AssertionError("a rank alone has its logits")

    def share(self, x: Tensor) -> None:
        pass


def share_by_mail(comm: Comm, layout: RankLayout, x: Tensor) -> None:
    """`share` of a back end that has nothing better."""
    if layout.rank:
        comm.receive(x, 0)
        return
    for rank in range(1, layout.world):
        comm.send(x, rank)


def as_bytes(x: Tensor) -> Tensor:
    """The same memory, one byte after the other: back ends do not know all dtypes."""
    assert x.is_contiguous(), "only contiguous tensors travel"
    return x.view(-1).view(torch.uint8)
