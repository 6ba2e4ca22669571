"""Tensors as views of memory-mapped files. Bytes are reinterpreted, never converted."""

import logging
import mmap
from pathlib import Path

import torch

from dsv4.checkpoint.files.header import TensorInfo
from dsv4.errors import CheckpointError

log = logging.getLogger(__name__)

# E8M0 scales and packed nibbles stay bytes: a converting copy would turn exponents into numbers
TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.uint8,
    "F4": torch.uint8,
    "F8_E8M0": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}
_MAX_OPEN = 4
_HUGE = 4 << 20


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a weight. Large ones request huge pages: page faults of 4 kB pages cost as much
    as the copy itself."""
    count = 1
    for size in shape:
        count *= size
    nbytes = count * dtype.itemsize
    if nbytes < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        log.debug("this kernel has no huge pages; loading is slower")
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


class MappedFiles:
    """Maps files on demand and releases the oldest; views keep their file alive."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def tensor(self, info: TensorInfo) -> torch.Tensor:
        """The tensor as a view of its file. Treat it as read-only: copy before modifying it."""
        dtype = TORCH_DTYPES.get(info.dtype)
        if dtype is None:
            raise CheckpointError(f"{info.file}: tensor {info.name!r} has dtype {info.dtype}")
        shape = info.shape
        if info.dtype == "F4":
            shape = (*shape[:-1], shape[-1] // 2)
        if info.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        mapping = self._map(info.file)
        if len(mapping) < info.stop:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} ends at byte {info.stop}, the file now has "
                f"{len(mapping)}; it changed while it was read"
            )
        raw = torch.frombuffer(mapping, dtype=torch.uint8, count=info.nbytes, offset=info.start)
        if info.start % dtype.itemsize:
            raw = raw.clone()  # unaligned: legal, but slow on some processors
        return raw.view(dtype).reshape(shape)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            if len(self._maps) >= _MAX_OPEN:
                self._maps.pop(next(iter(self._maps)))
            try:
                with open(path, "rb") as file:
                    # a private mapping: torch requires writable memory; nothing is ever written
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path}: cannot be mapped ({error})") from error
        return self._maps[path]

    def close(self) -> None:
        self._maps.clear()
