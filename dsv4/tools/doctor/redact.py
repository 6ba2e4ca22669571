"""Removes what a report attached to an issue must not contain: paths, names of machines and users,
addresses, serial numbers. Error messages may contain all of them."""

import os
import re
import socket
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

_HEX = "[0-9a-fA-F]"
_PATTERNS = (
    re.compile(rf"\b(?:GPU-|MIG-)?{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}\b"),
    re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*"),
    re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"),
)
_PATH = re.compile(
    r"(?<![\w.])(?:~|\.{0,2}|[A-Za-z]:)(?:[/\\][\w.@+ -]*[\w.@+-](?=[/\\]))*[/\\][\w.@+-]+[/\\]?"
)
_FILE = re.compile(r"[\w+-]+(?:\.[A-Za-z]\w{0,10})+")
_SHORTEST = 3  # a user called "a" is in every text
_COMMON = {"root", "user", "localhost", "cuda", "gpu"}


def private_words() -> list[str]:
    """Names of this machine and this user, the longest first."""
    host = socket.gethostname()
    found = {host, host.partition(".")[0], PurePath(os.environ.get("HOME", "")).name}
    found |= {os.environ.get(name, "") for name in ("USER", "LOGNAME")}
    return sorted((w for w in found - _COMMON if len(w) >= _SHORTEST), key=len, reverse=True)


def scrub(value: Any, words: Sequence[str]) -> Any:
    """JSON `value` with dots for private parts of its strings; of a file's path the name stays."""
    if isinstance(value, dict):
        return {scrub(key, words): scrub(item, words) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(item, words) for item in value]
    if not isinstance(value, str):
        return value
    for pattern in _PATTERNS:
        value = pattern.sub("...", value)
    value = _PATH.sub(_file_name, value)
    for word in words:
        value = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", "...", value)
    return value


def _file_name(path: re.Match[str]) -> str:
    name = re.split(r"[/\\]", path[0])[-1]
    return f".../{name}" if _FILE.fullmatch(name) else "..."
