"""Messages between rank 0 and the other ranks: length-prefixed JSON, then bytes.

Only rank 0 schedules, allocates pages and samples. A *command* is complete: a step is the line of
integers that describes it to the device, so other ranks decide nothing. Commands are numbered; a
missing or repeated one is refused. No torch, no pickle.

    to a rank     load, connect, then commands with pings in between
    from a rank   progress, loaded, ready, done N, failed N, pong N (N: the last command finished);
                  the done of a check carries a sum
"""

import contextlib
import json
import socket
import threading
import zlib
from dataclasses import dataclass
from typing import Any

from dsv4.errors import RankError
from dsv4.util.readiness import writable

LENGTH_BYTES = 4
MAX_HEADER, MAX_LINE = 1 << 24, 1 << 30
# command -> how many numbers it takes; None: depends on the line
COMMANDS: dict[str, int | None] = {
    # tokens, sequences, context, one_each, scored, width; line: step line, then (place, page) pairs
    "step": 6,
    "home_step": None,  # the same for one home, then rows and sequences of each home
    "share": 0,  # rank 0's newest tokens
    "score": None,
    # the first number of copies is the home that has the state, -1: all ranks
    "copy_page": 4,  # pool, source, target
    "save_rows": 3,  # slot, row
    "restore_rows": 3,  # row, slot
    "write_state": None,  # tensor, row, pages; line: their bytes
    "check": 1,  # window page; the answer has its checksum
    "probe": 2,  # bytes, turns: ranks send each other patterns
    "end": 0,
}

RankMessage = dict[str, Any]


@dataclass(frozen=True)
class Command:
    number: int
    kind: str
    numbers: tuple[int, ...] = ()
    line: bytes = b""

    def to_message(self) -> tuple[RankMessage, bytes]:
        check = zlib.crc32(self.line)
        command = {"kind": self.kind, "n": self.number, "numbers": self.numbers, "check": check}
        return command, self.line

    @classmethod
    def from_message(cls, message: RankMessage, line: bytes, expected: int) -> "Command":
        """Refuse anything this version's rank 0 never sends; `expected` is the next number."""
        kind, number, numbers = message.get("kind"), message.get("n"), message.get("numbers")
        if kind not in COMMANDS:
            raise RankError(f"found the command {kind!r}, expected one of {', '.join(COMMANDS)}")
        if number != expected:
            raise RankError(
                f"found command {number!r}, expected {expected}: one is lost or repeated"
            )
        count = COMMANDS[kind]
        if not isinstance(numbers, list) or any(type(value) is not int for value in numbers):
            raise RankError(f"command {number} ({kind}) has {numbers!r}, expected whole numbers")
        if count is not None and len(numbers) != count:
            raise RankError(
                f"command {number} ({kind}) has {len(numbers)} numbers, expected {count}"
            )
        if message.get("check") != zlib.crc32(line):
            raise RankError(f"command {number} ({kind}) arrived damaged")
        return cls(expected, kind, tuple(numbers), line)


class Link:
    """One end of a socket pair. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: RankMessage, line: bytes = b"") -> None:
        header = json.dumps({**message, "size": len(line)}, separators=(",", ":")).encode()
        with self._lock:  # two messages must not mix
            self._connection.sendall(len(header).to_bytes(LENGTH_BYTES, "big") + header + line)

    def try_send(self, message: RankMessage) -> None:
        """Send unless that would block: a rank that hangs must not hold up its watch."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            header = json.dumps({**message, "size": 0}, separators=(",", ":")).encode()
            if writable([self._connection], 0):
                self._connection.sendall(len(header).to_bytes(LENGTH_BYTES, "big") + header)
        finally:
            self._lock.release()

    def receive(self) -> tuple[RankMessage, bytes] | None:
        """The next message; None when the other end is gone."""
        head = self._read(LENGTH_BYTES)
        if head is None:
            return None
        size = int.from_bytes(head, "big")
        if size > MAX_HEADER:
            raise RankError(f"found a header of {size} bytes; the link is out of step")
        header = self._read(size)
        if header is None:
            return None
        try:
            message = json.loads(header)
            length = message["size"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RankError(f"found a message that is no command ({error})") from error
        if type(length) is not int or not 0 <= length <= MAX_LINE:
            raise RankError(f"found a line of {length!r} bytes; the link is out of step")
        line = self._read(length)
        return None if line is None else (message, line)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end may be gone
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a reading thread
        self._connection.close()

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._connection.recv(min(size - len(data), 1 << 20))
            except OSError:  # ConnectionError, and what a cut link ends with: timed out, no route
                return None
            if not part:
                return None
            data += part
        return bytes(data)
