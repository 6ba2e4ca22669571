"""How ranks hand tensors to each other. Nothing here adds: no sum ever crosses ranks.

A rank sends finished rows or partial sums; the receiver adds them in a fixed order. So results
depend neither on a library's reduction order nor on the number of ranks.

`gather` and `exchange` are collective: all ranks of a tensor group call them in the same order.
`send` and `receive` are between any two ranks. Tensors travel as bytes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dsv4.parallel.layout import RankLayout


class Pushes(Protocol):
    """Exchanges inside a tensor group that also sum what arrives, in one launch each, for ranks
    that can write to each other's memory."""

    def to_owners(self, x: Tensor, per_owner: int) -> Tensor:
        """Row t of `x` `[rows, width]` to rank `t // per_owner` -> `[own rows, ranks * width]`."""
        ...

    def sum_ranges(self, values: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`values` fp32 `[own ranges, rows, size]` -> the sum of all ranks' ranges, scaled."""
        ...

    def sum_pairs(
        self, parts: Tensor, experts: Tensor, shared: Tensor | None, per_owner: int | None
    ) -> Tensor:
        """`parts` `[rows, places, ranges, size]`, for pairs with `experts` >= 0 -> sums of the
        owned rows (`per_owner` None: all). `shared`: for these rows; None: the last place."""
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
        """`sent[i]` rows of `x`, in order, go to place i; `out` gets `received[i]` rows from it."""
        ...

    def send(self, x: Tensor, to: int) -> None: ...

    def receive(self, out: Tensor, source: int) -> None: ...

    def receive_logits(self, out: Tensor) -> Callable[[], None]:
        """On rank 0: start receiving from the last stage; call the result to finish. So the last
        stage need not wait for rank 0, which may be sending the next step. They arrive in order."""
        ...

    def send_logits(self, x: Tensor) -> None: ...

    def share(self, x: Tensor) -> None:
        """Copy rank 0's `x` to every rank."""
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
    """`share` for back ends that have nothing better."""
    if layout.rank:
        comm.receive(x, 0)
        return
    for rank in range(1, layout.world):
        comm.send(x, rank)


def as_bytes(x: Tensor) -> Tensor:
    """The same memory as flat bytes: back ends do not support all dtypes."""
    assert x.is_contiguous(), "only contiguous tensors travel"
    return x.view(-1).view(torch.uint8)
