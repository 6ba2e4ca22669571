"""Writes safetensors so that a file under its final name is always complete.

All names, dtypes and shapes of a shard are known up front. It is written under a temporary name,
read back and compared, and only then renamed.
"""

import contextlib
import errno
import json
import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from dsv4.checkpoint.files.header import DTYPE_BITS, OutTensor, read_header
from dsv4.errors import CheckpointError

PARTIAL = ".partial"
_CHUNK = 64 << 20


class ShardWriter:
    """One safetensors file. Tensors may be written in any order, each exactly once."""

    def __init__(self, path: Path, tensors: list[OutTensor]) -> None:
        self.path = path
        self.partial = path.with_name("." + path.name + PARTIAL)
        # wide types first, so every tensor is aligned to its own size, as readers expect
        ordered = sorted(tensors, key=lambda t: (-DTYPE_BITS[t.dtype], t.name))
        self._tensors = {tensor.name: tensor for tensor in ordered}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        self._offsets: dict[str, int] = {}
        for tensor in ordered:
            end = offset + tensor.nbytes
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            self._offsets[tensor.name] = offset
            offset = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        self._head = raw + b" " * (-len(raw) % 8)
        self.nbytes = 8 + len(self._head) + offset
        self._sums: dict[str, int] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> "ShardWriter":
        try:
            self._file = open(self.partial, "w+b")
            self._file.write(len(self._head).to_bytes(8, "little") + self._head)
        except OSError as error:
            raise write_error(self.partial, error) from error
        return self

    def write(self, name: str, data: torch.Tensor) -> None:
        """`data` holds the tensor's bytes, in any dtype of the right size."""
        tensor = self._tensors[name]
        raw = data.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert raw.nbytes == tensor.nbytes, (name, raw.nbytes, tensor)
        assert name not in self._sums, name
        assert self._file is not None
        try:
            self._file.seek(8 + len(self._head) + self._offsets[name])
            self._file.write(raw.data)
        except OSError as error:
            raise write_error(self.partial, error) from error
        self._sums[name] = zlib.crc32(raw.data)

    def finish(self) -> None:
        """Read everything back, compare, and rename the file."""
        assert self._file is not None
        missing = self._tensors.keys() - self._sums.keys()
        assert not missing, missing
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(self.partial, error) from error
        read_header(self.partial)
        for name, tensor in self._tensors.items():
            self._file.seek(8 + len(self._head) + self._offsets[name])
            found, left = 0, tensor.nbytes
            while left:
                block = self._file.read(min(left, _CHUNK))
                if not block:
                    break
                found = zlib.crc32(block, found)
                left -= len(block)
            if left or found != self._sums[name]:
                raise CheckpointError(
                    f"{self.partial}: tensor {name!r} reads back differently from what was "
                    "written; the disk is failing or another process writes to it"
                )
        self._file.close()
        self._file = None
        os.replace(self.partial, self.path)
        sync_folder(self.path.parent)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            # drop buffered data together with the file: a full disk must not mask the original
            # error
            with contextlib.suppress(OSError):
                self._file.close()
        self.partial.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write atomically: the file is complete or absent."""
    partial = path.with_name("." + path.name + PARTIAL)
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise write_error(path, error) from error
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_error(path: Path, error: OSError) -> CheckpointError:
    if error.errno == errno.ENOSPC:
        return CheckpointError(
            f"{path}: the disk is full; free some space and give the same command again, "
            "finished files are kept"
        )
    return CheckpointError(f"{path}: cannot be written ({error.strerror})")
