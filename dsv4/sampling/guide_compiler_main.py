"""The process that compiles guides: one child per guide, with time and memory limits.

    python -m dsv4.sampling.guide_compiler_main FD

FD is one end of a socket pair. The first JSON line carries the vocabulary, later ones jobs and
cancellations; each answer is a JSON line followed by its payload. When the other end closes, this
process ends with its children.
"""

import base64
import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xgrammar

from dsv4.errors import RequestError
from dsv4.sampling.guide_compiler import tokenizer_info
from dsv4.sampling.guided import compile_grammar, words_of

NUM_CHILDREN = 2
CHILD_BYTES = 2 << 30  # on top of this process's own
MAX_RESULT_BYTES = 64 << 20


CompilerMessage = dict[str, Any]


@dataclass
class _Child:
    number: int
    pid: int
    ends: float
    data: bytearray = field(default_factory=bytearray)


class Host:
    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._received = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(line, selectors.EVENT_READ)
        self._waiting: deque[CompilerMessage] = deque()
        self._children: dict[int, _Child] = {}  # by the descriptor of their pipe
        self._info: Any = None
        self._seconds = 0.0

    def run(self) -> None:
        """Serve until the other end closes."""
        while True:
            while self._waiting and len(self._children) < NUM_CHILDREN:
                self._begin(self._waiting.popleft())
            ends = min((child.ends for child in self._children.values()), default=None)
            wait = None if ends is None else max(ends - time.monotonic(), 0.0)
            for key, _ in self._selector.select(wait):
                if key.fileobj is not self._line:
                    self._read(key.fd)
                elif not self._receive():
                    return
            for descriptor, child in list(self._children.items()):
                if child.ends <= time.monotonic():
                    text = f"it took longer than {self._seconds:g} s to compile; simplify it"
                    self._end(descriptor, text)

    def _receive(self) -> bool:
        part = self._line.recv(1 << 20)
        self._received += part
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        for line in lines:
            self._on_message(json.loads(line))
        return bool(part)

    def _on_message(self, message: CompilerMessage) -> None:
        if message["do"] == "compile":
            self._waiting.append(message)
        elif message["do"] == "cancel":
            number = message["number"]
            self._waiting = deque(job for job in self._waiting if job["number"] != number)
            for descriptor, child in list(self._children.items()):
                if child.number == number:
                    self._end(descriptor, "it was given up")
        else:
            vocabulary = [base64.b64decode(word) for word in message["vocabulary"]]
            self._info = tokenizer_info(vocabulary, message["stop_ids"])
            self._seconds = message["seconds"]

    def _begin(self, job: CompilerMessage) -> None:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(ours)
                self._line.close()  # or the engine would not see that this child's parent is gone
                with open(theirs, "wb") as file:
                    file.write(_answer(job, self._info))
            finally:
                os._exit(0)
        os.close(theirs)
        self._children[ours] = _Child(job["number"], pid, time.monotonic() + self._seconds)
        self._selector.register(ours, selectors.EVENT_READ)

    def _read(self, descriptor: int) -> None:
        child = self._children.get(descriptor)
        if child is None:
            return  # just ended
        part = os.read(descriptor, 1 << 20)
        child.data += part
        if len(child.data) > MAX_RESULT_BYTES:
            text = f"it takes more than {MAX_RESULT_BYTES} bytes compiled; simplify it"
            self._end(descriptor, text)
        elif not part:
            # a child that ran out of memory or crashed sends nothing
            self._end(descriptor, None if child.data else "its compilation failed; simplify it")

    def _end(self, descriptor: int, error: str | None) -> None:
        child = self._children.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        os.kill(child.pid, signal.SIGKILL)  # not yet waited for, so it is still this child
        os.waitpid(child.pid, 0)
        data = bytes(child.data)
        if error is None and data[:1] == b"!":
            error = data[1:].decode()
        head = {
            "number": child.number,
            "error": error,
            "num_bytes": 0 if error is not None else len(data),
        }
        self._line.sendall(json.dumps(head).encode() + b"\n" + (b"" if error else data))


def _answer(job: CompilerMessage, info: Any) -> bytes:
    """In the child: the compiled grammar as JSON, or an error prefixed with "!"."""
    limit = _data_bytes() + CHILD_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        grammar = compile_grammar(compiler, job["kind"], job["text"])
        matcher = xgrammar.GrammarMatcher(grammar)
        words = xgrammar.allocate_token_bitmask(1, info.vocab_size)
        matcher.fill_next_token_bitmask(words)
        if not words.any():
            raise RequestError("no answer can satisfy it")
        return str(grammar.serialize_json()).encode()
    except MemoryError:
        return b"!its compilation took too much memory; simplify it"
    except Exception as error:  # the library raises RuntimeError for whatever it does not support
        return b"!" + words_of(error).encode()


def _data_bytes() -> int:
    """This process's data size, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


def main(arguments: list[str]) -> int:
    # The engine decides when this process ends; ignore signals sent to the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A killed engine resets the line if it left answers unread.
    with socket.socket(fileno=int(arguments[1])) as line, contextlib.suppress(ConnectionError):
        Host(line).run()
    os.killpg(0, signal.SIGKILL)  # with the children; the session is this process's own
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
