"""The operator's options, and limits on client requests."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from dsv4.errors import OptionError

log = logging.getLogger(__name__)

# Field limits are in `schemas.py`, conversation limits in `chat`.
MAX_BODY_BYTES = 32 << 20
MAX_BODIES_BYTES = 512 << 20  # total of all bodies being read or processed
SMALL_BYTES = 128 << 10  # a body up to this size is parsed directly on the event loop
MAX_JSON_DEPTH = 128
MAX_JSON_VALUES = 200_000  # keys, strings, lists, objects and literals of a body
MAX_JSON_NUMBERS = 1_300_000  # in lists; a prompt of token ids may fill the context
MAX_QUICK_ENTRIES = 4096  # a response up to this size is serialised on the event loop
MAX_LOGPROBS = 500_000  # log-probabilities of one request's answers, alternatives included
MAX_ALL_LOGPROBS = 2_000_000  # of all requests
MAX_LARGE_WAITING = 64  # bodies above SMALL_BYTES that may wait for a thread
BODY_SECONDS = 30.0  # for a client to send the whole body
HEADER_SECONDS = 10.0  # and for the headers
MAX_HEADER_BYTES = 64 << 10
WRITE_SECONDS = 120.0  # a client that reads nothing for this long is disconnected
KEEP_ALIVE_SECONDS = 10.0  # between keep-alive messages while an answer is pending

_MAX_KEY_FILE_BYTES = 1 << 20

# The publisher's defaults where a client sets no limit, clipped to the room in the context.
DEFAULT_MAX_TOKENS = {"chat": 8192, "thinking": 65536}


@dataclass(frozen=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # empty: any client that reaches the port is served
    priority_keys: tuple[str, ...] = ()  # the subset whose requests may carry a priority
    share_prefixes: bool = False  # also between keys
    names: tuple[str, ...] = ()  # the model's names; empty: its folder's name
    any_model: bool = False  # answer under any model name
    cors_origins: tuple[str, ...] = ()
    max_waiting: int = 256
    drain_seconds: float = 30.0
    trace: Path | None = None  # prompts and raw outputs, one JSON object a line


def clean_keys(keys: list[str], name: str) -> list[str]:
    for key in keys:
        if not key or " " in key or not key.isascii() or not key.isprintable():
            raise OptionError(
                f"{name}: found a key that is empty or has spaces or odd characters, expected "
                "printable ASCII"
            )
    return keys


def clean_origins(origins: list[str]) -> tuple[str, ...]:
    """As browsers send them; another text would never match."""
    for origin in origins:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]+", origin):
            raise OptionError(
                f"--cors-origin is {origin!r}, expected one like https://app.example: in lower "
                "case, without a path or a slash at its end; or '*'"
            )
    return tuple(origins)


def read_keys(path: Path | None, option: str) -> list[str]:
    if path is None:
        return []
    try:
        if path.stat().st_mode & 0o077:
            log.warning("%s: %s can be read by others; chmod 600 keeps it yours", option, path)
        text = path.read_bytes()[:_MAX_KEY_FILE_BYTES].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{option}: cannot be read: {error}") from error
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise OptionError(f"{option}: {path} has no key in it, expected one on each line")
    return clean_keys(keys, option)
