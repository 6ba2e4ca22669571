"""Cold prefixes as files, so that a restarted engine still finds them.

One safetensors file for each prefix, named by its key, in a folder of the model's fingerprint.
A file appears whole or not at all (written beside, then renamed) and carries a digest of its
contents: a damaged, cut or foreign one is reported, removed and counts as not there. A disk that
is full or cannot be written to ends the writing, never a request. A folder in /dev/shm keeps
prefixes in main memory.
"""

import hashlib
import json
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dsv4.cache.geometry import Pool

log = logging.getLogger(__name__)

VERSION = 1
SUFFIX = ".prefix"
SHARE_OF_FREE = 0.5  # of what is free on the disk when the engine starts

Shapes = Callable[[dict[Pool, int]], dict[str, tuple[torch.dtype, tuple[int, ...]]]]


def fingerprint(folder: Path, settings: dict[str, Any]) -> str:
    """Tells states apart that may differ in a bit: the weights' files, and how they are run."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps({"version": VERSION, **settings}, sort_keys=True).encode())
    for path in (*sorted(folder.glob("*.safetensors")), folder / "config.json"):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(2**16))  # the header with all names, shapes and places
            for part in range(1, 17):  # and a sample of the values
                file.seek(stat.st_size * part // 17)
                digest.update(file.read(4096))
    return digest.hexdigest()


class DiskStore:
    def __init__(self, folder: str | Path, model: str, shapes: Shapes) -> None:
        self._model = model
        self._folder = Path(folder) / model
        self._shapes = shapes
        self._files: OrderedDict[bytes, int] = OrderedDict()  # bytes, least recently used first
        self._can_write = True
        self._limit = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._limit = int(shutil.disk_usage(self._folder).free * SHARE_OF_FREE)
            self._scan()
        except OSError as error:
            self._stop_writing(error)

    def _scan(self) -> None:
        for path in self._folder.glob("*.tmp"):  # of an engine that was killed
            path.unlink()
        found = [(path.stat().st_mtime, path) for path in self._folder.glob(f"*{SUFFIX}")]
        for _, path in sorted(found):
            try:
                self._files[bytes.fromhex(path.stem)] = path.stat().st_size
            except ValueError:
                log.warning("%s is not a prefix of ours; ignored", path)
        self._limit += sum(self._files.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self._files

    def __len__(self) -> int:
        return len(self._files)

    def save(self, key: bytes, length: int, tensors: dict[str, Tensor]) -> None:
        if not self._can_write or key in self._files:
            return
        metadata = {"model": self._model, "length": str(length), "digest": _digest(tensors)}
        data = save(tensors, metadata)
        path = self._path(key)
        beside = path.with_suffix(".tmp")
        try:
            self._make_room(len(data))
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            self._stop_writing(error)
            return
        self._files[key] = len(data)

    def load(self, key: bytes, length: int, counts: dict[Pool, int]) -> dict[str, Tensor] | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
            tensors = load(data)
            self._check(_metadata(data), length, tensors, counts)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            log.warning("the cached prefix %s cannot be used (%s); it is removed", path, error)
            self._forget(key)
            return None
        self._files.move_to_end(key)
        return tensors

    def _check(
        self,
        metadata: dict[str, str],
        length: int,
        tensors: dict[str, Tensor],
        counts: dict[Pool, int],
    ) -> None:
        found = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        if found != self._shapes(counts):
            raise ValueError("its tensors have other names, types or shapes than this model's")
        for name, expected in (
            ("model", self._model),
            ("length", str(length)),
            ("digest", _digest(tensors)),
        ):
            if metadata[name] != expected:
                raise ValueError(f"its {name} is {metadata[name]!r}, expected {expected!r}")

    def _make_room(self, num_bytes: int) -> None:
        while self._files and sum(self._files.values()) + num_bytes > self._limit:
            self._forget(next(iter(self._files)))

    def _forget(self, key: bytes) -> None:
        self._files.pop(key, None)
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        if self._can_write:
            log.warning("no more prefixes are written to %s: %s", self._folder, error)
        self._can_write = False

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{SUFFIX}"


def _metadata(data: bytes) -> dict[str, str]:
    size = int.from_bytes(data[:8], "little")
    metadata: dict[str, str] = json.loads(data[8 : 8 + size])["__metadata__"]
    return metadata


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous().view(torch.uint8)
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
