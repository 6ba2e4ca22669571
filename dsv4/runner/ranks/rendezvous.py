"""Where ranks come from and where they meet: this machine, other nodes, or torchrun processes.

Under torchrun every process runs the same program. `RANK` 0 goes on as rank 0; the others follow
it from `Engine.load` on, and end with it. They find it through torchrun's own store.
"""

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

from dsv4 import __version__
from dsv4.config import EngineConfig
from dsv4.errors import OptionError, RankError
from dsv4.parallel.commands import Link
from dsv4.parallel.fork_server import Member, start_members
from dsv4.parallel.handshake import connect_to, greet, listen
from dsv4.parallel.layout import RankLayout
from dsv4.parallel.nodes import Head

LOOPBACK = "127.0.0.1"
_STORE_SECONDS = 30.0  # least timeout for reaching a store


def torchrun_place() -> tuple[int, int] | None:
    """(rank, world) if torchrun started this process along with others."""
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world is None or "MASTER_ADDR" not in os.environ or world == "1":
        return None
    return int(rank), int(world)


def find_members(choices: EngineConfig, layout: RankLayout, module: str) -> list[Member]:
    """Ranks 1 and up, in order."""
    place, nodes = torchrun_place(), choices.nodes
    if place is not None:
        if place[1] != layout.world:
            raise OptionError(
                f"torchrun started {place[1]} processes, tp x pp is {layout.world}; expected the "
                "same: give tp and pp"
            )
        return _torchrun_members(layout.world, choices.join_timeout)
    if nodes == 1:
        return start_members(layout.world - 1, module)
    assert choices.head is not None
    each = layout.world // nodes
    remote = Head(choices.head, __version__).wait(nodes, each, choices.join_timeout)
    found = start_members(each - 1, module) if each > 1 else []
    for node in remote:
        found += [
            Member(pid, node.connections[i], node, node.number, node.address, node.model)
            for i, pid in enumerate(node.pids)
        ]
    return found


@contextmanager
def meeting_place(host: str) -> Iterator[str]:
    """The place for `open_store`: a file in a folder that only this user may enter, or an address
    of this machine. Rank 0 keeps it until all ranks have met."""
    if host == LOOPBACK:
        folder = tempfile.mkdtemp(prefix="dsv4-ranks-")
        try:
            yield str(Path(folder) / "store")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    distributed: Any = torch.distributed
    # by default torch would listen on all interfaces
    server = listen(host)
    port = server.getsockname()[1]
    store = distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach(),
        use_libuv=False,
    )  # fmt: skip
    yield f"tcp:{host}:{port}"
    del store


def open_store(place: str, world: int, timeout: float) -> Any:
    distributed: Any = torch.distributed
    limit = timedelta(seconds=max(_STORE_SECONDS, timeout))
    if place.startswith("tcp:"):
        host, port = place.removeprefix("tcp:").rsplit(":", 1)
        return distributed.TCPStore(
            host, int(port), is_master=False, timeout=limit, use_libuv=False
        )
    store = distributed.FileStore(place, world)
    store.set_timeout(limit)
    return store


def head_host(choices: EngineConfig) -> str:
    """The address of rank 0 for other ranks."""
    if torchrun_place() is not None:
        return os.environ["MASTER_ADDR"]
    return LOOPBACK if choices.nodes == 1 or choices.head is None else Head.host_of(choices.head)


# --- torchrun -------------------------------------------------------------------------------------

_ADDRESS = "dsv4/head"


class _Foreign:
    """A process that torchrun starts and ends."""

    is_gone = False

    def status(self, pid: int, timeout: float) -> int | None:
        return None

    def kill(self, pids: list[int]) -> None:
        """Its connection closes with this process; then it ends, and torchrun kills the rest."""


def _torchrun_store(timeout: float) -> Any:
    distributed: Any = torch.distributed
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=timeout)
    is_master = os.environ["RANK"] == "0" and not agent
    store = distributed.TCPStore(
        host, port, is_master=is_master, timeout=limit, wait_for_workers=False
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"dsv4 {attempt}", store)


def _torchrun_members(world: int, timeout: float) -> list[Member]:
    key, found = secrets.token_bytes(32), dict[int, Member]()
    store = _torchrun_store(timeout)
    with listen(os.environ["MASTER_ADDR"]) as server:
        store.set(_ADDRESS, f"{server.getsockname()[1]} {key.hex()}")
        server.settimeout(timeout)
        while len(found) < world - 1:
            try:
                connection, peer = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, world)) - set(found))
                raise RankError(
                    f"torchrun's ranks {missing} did not come within {timeout:g} s"
                ) from None
            with contextlib.suppress(OSError, RankError):
                greet(connection, key)
                hello = Link(connection).receive()
                connection.settimeout(None)
                if hello is not None:
                    rank, pid = hello[0]["rank"], hello[0]["pid"]
                    found[rank] = Member(pid, connection, _Foreign(), 0, peer[0])
    return [found[rank] for rank in range(1, world)]


def torchrun_connection(rank: int, timeout: float) -> socket.socket:
    """Connect a rank above 0 to rank 0."""
    port, key = _torchrun_store(timeout).get(_ADDRESS).decode().split()
    connection = connect_to((os.environ["MASTER_ADDR"], int(port)), bytes.fromhex(key))
    Link(connection).send({"kind": "rank", "rank": rank, "pid": os.getpid()})
    return connection
