"""Ranks send each other patterns: do they arrive intact, and how fast?"""

import time

import torch
from torch import Tensor

from dsv4.errors import RankError
from dsv4.parallel.comm import Comm
from dsv4.parallel.layout import RankLayout


def pattern(rank: int, turn: int, nbytes: int, device: torch.device) -> Tensor:
    numbers = torch.arange(nbytes, device=device, dtype=torch.int64)
    return ((numbers * 31 + rank * 17 + turn * 7) % 251).to(torch.uint8)


def probe(
    comm: Comm, layout: RankLayout, nbytes: int, turns: int, device: torch.device
) -> tuple[float, float]:
    """All ranks call this together. Seconds for a gather in the tensor group and for a message to
    the next stage (0 if there is none); a wrong byte raises a `RankError` naming its sender."""
    first, tp = layout.stage * layout.tp, layout.tp
    out = torch.empty(tp, nbytes, dtype=torch.uint8, device=device)
    gather = send = 0.0
    for turn in range(turns):
        mine = pattern(layout.rank, turn, nbytes, device)
        out.fill_(255)
        begin = _now(device)
        if tp > 1:
            comm.gather(out, mine)
            gather += _now(device) - begin
            for place in range(tp):
                _check(out[place], first + place, layout.rank, turn)
        begin = _now(device)
        if not layout.is_first:
            comm.receive(out[0], layout.rank - tp)
            _check(out[0], layout.rank - tp, layout.rank, turn)
        if not layout.is_last:
            comm.send(mine, layout.rank + tp)
            send += _now(device) - begin
    if comm.error is not None and int(comm.error):
        raise RankError(f"rank {layout.rank} waited in vain for place {int(comm.error) - 1}")
    return gather / turns, send / turns


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _check(found: Tensor, sender: int, rank: int, turn: int) -> None:
    wrong = (found != pattern(sender, turn, len(found), found.device)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise RankError(
            f"rank {rank} received {len(wrong)} of {len(found)} bytes from rank {sender} not as "
            f"they were sent, the first at {place}; on PCIe try NCCL_P2P_DISABLE=1"
        )
