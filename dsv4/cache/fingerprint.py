"""A fingerprint of the checkpoint and the settings that changes with a single bit of the weights.

Every file is hashed once in full; the digests are stored in a small file with the prefixes. A
stored digest stays valid while the file has the same size, times and inode, and samples of every
tensor are unchanged: a tool may reset a file's time, but hardly all of these.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dsv4.util.sizes import size_text, time_text

log = logging.getLogger(__name__)

VERSION = 3  # of the prefix files; other versions are ignored
KEPT = "digests.json"
MAX_HEADER_BYTES = 100_000_000  # as the loader allows
MAX_KEPT_BYTES = 1 << 24
SAMPLE_BYTES = 64  # at the beginning, in the middle and at the end of every tensor
SLOW_BYTES = 10**9  # from here on hashing is slow enough to announce
SAY_SECONDS = 10.0  # between progress messages
THREADS = 8
FILE_SAMPLES, FILE_SAMPLE_BYTES = 16, 4096  # of each file, for `sampled_digest`


def fingerprint(folder: Path, settings: dict[str, Any], kept_in: Path) -> str:
    """Equal only for states equal in every bit. `kept_in`: the folder of stored digests."""
    known = _read_known(kept_in / KEPT)
    files = sorted(folder.glob("*.safetensors"))
    signs = {path: _sign(path) for path in files}
    new = [path for path in files if known.get(str(path.resolve()), {}).get("sign") != signs[path]]
    nbytes = sum(path.stat().st_size for path in new)
    if nbytes >= SLOW_BYTES:
        log.warning("hashing %s of weights once for the prefix cache", size_text(nbytes))
    begin = said = time.monotonic()
    done = 0
    with ThreadPoolExecutor(THREADS) as pool:  # hashlib releases the GIL
        for path, value in zip(new, pool.map(_digest, new), strict=True):
            known[str(path.resolve())] = {"sign": signs[path], "digest": value}
            done += path.stat().st_size
            now = time.monotonic()
            if now - said >= SAY_SECONDS:
                said, rate = now, done / (now - begin)
                text = f"{size_text(rate)}/s, {time_text((nbytes - done) / rate)} left"
                log.warning("hashed %s of %s, %s", size_text(done), size_text(nbytes), text)
    if new:
        _keep(kept_in, known)
    parts = [(path.name, known[str(path.resolve())]["digest"]) for path in files]
    parts.append(("config.json", _digest(folder / "config.json")))
    about = {"version": VERSION, "files": parts, **settings}
    return hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=32).hexdigest()


def sampled_digest(folder: Path) -> str:
    """Tells checkpoints apart in a moment: config, headers and samples of the values."""
    found = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            start = file.read(8)
            found.update(path.name.encode() + start)
            found.update(file.read(int.from_bytes(start, "little")))
            first, size = file.tell(), os.fstat(file.fileno()).st_size
            for sample in range(FILE_SAMPLES):  # a retrained model has the same headers
                file.seek(first + (size - first) * sample // FILE_SAMPLES)
                found.update(file.read(FILE_SAMPLE_BYTES))
    return found.hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _sign(path: Path) -> str:
    """A cheap signature that does not read the whole file."""
    found = path.stat()
    about = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)
    digest = hashlib.blake2b(repr(about).encode(), digest_size=16)
    with open(path, "rb") as file:
        start = file.read(8)
        header = file.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES))
        digest.update(start + header)
        base = 8 + len(header)
        try:
            for name, entry in json.loads(header).items():
                if name == "__metadata__":
                    continue
                first, last = entry["data_offsets"]
                for place in (first, (first + last) // 2, max(first, last - SAMPLE_BYTES)):
                    file.seek(base + place)
                    digest.update(file.read(max(0, min(SAMPLE_BYTES, last - first))))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            pass  # a broken file that the loader has left alone: hashed whole all the same
    return digest.hexdigest()


def _read_known(path: Path) -> dict[str, dict[str, str]]:
    """Digests of earlier runs; none if the file is not private to this user or is damaged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    except OSError as error:
        log.warning("%s is not read (%s); files are digested again", path, error.strerror)
        return {}
    found = os.fstat(descriptor)
    ours = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    if not ours or not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        log.warning("%s is no file of ours alone; files are digested again", path)
        return {}
    with open(descriptor, "rb") as file:
        data = file.read(MAX_KEPT_BYTES)
    try:
        known = json.loads(data)
        return {
            str(name): {"sign": str(e["sign"]), "digest": str(e["digest"])}
            for name, e in known.items()
        }
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        log.warning("%s is damaged; files are digested again", path)
        return {}


def _keep(folder: Path, known: dict[str, dict[str, str]]) -> None:
    beside = folder / f"{secrets.token_hex(16)}.tmp"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(beside, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump(known, file, indent=1)
        os.replace(beside, folder / KEPT)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        log.warning("digests are not kept (%s); the next start reads all files again", error)
