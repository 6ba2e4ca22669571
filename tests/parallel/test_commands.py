"""Commands survive the wire; lost, repeated, damaged and senseless ones are refused."""

import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4.errors import RankError
from dsv4.parallel import commands
from dsv4.parallel.commands import COMMANDS, Command, Link
from dsv4.runner.step.line import step_line
from dsv4.runner.step.shape import StepShape
from dsv4.util.readiness import readable, writable

Ends = tuple[Link, Link, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    yield Link(ours), Link(theirs), ours
    ours.close()
    theirs.close()


@pytest.mark.parametrize("seed", range(5))
def test_commands_come_back_as_they_were(ends: Ends, seed: int) -> None:
    rng = random.Random(seed)
    sender, receiver, _ = ends
    commands = []
    for number in range(1, 30):
        kind = rng.choice(list(COMMANDS))
        count = COMMANDS[kind]
        numbers = [
            rng.randrange(-5, 2**40) for _ in range(rng.randrange(9) if count is None else count)
        ]
        commands.append(Command(number, kind, tuple(numbers), rng.randbytes(rng.randrange(3000))))
    writing = threading.Thread(target=lambda: [sender.send(*o.to_message()) for o in commands])
    writing.start()
    for number, command in enumerate(commands, start=1):
        found = receiver.receive()
        assert found is not None
        assert Command.from_message(*found, number) == command
    writing.join()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 7}, "found command 7, expected 5: one is lost or repeated"),
        ({"kind": "dance"}, "found the command 'dance', expected one of step"),
        ({"numbers": [1]}, "command 5 (copy_page) has 1 numbers, expected 4"),
        ({"numbers": [1, 2, "3"]}, "expected whole numbers"),
        ({"numbers": None}, "expected whole numbers"),
        ({"check": 1}, "command 5 (copy_page) arrived damaged"),
    ],
)
def test_commands_that_are_refused(change: dict[str, object], words: str) -> None:
    message, line = Command(5, "copy_page", (-1, 1, 2, 3), b"abc").to_message()
    message = json.loads(json.dumps(message))
    assert Command.from_message(message, line, 5).numbers == (-1, 1, 2, 3)
    with pytest.raises(RankError) as error:
        Command.from_message({**message, **change}, line, 5)
    assert words in str(error.value)


@pytest.mark.parametrize("seed", range(40))
def test_noise_is_refused_or_ends(ends: Ends, seed: int) -> None:
    """Nothing but a RankError, and no wait for bytes that never come."""
    rng = random.Random(seed)
    _, receiver, raw = ends
    header = json.dumps({"kind": "step", "size": 4}).encode()
    good = bytearray(len(header).to_bytes(4, "big") + header + b"line")
    for _ in range(1 + seed % 3):
        good[rng.randrange(len(good))] = rng.randrange(256)
    raw.sendall(good)
    raw.shutdown(socket.SHUT_WR)
    try:
        while receiver.receive() is not None:
            continue
    except RankError:
        return


def test_the_end_of_a_link_is_seen(ends: Ends) -> None:
    _, receiver, raw = ends
    raw.sendall(b"\0\0\0\x20{")
    raw.close()
    assert receiver.receive() is None


def test_a_ping_does_not_wait_for_a_rank_that_reads_nothing(ends: Ends) -> None:
    sender, receiver, raw = ends
    stuck = threading.Thread(target=lambda: sender.send({"kind": "step"}, bytes(1 << 24)))
    stuck.start()
    while raw not in _unwritable(raw):
        pass
    for _ in range(10):
        sender.try_send({"kind": "ping"})
    found = receiver.receive()
    assert found is not None
    assert len(found[1]) == 1 << 24
    stuck.join()


def _unwritable(raw: socket.socket) -> list[socket.socket]:
    return [] if writable([raw], 0.01) else [raw]


def test_descriptors_of_any_number(many_open: None) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert min(ours.fileno(), theirs.fileno()) > 1023
        assert readable([ours, theirs], 0.0) == []
        assert writable([ours, theirs], 0.0) == [ours, theirs]
        Link(ours).try_send({"kind": "ping"})
        assert readable([ours, theirs], 60.0) == [theirs]
        assert readable([ours.fileno(), theirs.fileno()], 0.0) == [theirs.fileno()]
        ours.close()
        assert readable([theirs], 60.0) == [theirs]
        with pytest.raises(OSError, match="is closed"):
            readable([ours], 0.0)
        with pytest.raises(OSError, match="is closed"):
            Link(ours).try_send({"kind": "ping"})  # as the watch of ranks may while they close
        number = theirs.detach()
        os.close(number)
        with pytest.raises(OSError, match="was closed while"):
            readable([number], 0.0)


def test_select_is_used_nowhere() -> None:
    """It raises for descriptors above 1023."""
    package = Path(commands.__file__).parents[1]
    found = [path for path in package.rglob("*.py") if "select.select(" in path.read_text()]
    assert not found


def test_a_decode_command_is_small() -> None:
    """The line of a step of one sequence; it goes to every rank before each token."""
    message, line = Command(
        10**6,
        "step",
        (1, 1, 4096, 1, 0, 1),
        bytes(8 * step_line(StepShape(1, 1, 4096, True)).length),
    ).to_message()
    assert len(json.dumps(message)) + len(line) < 2048
