# mypy: ignore-errors
"""`Comm` through memory that the GPUs of a node share: one launch per exchange (push_triton.py).

A `PushChannel` is a buffer of two halves and flag words, at equal offsets on all ranks of a group;
torch's symmetric memory makes the peers' addresses. All channels exist before any graph is
captured, and a wait that fails leaves its error word to the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed
import torch.distributed._symmetric_memory
from torch import Tensor

from dsv4.ops.comm import push_triton
from dsv4.ops.comm.push_triton import BLOCK, PROGRAMS, WARPS, WIDE_BLOCK, WIDE_WARPS
from dsv4.ops.core.launch import interpreting, launch_options
from dsv4.parallel.channels import ChannelBytes
from dsv4.parallel.layout import RankLayout


@dataclass(frozen=True)
class PushChannel:
    """One rank's end: `addresses` of every rank's memory, as this rank sees them."""

    place: int
    addresses: Tensor  # [ranks] int64
    half_bytes: int
    rounds: Tensor  # [PROGRAMS] int32
    error: Tensor  # [1] int32
    limit_ns: int
    memory: object = field(repr=False)  # keeps this rank's part of it alive
    phases: dict[str, bool] = field(
        default_factory=lambda: {"PUSH": True, "WAIT": True}, kw_only=True
    )

    @property
    def size(self) -> int:
        return self.addresses.shape[0]

    def launch(self, kernel, before, between, *, phased=True, num_words=0, **constants) -> None:
        """`before`: arguments in front of `addresses`; `between`: behind `place`. `num_words`: of
        the exchange, which must be equal on all ranks."""
        flags_at = 2 * self.half_bytes
        wide = num_words >= 2 * WIDE_BLOCK * PROGRAMS
        block, warps = (WIDE_BLOCK, WIDE_WARPS) if wide else (BLOCK, WARPS)
        constants |= self.phases if phased else {}
        kernel[(PROGRAMS,)](
            *before, self.addresses, self.rounds, self.error, self.place, *between,
            self.half_bytes, flags_at, self.limit_ns, TP=self.size, PROGRAMS=PROGRAMS,
            BLOCK=block, ASM=not interpreting(), **constants, **launch_options(warps),
        )  # fmt: skip


def open_channel(
    name: str, ranks: Sequence[int], rank: int, store, device: torch.device, half_bytes: int,
    error: Tensor, limit_s: float,
) -> PushChannel:  # fmt: skip
    """Called by all `ranks` at once. torch's symmetric memory maps the peers' allocations."""
    place = list(ranks).index(rank)
    if len(ranks) == 1:
        memory = torch.zeros(2 * half_bytes + 4 * PROGRAMS, dtype=torch.uint8, device=device)
        addresses = [memory.data_ptr()]
    else:
        shared = torch.distributed._symmetric_memory._SymmetricMemory
        name = f"dsv4 {name}"
        prefix = torch.distributed.PrefixStore(name, store)
        group = _process_group(name, prefix, place, len(ranks))
        size = 2 * half_bytes + 4 * len(ranks) * PROGRAMS
        held = shared.empty_strided_p2p((size,), (1,), torch.uint8, device)
        held.zero_()
        torch.cuda.synchronize(device)  # a peer's flag must not be overwritten
        handle = shared.rendezvous(held, name)
        memory, addresses = (held, handle, group), list(handle.buffer_ptrs)
    return PushChannel(
        place=place,
        addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
        half_bytes=half_bytes,
        rounds=torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
        error=error,
        limit_ns=int(limit_s * 1e9),
        memory=memory,
    )


def _process_group(name: str, store, place: int, size: int):
    """Registered by name because symmetric memory looks up its store by group name; the Gloo
    backend is otherwise unused."""
    distributed = torch.distributed
    gloo, group = distributed.ProcessGroupGloo, distributed.ProcessGroup(store, place, size)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    made = gloo(distributed.PrefixStore("gloo", store), place, size, options)
    group._register_backend(torch.device("cpu"), distributed.ProcessGroup.BackendType.GLOO, made)
    group._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, group)
    return group


def open_comm(
    layout: RankLayout,
    store,
    device: torch.device,
    nbytes: ChannelBytes,
    limit_s: float,
) -> "SymmetricComm":
    """Channels are opened in one order on all ranks, so none waits for another in a circle."""
    error = torch.zeros(1, dtype=torch.int32, device=device)

    def channel(name: str, ranks: Sequence[int], half: int) -> PushChannel:
        return open_channel(name, ranks, layout.rank, store, device, half, error, limit_s)

    world = channel("world", range(layout.world), nbytes.world)
    tensor = None
    for stage in range(layout.pp):
        group = range(stage * layout.tp, (stage + 1) * layout.tp)
        if layout.rank in group and layout.tp > 1:
            tensor = channel(f"stage {stage}", group, nbytes.tensor)
    stages = [(rank, rank + layout.tp) for rank in range(layout.world - layout.tp)]
    links = dict.fromkeys(stages, nbytes.streams)
    links |= {(layout.logits_rank, 0): nbytes.logits} if layout.pp > 1 else {}
    to, source = {}, {}
    for pair, half in links.items():
        if layout.rank in pair:
            found = channel(f"link {pair[0]} {pair[1]}", pair, half)
            if layout.rank == pair[0]:
                to[pair[1]] = found
            else:
                source[pair[0]] = found
    return SymmetricComm(tensor, world, to, source)


class SymmetricPushes:
    """What the ranks of a tensor group exchange in a layer."""

    def __init__(self, channel: PushChannel) -> None:
        self.channel = channel

    def gather(self, out: Tensor, x: Tensor) -> None:
        """As `Comm.gather`."""
        words, held = _words(x), _words(out)
        num, most = words.numel(), self._most(4 * self.channel.size)
        for first in range(0, num, most):
            last = min(first + most, num)
            arguments = (words, held), (num, first, last)
            self.channel.launch(push_triton.gather_kernel, *arguments, num_words=last - first)

    def to_owners(self, x: Tensor, per_owner: int) -> Tensor:
        """Row t of `x` `[rows, width]` to rank `t // per_owner` -> `[own rows, ranks * width]`."""
        num_rows, tp = x.shape[0], self.channel.size
        out = x.new_empty(self._num_own(num_rows, per_owner), tp * x.shape[1])
        words, held = _words(x), _words(out)
        width = words.numel() // max(num_rows, 1)
        most = self._most(4 * tp * width)
        for first in range(0, per_owner, most):
            last = min(first + most, per_owner)
            arguments = (words, held), (num_rows, per_owner, first, last, width)
            num_words = (last - first) * width
            self.channel.launch(push_triton.rows_kernel, *arguments, num_words=num_words)
        return out

    def _most(self, nbytes: int) -> int:
        """How many items of this size a round can carry, a multiple of 4 if possible."""
        most = self.channel.half_bytes // max(nbytes, 1)
        assert most > 0, f"{nbytes} bytes do not fit {self.channel.half_bytes} of a channel"
        return most // 4 * 4 or most

    def _num_own(self, num_rows: int, per_owner: int) -> int:
        return max(0, min(per_owner, num_rows - self.channel.place * per_owner))

    def sum_ranges(self, values: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`values` fp32 `[ranges of this rank, rows, size]` -> the rows that the ranges of all
        ranks add up to, as `PartialSums.total` does."""
        own, num_rows, size = values.shape
        assert dtype == torch.bfloat16, dtype
        y = torch.empty(num_rows, size, dtype=dtype, device=values.device)
        assert num_rows <= self._most(4 * self.channel.size * own * size), values.shape
        self.channel.launch(
            push_triton.ranges_kernel, (values, y if factor is None else factor, y),
            (num_rows, size), OWN=own, FACTORS=0 if factor is None else len(factor),
        )  # fmt: skip
        return y

    def sum_pairs(
        self, sums: Tensor, experts: Tensor, shared: Tensor | None, per_owner: int | None
    ) -> Tensor:
        """`sums` `[rows, places, ranges, size]`, of pairs whose `experts` are not negative
        -> sums of the owned rows (None: of all). `shared`: of these rows; None: the last place."""
        num_rows, places, ranges, size = sums.shape
        chosen, copies = experts.shape[1], per_owner is None
        per_owner = num_rows if per_owner is None else per_owner
        own = num_rows if copies else self._num_own(num_rows, per_owner)
        y = torch.empty(own, size, dtype=torch.bfloat16, device=sums.device)
        most = self._most(4 * chosen * size)
        for first in range(0, per_owner, most):
            last = min(first + most, per_owner)
            self.channel.launch(
                push_triton.pairs_kernel, (sums, experts, y if shared is None else shared, y),
                (num_rows, per_owner, first, last, size), num_words=(last - first) * size,
                CHOSEN=chosen, PLACES=places, RANGES=ranges, EXTRA=shared is not None,
                COPIES=copies,
            )  # fmt: skip
        return y


class EchoPushes:
    """`Pushes` of place 0 whose peers are memory of this process, all flags raised for good: the
    launches and stores of a rank, to time it without its peers. Each kind and dtype has a channel
    of its own, filled with random numbers once: integers are numbers of experts, evenly chosen, so
    a rank has its share of the pairs of rows that peers would send."""

    def __init__(self, tp: int, half_bytes: int, num_experts: int, device: torch.device) -> None:
        self._tp, self._half_bytes, self._num_experts = tp, half_bytes, num_experts
        self.error = torch.zeros(1, dtype=torch.int32, device=device)
        self._pushes: dict[tuple[str, torch.dtype], SymmetricPushes] = {}

    def gather(self, out: Tensor, x: Tensor) -> None:
        self._of("gather", x.dtype).gather(out, x)

    def to_owners(self, x: Tensor, per_owner: int) -> Tensor:
        return self._of("rows", x.dtype).to_owners(x, per_owner)

    def sum_ranges(self, values: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self._of("ranges", values.dtype).sum_ranges(values, factor, dtype)

    def sum_pairs(
        self, sums: Tensor, experts: Tensor, shared: Tensor | None, per_owner: int | None
    ) -> Tensor:
        return self._of("pairs", torch.float32).sum_pairs(sums, experts, shared, per_owner)

    def _of(self, kind: str, dtype: torch.dtype) -> SymmetricPushes:
        if (kind, dtype) not in self._pushes:
            device, flags_at = self.error.device, 2 * self._half_bytes
            size = flags_at + 4 * self._tp * PROGRAMS
            memory = torch.zeros(self._tp, size, dtype=torch.uint8, device=device)
            memory[0, flags_at:].view(torch.int32).fill_(1 << 30)
            values = memory[0, :flags_at].view(dtype)
            if dtype.is_floating_point:
                values.normal_()
            else:
                values.random_(self._num_experts)
            addresses = [part.data_ptr() for part in memory]
            channel = PushChannel(
                place=0,
                addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
                half_bytes=self._half_bytes,
                rounds=torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
                error=self.error,
                limit_ns=10**9,
                memory=memory,
            )
            self._pushes[kind, dtype] = SymmetricPushes(channel)
        return self._pushes[kind, dtype]


class SymmetricComm:
    """`Comm` of one rank; `links`: channels of two, by the rank at the other end."""

    def __init__(
        self, tensor: PushChannel | None, world: PushChannel, to: dict[int, PushChannel],
        source: dict[int, PushChannel],
    ) -> None:  # fmt: skip
        self.pushes = None if tensor is None else SymmetricPushes(tensor)
        self._world, self._to, self._source = SymmetricPushes(world), to, source
        self.error = world.error

    def gather(self, out: Tensor, x: Tensor) -> None:
        assert self.pushes is not None
        self.pushes.gather(out, x)

    def exchange(
        self, out: Tensor, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        raise AssertionError("rows go to their owners by `pushes`")

    def share(self, x: Tensor) -> None:
        x.copy_(self.all(x)[0])

    def all(self, x: Tensor) -> Tensor:
        """`[ranks of the world, *x.shape]`."""
        out = x.new_empty(self._world.channel.size, *x.shape)
        self._world.gather(out, x)
        return out

    def send(self, x: Tensor, to: int) -> None:
        self._transfer(push_triton.send_kernel, x, self._to[to])

    def receive(self, out: Tensor, source: int) -> None:
        self._transfer(push_triton.receive_kernel, out, self._source[source])

    def receive_logits(self, out: Tensor) -> Callable[[], None]:
        """The launch waits in the stream: it belongs behind all that need not wait. The channel
        holds two rounds, so the last stage goes on meanwhile."""
        [source] = self._source  # no stage lies before the first
        return partial(self.receive, out, source)

    def send_logits(self, x: Tensor) -> None:
        self.send(x, 0)

    def _transfer(self, kernel, x: Tensor, channel: PushChannel) -> None:
        words, most = _words(x), channel.half_bytes // 4
        for first in range(0, words.numel(), most):
            part = words[first : first + most]
            channel.launch(kernel, (part,), (part.numel(),), phased=False, num_words=part.numel())


def _words(x: Tensor) -> Tensor:
    """The same memory as 32-bit words."""
    assert x.is_contiguous(), (x.shape, x.stride())
    assert x.nbytes % 4 == 0, (x.shape, x.dtype)
    return x.view(-1).view(torch.int32) if x.numel() else x.new_empty(0, dtype=torch.int32)
