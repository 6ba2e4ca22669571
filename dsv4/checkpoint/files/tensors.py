"""Tensors, read from their files. Bytes are reinterpreted, never converted."""

import logging
import mmap
import os
import weakref
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
_CHUNK = 64 << 20  # per read: Ctrl-C takes effect between two


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


class TensorFiles:
    """Opens files on demand and closes the oldest.

    Bytes are read, not mapped: where a mapped file was cut off, or its disk fails, touching it
    kills the process (SIGBUS) without a word."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self.close = weakref.finalize(self, _close, self._files)

    def tensor(
        self, info: TensorInfo, rows: range | None = None, place: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The tensor, or a range of its rows, in its own memory: `place`, if it is like it."""
        dtype = TORCH_DTYPES.get(info.dtype)
        if dtype is None:
            raise CheckpointError(f"{info.file}: tensor {info.name!r} has dtype {info.dtype}")
        shape, start, nbytes = info.shape, info.start, info.nbytes
        if rows is not None:
            row_bytes = nbytes // shape[0]
            shape, nbytes = (len(rows), *shape[1:]), len(rows) * row_bytes
            start += rows.start * row_bytes
        if info.dtype == "F4":
            shape = (*shape[:-1], shape[-1] // 2)
        if place is None or (place.dtype, tuple(place.shape)) != (dtype, shape):
            place = empty(shape, dtype)
        if nbytes:
            self._read(info, start, place)
        return place

    def _read(self, info: TensorInfo, start: int, place: torch.Tensor) -> None:
        left, at, size = place.view(-1).view(torch.uint8).numpy().data, start, 0
        try:
            file = self._open(info.file)
            while left:
                count = os.preadv(file, [left[:_CHUNK]], at)
                if not count:
                    size = os.fstat(file).st_size
                    break
                left, at = left[count:], at + count
        except OSError as error:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} cannot be read at byte {at} "
                f"({error.strerror}); check the disk, then fetch the file again"
            ) from error
        if left:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} cannot be read at byte {at}: it ends at byte "
                f"{info.stop}, the file now has {size}; it changed while it was read, fetch it "
                "again"
            )

    def _open(self, path: Path) -> int:
        if path not in self._files:
            if len(self._files) >= _MAX_OPEN:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[path] = os.open(path, os.O_RDONLY)
        return self._files[path]


def _close(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])
