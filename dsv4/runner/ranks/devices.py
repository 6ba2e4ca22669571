"""Which GPU a rank uses, and how a machine's GPUs reach each other."""

import logging
import os
from typing import Any

import torch

from dsv4.config import ModelConfig
from dsv4.errors import OptionError, RankError
from dsv4.parallel.channels import channel_bytes
from dsv4.parallel.comm import Comm
from dsv4.parallel.layout import RankLayout
from dsv4.parallel.probe import probe
from dsv4.parallel.torch_comm import TorchComm
from dsv4.runner.ranks.cluster import check_comm
from dsv4.runner.settings import Settings

SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own variable, for experiments
PROBE_WORDS = 1 << 20
STEADY_NCCL = (2, 30, 4)  # vllm-project/vllm#41725: two DGX Spark

log = logging.getLogger(__name__)


def device_of(device: str, rank: int, each: int) -> str:
    """A rank's device, by its place on a node of `each` ranks; GPU 0 for all if torch may share
    it."""
    return device if device == "cpu" else f"cuda:{0 if _is_shared() else rank % each}"


def check_devices(settings: Settings, layout: RankLayout, nodes: int) -> None:
    """Refuse more ranks than GPUs before anything is read."""
    if settings.device == "cpu":
        return
    each = layout.world // nodes
    found = torch.cuda.device_count()
    if each > found and not _is_shared():
        raise OptionError(
            f"tp {layout.tp} x pp {layout.pp} are {each} ranks on a node, expected at most "
            f"{found}, the GPUs that torch sees{_mask()}; lower tp or pp, or show it more GPUs"
        )


def check_own_gpu(device: str, layout: RankLayout) -> None:
    """On the rank itself: rank 0 sees the GPUs of its own node only."""
    found, needed = torch.cuda.device_count(), (torch.device(device).index or 0) + 1
    if needed > found:
        raise OptionError(
            f"rank {layout.rank} needs GPU {needed} of its node, found {found} there{_mask()}; "
            "every node needs as many as rank 0's"
        )


def choose_comm(asked: str, settings: Settings, layout: RankLayout, nodes: int) -> str:
    """`symmetric` where every GPU may write to every other's memory, else `nccl`; `gloo` on CPUs.
    Rank 0 decides for all."""
    if settings.device == "cpu":
        if asked not in ("auto", "gloo"):
            raise OptionError(f"comm is {asked!r} on a CPU, expected auto or gloo")
        return "gloo"
    check_comm(asked, nodes)
    if nodes > 1:
        _warn_of_old_nccl()
    if nodes > 1 or asked == "nccl":
        return "nccl"
    apart = pairs_apart(layout.world)
    if apart and asked == "symmetric":
        a, b = apart[0]
        raise OptionError(
            f"comm is 'symmetric', found no peer access from cuda:{a} to cuda:{b} (and "
            f"{len(apart) - 1} more pairs), expected it between all GPUs; use comm=auto or nccl, "
            "see nvidia-smi topo -p2p w"
        )
    return "nccl" if apart else "symmetric"


def pairs_apart(count: int) -> list[tuple[int, int]]:
    """Of this machine's first GPUs, pairs whose first cannot write to the second's memory."""
    ranks = range(0 if _is_shared() else count)
    return [
        (a, b)
        for a in ranks
        for b in ranks
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]


def _warn_of_old_nccl() -> None:
    found = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if found < STEADY_NCCL:
        log.warning(
            "NCCL is %s; before %s it was seen to hang between machines. If ranks do not finish a "
            "command, install a newer nvidia-nccl package beside torch",
            *(".".join(map(str, version)) for version in (found, STEADY_NCCL)),
        )


def open_comm(
    kind: str,
    layout: RankLayout,
    config: ModelConfig,
    settings: Settings,
    store: Any,
    timeout: float,
    address: str,
) -> Comm:
    """Called by all ranks together."""
    if kind == "gloo":
        return TorchComm.gloo(layout, store, 2 * timeout, address)
    device = torch.device(settings.device)
    if kind == "nccl":
        over = TorchComm.nccl(layout, store, device, 2 * timeout)
        probe(over, layout, 4 * PROBE_WORDS, 1, device)
        return over
    from dsv4.ops.comm import symmetric_triton  # needs Triton, which a CPU does not

    nbytes = channel_bytes(config, layout, settings.chunk_tokens, settings.max_sequences)
    comm: Comm = symmetric_triton.open_comm(layout, store, device, nbytes, timeout)
    _probe(comm, layout, device)
    return comm


def _probe(comm: Comm, layout: RankLayout, device: torch.device) -> None:
    """Send 4 MB from every rank to every other and check it, before any weight depends on it."""
    words = torch.arange(PROBE_WORDS, dtype=torch.int32, device=device)
    mine = words * 40503 + layout.rank
    found = comm.all(mine)  # type: ignore[attr-defined]
    wrong = [r for r in range(layout.world) if not torch.equal(found[r], mine - layout.rank + r)]
    assert comm.error is not None
    late = int(comm.error)
    if wrong or late:
        raise RankError(
            f"{device}: what rank {wrong[0] if wrong else late - 1} stored in its memory did not "
            "arrive as it was sent, though the driver allows peer access; use comm=nccl, on PCIe "
            "with NCCL_P2P_DISABLE=1 in the environment"
        )


def _mask() -> str:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if seen is None else f" (CUDA_VISIBLE_DEVICES={seen})"


def _is_shared() -> bool:
    return os.environ.get(SHARED_GPU) == "1"
