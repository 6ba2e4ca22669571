"""`Comm` over torch's process groups: Gloo on CPUs, NCCL on GPUs."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch import Tensor

from dsv4.parallel.comm import as_bytes, share_by_mail
from dsv4.parallel.layout import RankLayout


class TorchComm:
    """Over torch's process groups: `world` of all ranks, `group` of this one's stage."""

    pushes = error = None

    def __init__(self, layout: RankLayout, world: Any, group: Any) -> None:
        self._layout, self._world, self._group = layout, world, group

    @classmethod
    def gloo(
        cls, layout: RankLayout, store: Any, timeout: float, address: str = "127.0.0.1"
    ) -> "TorchComm":
        """On CPUs of one machine. The groups belong to this object alone: a program's own use of
        torch.distributed is untouched. Connections are made here, over the loopback address."""

        distributed: Any = torch.distributed  # these classes have no types
        gloo = distributed.ProcessGroupGloo

        def group(name: str, rank: int, size: int) -> Any:
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=timeout)
            return gloo(distributed.PrefixStore(name, store), rank, size, options)

        world = group("world", layout.rank, layout.world)
        stage = group(f"stage {layout.stage}", layout.tp_rank, layout.tp)
        return cls(layout, world, stage)

    @classmethod
    def nccl(
        cls, layout: RankLayout, store: Any, device: torch.device, timeout: float
    ) -> "TorchComm":
        """On GPUs that do not see each other's memory, or of several nodes. Every communicator is
        made here: one that begins in a captured step, or in a step at all, can hang."""
        distributed: Any = torch.distributed

        def group(name: str, rank: int, size: int) -> Any:
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout)
            prefix = distributed.PrefixStore(name, store)
            made = distributed.ProcessGroupNCCL(prefix, rank, size, options)
            made.eager_connect_single_device(device)
            return made

        world = group("world", layout.rank, layout.world)
        stage = group(f"stage {layout.stage}", layout.tp_rank, layout.tp)
        comm = cls(layout, world, stage)
        word = torch.zeros(1, dtype=torch.int64, device=device)
        comm.share(word)
        comm.gather(word.new_empty(layout.tp, 1), word)
        torch.cuda.synchronize(device)
        return comm

    def gather(self, out: Tensor, x: Tensor) -> None:
        if x.numel():
            self._group._allgather_base(as_bytes(out), as_bytes(x)).wait()

    def exchange(
        self, out: Tensor, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        width = x.shape[1] * x.element_size()
        self._group.alltoall_base(
            as_bytes(out), as_bytes(x), [n * width for n in received], [n * width for n in sent]
        ).wait()

    def send(self, x: Tensor, to: int) -> None:
        if x.numel():
            self._world.send([as_bytes(x)], to, 0).wait()

    def receive(self, out: Tensor, source: int) -> None:
        if out.numel():
            self._world.recv([as_bytes(out)], source, 0).wait()

    def share(self, x: Tensor) -> None:
        share_by_mail(self, self._layout, x)
