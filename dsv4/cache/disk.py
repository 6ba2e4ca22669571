"""Cold prefixes on disk, where a restarted engine still finds them.

One safetensors file per prefix, named by its key, in a folder named by the model's fingerprint.
Files are written atomically (temporary name, then rename). Each carries its key, its length, the
fingerprint and a digest over these and all values: a damaged, renamed or foreign file is reported,
removed and treated as missing. A full or read-only disk stops the writing, never a request. A
folder in /dev/shm keeps prefixes in main memory.

States contain client data, so only the owner may read or replace them: folder 0700, files 0600.
All access goes through the folder's descriptor and follows no links, so replacing the folder or a
file by a link has no effect.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import stat
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dsv4.cache.geometry import Pool

log = logging.getLogger(__name__)

SUFFIX = ".prefix"
SHARE_OF_FREE = 0.5  # of the disk space free at start
MAX_HEADER_BYTES = 1 << 20  # names, shapes and metadata before a file's values

Shapes = Callable[[dict[Pool, int]], dict[str, tuple[torch.dtype, tuple[int, ...]]]]


class DiskStore:
    def __init__(self, folder: str | Path, model: str, shapes: Shapes) -> None:
        self._model = model
        self._folder = Path(folder) / model[:32]
        self._shapes = shapes
        self._files: OrderedDict[bytes, int] = OrderedDict()  # bytes, least recently used first
        self._can_write = True
        self._limit = 0
        self._at = -1  # descriptor of the folder
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._at = _open_private(self._folder)
            space = os.fstatvfs(self._at)
            self._limit = int(space.f_bavail * space.f_frsize * SHARE_OF_FREE)
            self._scan()
        except OSError as error:
            self._stop_writing(error)

    def __del__(self) -> None:
        if self._at >= 0:
            os.close(self._at)

    def _scan(self) -> None:
        found = []
        for name in os.listdir(self._at):
            if name.endswith(".tmp"):  # left by a killed engine
                os.unlink(name, dir_fd=self._at)
            elif name.endswith(SUFFIX):
                status = os.stat(name, dir_fd=self._at, follow_symlinks=False)
                found.append((status.st_mtime, name, status.st_size))
        for _, name, size in sorted(found):
            try:
                self._files[bytes.fromhex(name.removesuffix(SUFFIX))] = size
            except ValueError:
                log.warning("%s is not a prefix of ours; ignored", self._folder / name)
        self._limit += sum(self._files.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self._files

    def __len__(self) -> int:
        return len(self._files)

    def save(self, key: bytes, length: int, tensors: dict[str, Tensor]) -> None:
        if not self._can_write or key in self._files:
            return
        about = self._about(key, length)
        data = save(tensors, {**about, "digest": _digest(about, tensors)})
        beside = f"{secrets.token_hex(16)}.tmp"
        try:
            self._make_room(len(data))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(beside, flags, 0o600, dir_fd=self._at), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, _name(key), src_dir_fd=self._at, dst_dir_fd=self._at)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(beside, dir_fd=self._at)
            self._stop_writing(error)
            return
        self._files[key] = len(data)

    def load(self, key: bytes, length: int, counts: dict[Pool, int]) -> dict[str, Tensor] | None:
        try:
            data = self._read(key, counts)
            tensors = load(data)
            self._check(_metadata(data), self._about(key, length), tensors, counts)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            path = self._folder / _name(key)
            log.warning("the cached prefix %s cannot be used (%s); it is removed", path, error)
            self.forget(key)
            return None
        self._files.move_to_end(key)
        return tensors

    def _read(self, key: bytes, counts: dict[Pool, int]) -> bytes:
        shapes = self._shapes(counts).values()
        most = sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes) + MAX_HEADER_BYTES
        # O_NONBLOCK: opening a pipe in a file's place must not wait for a writer
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(_name(key), flags, dir_fd=self._at), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > most:
                raise ValueError(f"found {status.st_size} bytes, expected a file of up to {most}")
            return file.read(most)

    def _about(self, key: bytes, length: int) -> dict[str, str]:
        return {"key": key.hex(), "length": str(length), "model": self._model}

    def _check(
        self,
        metadata: dict[str, str],
        about: dict[str, str],
        tensors: dict[str, Tensor],
        counts: dict[Pool, int],
    ) -> None:
        found = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        if found != self._shapes(counts):
            raise ValueError("its tensors have other names, types or shapes than this model's")
        for name, expected in {**about, "digest": _digest(about, tensors)}.items():
            if metadata[name] != expected:
                raise ValueError(f"its {name} is {metadata[name]!r}, expected {expected!r}")

    def _make_room(self, num_bytes: int) -> None:
        while self._files and sum(self._files.values()) + num_bytes > self._limit:
            self.forget(next(iter(self._files)))

    def forget(self, key: bytes) -> None:
        """Remove a prefix, if it is here."""
        self._files.pop(key, None)
        try:
            os.unlink(_name(key), dir_fd=self._at)
        except FileNotFoundError:
            pass  # already gone
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        if self._can_write:
            log.warning("no more prefixes are written to %s: %s", self._folder, error)
        self._can_write = False


def _open_private(folder: Path) -> int:
    """A descriptor of the folder, after making it private to this user."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        owner = os.fstat(descriptor).st_uid
        if owner != os.geteuid():
            raise PermissionError(
                f"the folder belongs to user {owner}, expected {os.geteuid()}; name another one"
            )
        os.fchmod(descriptor, 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _name(key: bytes) -> str:
    return f"{key.hex()}{SUFFIX}"


def _metadata(data: bytes) -> dict[str, str]:
    size = int.from_bytes(data[:8], "little")
    metadata: dict[str, str] = json.loads(data[8 : 8 + size])["__metadata__"]
    return metadata


def _digest(about: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=32)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous().view(torch.uint8)
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
