"""`Comm` over torch's process groups: Gloo on CPUs, NCCL on GPUs."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch import Tensor

from dsv4.parallel.comm import as_bytes, share_by_mail
from dsv4.parallel.layout import RankLayout


class TorchComm:
    """Process groups: `world` has all ranks, `group` this rank's stage, `logits` rank 0 and the
    rank that sends it logits. Logits have their own group because NCCL keeps a group's sends and
    receives in order: logits would wait for the streams of the next step."""

    pushes = error = None

    def __init__(self, layout: RankLayout, world: Any, group: Any, logits: Any) -> None:
        self._layout, self._world, self._group, self._logits = layout, world, group, logits

    @classmethod
    def gloo(
        cls, layout: RankLayout, store: Any, timeout: float, address: str = "127.0.0.1"
    ) -> "TorchComm":
        """On the CPUs of one machine. The groups belong to this object alone: a program's own use
        of torch.distributed is untouched. Connects here, over the loopback address."""

        distributed: Any = torch.distributed  # these classes have no types
        gloo = distributed.ProcessGroupGloo

        def group(name: str, rank: int, size: int) -> Any:
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=timeout)
            return gloo(distributed.PrefixStore(name, store), rank, size, options)

        return cls(layout, *_groups(layout, group))

    @classmethod
    def nccl(
        cls, layout: RankLayout, store: Any, device: torch.device, timeout: float
    ) -> "TorchComm":
        """On GPUs that cannot access each other's memory, or on several nodes. Creates every
        communicator here: one that starts during a step, captured or not, can hang."""
        distributed: Any = torch.distributed

        def group(name: str, rank: int, size: int) -> Any:
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout)
            prefix = distributed.PrefixStore(name, store)
            made = distributed.ProcessGroupNCCL(prefix, rank, size, options)
            made.eager_connect_single_device(device)
            return made

        comm = cls(layout, *_groups(layout, group))
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

    def receive_logits(self, out: Tensor) -> Callable[[], None]:
        wait: Callable[[], None] = self._logits.recv([as_bytes(out)], 1, 0).wait
        return wait

    def send_logits(self, x: Tensor) -> None:
        self._logits.send([as_bytes(x)], 0, 0).wait()

    def share(self, x: Tensor) -> None:
        share_by_mail(self, self._layout, x)


def _groups(layout: RankLayout, make: Callable[[str, int, int], Any]) -> tuple[Any, Any, Any]:
    """Created in the same order on all ranks, so they cannot deadlock."""
    world = make("world", layout.rank, layout.world)
    stage = make(f"stage {layout.stage}", layout.tp_rank, layout.tp)
    ends, logits = (0, layout.logits_rank), None
    if layout.pp > 1 and layout.rank in ends:
        logits = make("logits", ends.index(layout.rank), 2)
    return world, stage, logits
