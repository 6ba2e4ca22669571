"""The header of one safetensors file, trusted only after every number in it is checked.

A file is an 8-byte little-endian header length, a JSON header and the data. The checks refuse
invalid headers: offsets that overlap, leave holes or point past the end, shapes whose product
overflows, duplicate names. No torch.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_RANK = 8

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor on disk; `start` and `stop` are offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class OutTensor:
    """A tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        bits = DTYPE_BITS[self.dtype]
        for size in self.shape:
            bits *= size
        return bits // 8


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of one file by name; any contradiction is a CheckpointError."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise CheckpointError(
                    f"{path}: found {size} bytes, too short for a safetensors file; "
                    "the download was cut off, fetch it again"
                )
            length = int.from_bytes(start, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: header length is {length} bytes, expected at most "
                    f"{MAX_HEADER_BYTES}; this is not a safetensors file"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path}: header needs {8 + length} bytes, the file has {size}; "
                    "the download was cut off, fetch it again"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    entries = _parse(path, raw)
    tensors = {
        name: _tensor(path, name, entry, 8 + length)
        for name, entry in entries.items()
        if name != "__metadata__"
    }
    _check_cover(path, tensors, 8 + length, size)
    return tensors


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise CheckpointError(
                        f"{path}: the header names {key!r} twice; the file is broken or forged, "
                        "fetch it again"
                    )
                seen.add(key)
        return found

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the header is not valid JSON ({error}); fetch the file again"
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is a {type(entries).__name__}, not an object")
    return entries


def _tensor(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    def bad(found: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{path}: tensor {name!r}: {found}, expected {expected}; fetch the file again"
        )

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("broken header entry", "dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f"dtype {dtype!r}", "a safetensors dtype")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise bad(f"shape {str(shape)[:80]}", "a list of whole numbers")
    if len(shape) > MAX_RANK:
        raise bad(f"{len(shape)} axes", f"at most {MAX_RANK}")
    two_numbers = isinstance(offsets, list) and len(offsets) == 2
    if not two_numbers or not all(type(n) is int and 0 <= n < 2**63 for n in offsets):
        raise bad(f"data_offsets {str(offsets)[:80]}", "two whole numbers")
    bits = DTYPE_BITS[dtype]
    for n in shape:  # Python integers do not overflow, so a product past 64 bits simply differs
        bits *= n
    begin, end = offsets
    if bits % 8 or end - begin != bits // 8:
        raise bad(f"offsets {begin} to {end} for dtype {dtype} shape {shape}", f"{bits // 8} bytes")
    return TensorInfo(name, dtype, tuple(shape), path, base + begin, base + end)


def _check_cover(path: Path, tensors: dict[str, TensorInfo], base: int, size: int) -> None:
    """The tensors must be contiguous and end where the file ends."""
    end, before = base, "the header"
    for info in sorted(tensors.values(), key=lambda item: (item.start, item.stop)):
        if info.start != end:
            what = "overlaps" if info.start < end else "leaves a hole behind"
            raise CheckpointError(
                f"{path}: tensor {info.name!r} starts at byte {info.start} and {what} "
                f"{before!r}, which ends at {end}; the file is broken, fetch it again"
            )
        end, before = info.stop, info.name
    if end != size:
        what = "cut off" if size < end else "followed by other bytes"
        raise CheckpointError(
            f"{path}: the file has {size} bytes, its header describes {end}; it was {what}, "
            "fetch it again"
        )
