"""`Comm` over torch's process groups: Gloo, on the CPUs of one machine."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch import Tensor

from dsv4.parallel.comm import as_bytes
from dsv4.parallel.layout import RankLayout


class TorchComm:
    """Over torch's process groups: `world` of all ranks, `group` of this one's stage."""

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
