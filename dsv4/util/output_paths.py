"""Output files and folders named by the user, checked before work begins.

Missing folders are created. A path that cannot be written is refused up front, not after the work.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from dsv4.errors import OptionError


def check_writable(
    *, files: tuple[Path | None, ...] = (), folders: tuple[Path | None, ...] = ()
) -> None:
    """Refuses paths that cannot be written; existing files are left unchanged."""
    for path in files:
        if path is not None:
            _refusing(path, _try_file)
    for path in folders:
        if path is not None:
            _refusing(path, _try_folder)


def _refusing(path: Path, attempt: Callable[[Path], None]) -> None:
    try:
        attempt(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(f"cannot write {path}: {reason}; choose another place") from error


def _try_file(path: Path) -> None:
    if path.is_dir():
        raise OptionError(f"cannot write {path}: it is a folder, expected a file's name")
    if path.is_char_device():
        return  # devices such as /dev/null
    if path.exists() and not path.is_file():
        raise OptionError(f"cannot write {path}: it is no ordinary file")
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with open(path, "ab"):
        pass
    if is_new:
        path.unlink()


def _try_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise OptionError(f"cannot write into {path}: it is a file, expected a folder")
    path.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path)
    os.close(handle)
    os.unlink(name)
