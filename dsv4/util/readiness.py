"""Which connections can be read or written now. `select.select` refuses descriptors above 1023,
which a server with many clients has; this takes any, and no descriptor of its own."""

import select
from collections.abc import Sequence
from typing import Protocol, TypeVar


class HasFileno(Protocol):
    def fileno(self) -> int: ...


Connection = TypeVar("Connection", bound=HasFileno | int)


def readable(connections: Sequence[Connection], seconds: float) -> list[Connection]:
    """Those with something to read, or whose end is to be read; waits up to `seconds` for one.
    Raises OSError if one is closed at this end."""
    return _ready(connections, select.POLLIN, seconds)


def writable(connections: Sequence[Connection], seconds: float) -> list[Connection]:
    return _ready(connections, select.POLLOUT, seconds)


def _ready(connections: Sequence[Connection], event: int, seconds: float) -> list[Connection]:
    found = {c if isinstance(c, int) else c.fileno(): c for c in connections}
    if min(found, default=0) < 0:
        raise OSError("a connection is closed")
    poll = select.poll()
    for number in found:
        poll.register(number, event)
    ready = poll.poll(max(seconds, 0.0) * 1000)
    if any(events & select.POLLNVAL for _, events in ready):
        raise OSError("a connection was closed while it was waited for")
    return [found[number] for number, _ in ready]
