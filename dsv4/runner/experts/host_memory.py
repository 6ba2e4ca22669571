"""Host memory for experts: a few large areas, pinned if a GPU reads them.

Areas are mapped directly: torch's pinned-memory allocator would round their sizes up to powers of
two and keep them.
"""

import logging
import mmap
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.errors import CapacityError
from dsv4.runner.settings import available_memory
from dsv4.util.sizes import size_text

log = logging.getLogger(__name__)

AREA_BYTES = 16 << 30
_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
CONTAINER = Path("/sys/fs/cgroup")
_RECLAIMED = ("inactive_file", "active_file")  # page cache, which the kernel reclaims


class HostMemory:
    """`count` blocks of equal size."""

    def __init__(self, count: int, block_bytes: int, *, pinned: bool) -> None:
        self._pinned = pinned
        self._areas: list[Tensor] = []
        self.blocks: list[Tensor] = []
        self._give_back = weakref.finalize(self, _give_back, self._areas, pinned)
        if pinned and count * block_bytes >= AREA_BYTES:
            log.warning("pinning %s of host memory", size_text(count * block_bytes))  # seconds
        begin, per_area = time.perf_counter(), max(1, AREA_BYTES // block_bytes)
        try:
            for first in range(0, count, per_area):
                size = min(per_area, count - first)
                area = self._area(size * block_bytes)
                self.blocks += area.view(size, block_bytes).unbind(0)
        except BaseException:
            self.close()
            raise
        self.seconds = time.perf_counter() - begin
        if pinned:
            whole = size_text(count * block_bytes)
            log.info("pinned %s of host memory in %.1f s", whole, self.seconds)

    def _area(self, nbytes: int) -> Tensor:
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise _exhausted(nbytes, str(error)) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                log.debug("this kernel has no huge pages; pinning is slower")
        area = torch.frombuffer(memory, dtype=torch.uint8)
        if self._pinned:
            area.zero_()  # on all cores; pinning would touch the pages on only one
            status = _runtime().cudaHostRegister(area.data_ptr(), nbytes, _MAPPED)
            if int(status) != 0:
                raise _exhausted(nbytes, f"CUDA error {int(status)} while pinning")
        self._areas.append(area)
        return area

    def close(self) -> None:
        """Free the memory; nothing may read it afterwards."""
        self.blocks.clear()
        self._give_back()


def _give_back(areas: list[Tensor], pinned: bool) -> None:
    while areas:
        area = areas.pop()
        if pinned:
            _runtime().cudaHostUnregister(area.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _exhausted(nbytes: int, why: str) -> CapacityError:
    return CapacityError(
        f"{size_text(nbytes)} of host memory for experts could not be had ({why}); end other "
        "programs, raise the limit of locked memory (ulimit -l), or give more expert_memory"
    )


def free_host_memory() -> int:
    """Bytes free without swapping and within a container's limit."""
    try:
        most, used = (
            int((CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current")
        )
        lines = (CONTAINER / "memory.stat").read_text().splitlines()
        found = dict(line.split() for line in lines)
        used -= sum(int(found.get(name, 0)) for name in _RECLAIMED)
    except (OSError, ValueError):  # no container, or no limit ("max")
        return available_memory()
    return min(available_memory(), most - used)
