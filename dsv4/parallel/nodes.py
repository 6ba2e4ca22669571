"""Ranks on other machines: they connect to rank 0's node and then act like local ones. No torch.

    node 0    Head listens at HOST:PORT; the engine waits for the nodes before it starts
    node K    `join` connects: one connection for the node, then one for each of its ranks

Once both ends have proven that they know the shared key (handshake.py), a rank's connection becomes
its link, handed to the process that the fork server starts. The node's own connection reports how
its ranks ended and carries requests to kill them. Nothing is encrypted: use a private network.
"""

import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dsv4.errors import OptionError, RankError
from dsv4.parallel.commands import Link, RankMessage
from dsv4.parallel.fork_server import START_SECONDS, ForkServer, how_it_ended
from dsv4.parallel.handshake import (
    HANDSHAKE_SECONDS,
    KEY,
    address_of,
    cluster_key,
    connect_to,
    greet,
    listen,
    shown,
)
from dsv4.util.readiness import readable

log = logging.getLogger(__name__)

GREETED = 64  # connections at once that have not said who they are
RETRY_SECONDS = 0.5
TELL_SECONDS = 10.0  # between two log lines about missing nodes


# --- the head -------------------------------------------------------------------------------------


@dataclass
class RemoteNode:
    """A node that has connected; the team treats it like a `ForkServer`."""

    number: int
    link: Link
    address: str  # as other ranks reach it
    model: str | None  # its path to the files, if it gave one
    connections: dict[int, socket.socket] = field(default_factory=dict)  # its ranks', by place
    pids: list[int] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_gone: bool = False

    def status(self, pid: int, timeout: float) -> int | None:
        with self.changed:
            self.changed.wait_for(lambda: self.is_gone or pid in self.ended, timeout)
            return self.ended.get(pid)

    def kill(self, pids: list[int]) -> None:
        with contextlib.suppress(OSError):  # if it is gone, it kills its ranks itself
            self.link.send({"kind": "kill", "pids": pids})

    def fail(self, error: str, *, is_starting: bool) -> None:
        """Tell `join` why the engine fails. It ends with that error if the engine never started,
        else it waits for the next one."""
        with contextlib.suppress(OSError):
            self.link.send({"kind": "failed", "error": error, "is_starting": is_starting})

    def end(self, *, in_order: bool) -> None:
        """`in_order`: the engine was closed and `join` ends too."""
        if in_order:
            with contextlib.suppress(OSError):
                self.link.send({"kind": "end"})
        self.link.close()

    def listen(self) -> None:
        try:
            while (found := self.link.receive()) is not None:
                with self.changed:
                    self._hear(found[0])
                    self.changed.notify_all()
        except (OSError, RankError, KeyError, TypeError, ValueError) as error:
            if not isinstance(error, OSError):  # such a link was closed here, or cut
                log.warning("node %d sent what is no message: %r", self.number, error)
            self.link.close()
        with self.changed:
            self.is_gone = True
            self.changed.notify_all()

    def _hear(self, message: RankMessage) -> None:
        if message.get("kind") == "started":
            self.pids = [int(pid) for pid in message["pids"]]
        elif message.get("kind") == "ended":
            self.ended[int(message["pid"])] = int(message["status"])


class Head:
    """Listens for the other nodes."""

    def __init__(self, address: str, version: str) -> None:
        self.host, self.port = address_of(address)
        with contextlib.suppress(ValueError):  # a name
            if ipaddress.ip_address(self.host).is_unspecified:
                raise OptionError(
                    f"head is {address}, which stands for every address of this machine; expected "
                    "the one that other nodes reach, like 10.0.0.1:29500"
                )
        self._key, self._version = cluster_key(), version
        self._nodes: dict[int, RemoteNode] = {}
        self._lock = threading.Lock()  # connections are greeted in threads of their own
        self._is_over = False
        self._free = threading.Semaphore(GREETED)
        try:
            self._server = listen(self.host, self.port)
            self._address = address
        except OSError as error:
            raise OptionError(
                f"head is {address}: cannot listen there ({error.strerror}); give an address of "
                "this machine and a free port"
            ) from error

    @staticmethod
    def host_of(address: str) -> str:
        return address_of(address)[0]

    def wait(self, nodes: int, ranks_each: int, timeout: float) -> list[RemoteNode]:
        """Nodes 1 to `nodes` - 1, once all their ranks have connected."""
        begin, told = time.monotonic(), -TELL_SECONDS
        where = self._address
        try:
            while missing := self._missing(nodes, ranks_each):
                names, passed = ", ".join(map(str, missing)), time.monotonic() - begin
                if passed > timeout:
                    lines = "; ".join(f"dsv4 join {where} --node {node}" for node in missing)
                    raise RankError(
                        f"node {names} did not come within {timeout:g} s; start there, with the "
                        f"same {KEY}: {lines}"
                    )
                if passed - told > TELL_SECONDS:
                    told = passed
                    log.warning("waiting at %s for node %s", where, names)
                if readable([self._server], RETRY_SECONDS):
                    self._accept(nodes, ranks_each)
                self._check_ranks()
        except BaseException as error:
            with self._lock:
                self._is_over = True
                for node in self._nodes.values():
                    for connection in node.connections.values():
                        connection.close()
                    node.fail(str(error) or type(error).__name__, is_starting=True)
                    node.end(in_order=False)
            raise
        finally:
            self._is_over = True
            self._server.close()
        return [self._nodes[node] for node in range(1, nodes)]

    def _accept(self, nodes: int, ranks_each: int) -> None:
        """Greet who comes, on a thread, unless too many have not said who they are."""
        if not self._free.acquire(timeout=RETRY_SECONDS):
            return
        try:
            what = (*self._server.accept(), nodes, ranks_each)
        except OSError as error:  # it is gone again, or this process has no descriptor left
            self._free.release()
            log.warning("a connection could not be accepted: %s", error)
            time.sleep(RETRY_SECONDS)
            return
        threading.Thread(target=self._greet, args=what, daemon=True).start()

    def _check_ranks(self) -> None:
        """Raise if a rank has ended while other nodes are waited for."""
        with self._lock:
            for node in self._nodes.values():
                for pid, status in list(node.ended.items()):
                    raise RankError(
                        f"a rank of node {node.number} (process {pid}) {how_it_ended(status)}"
                    )

    def _missing(self, nodes: int, ranks_each: int) -> list[int]:
        def is_complete(node: RemoteNode | None) -> bool:
            return node is not None and len(node.connections) == len(node.pids) == ranks_each

        with self._lock:
            for number, node in list(self._nodes.items()):
                if node.is_gone:  # it may reconnect
                    del self._nodes[number]
            return [n for n in range(1, nodes) if not is_complete(self._nodes.get(n))]

    def _greet(
        self, connection: socket.socket, peer: tuple[str, int], nodes: int, ranks_each: int
    ) -> None:
        try:
            greet(connection, self._key)
            link = Link(connection)
            hello = link.receive()
            if hello is None:
                raise ConnectionError("closed or silent before it said who it is")
            connection.settimeout(None)
            with self._lock:
                problem: str | None = "the engine waits no more"
                if not self._is_over:
                    problem = self._take(hello[0], connection, link, nodes, ranks_each)
            if problem is not None:
                link.send({"kind": "refused", "error": problem})
        except (OSError, RankError) as error:
            problem = str(error)
        finally:
            self._free.release()
        if problem is not None:
            log.warning("refused a connection from %s: %s", peer[0], problem)
            connection.close()

    def _take(
        self, hello: RankMessage, connection: socket.socket, link: Link, nodes: int, ranks_each: int
    ) -> str | None:
        """Accept a connection, or return why it is refused."""
        kind, number, version = hello.get("kind"), hello.get("node"), hello.get("version")
        if kind not in ("node", "rank"):
            return f"found {kind!r}, expected that a node or a rank says who it is"
        if version != self._version:
            return f"node {number} has dsv4 {version}, the head {self._version}; use the same"
        if type(number) is not int or not 0 < number < nodes:
            return f"node is {number}, expected 1 to {nodes - 1}"
        if kind == "rank":
            place, taken = hello.get("place"), self._nodes.get(number)
            if taken is None:
                return f"found a rank of node {number}, which is not here"
            if type(place) is not int or not 0 <= place < ranks_each or place in taken.connections:
                return f"rank {place!r} of node {number} is here already, or one too many"
            taken.connections[place] = connection
            return None
        if number in self._nodes:
            return f"node {number} is here already; give each machine its own --node"
        address, model = hello.get("address"), hello.get("model")
        if not isinstance(address, str) or not isinstance(model, str | None):
            return f"node {number} has the address {address!r} and model {model!r}, expected texts"
        node = self._nodes[number] = RemoteNode(number, link, address, model)
        threading.Thread(target=node.listen, daemon=True).start()
        link.send({"kind": "ranks", "count": ranks_each})
        return None


# --- the other nodes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joining:
    """What a node needs in order to join."""

    head: tuple[str, int]
    node: int
    module: str  # a rank runs its `main`
    version: str
    model: str | None = None
    timeout: float = 600.0  # to reach the head, at start and after it restarts


def join(by: Joining, tell: Callable[[str], None]) -> None:
    """Run this node's ranks until the head's engine is closed; reconnects if the head restarts."""
    key = cluster_key()
    while True:
        control = _reach(by, key, tell)
        try:
            if _serve(by, key, control, tell):
                return
        finally:
            control.close()
        tell("the head is gone; waiting for it to come back")


def _reach(by: Joining, key: bytes, tell: Callable[[str], None]) -> socket.socket:
    begin, said = time.monotonic(), False
    while True:
        try:
            return connect_to(by.head, key)
        except OSError as error:
            if time.monotonic() - begin > by.timeout:
                raise RankError(
                    f"the head at {shown(by.head)} was not reached within "
                    f"{by.timeout:g} s ({error.strerror or error})"
                ) from error
            if not said:
                why = error.strerror or error
                tell(f"waiting {by.timeout:g} s for the head at {shown(by.head)} ({why})")
                said = True
            time.sleep(RETRY_SECONDS)


def _serve(by: Joining, key: bytes, control: socket.socket, tell: Callable[[str], None]) -> bool:
    """Serve one engine; True if it was closed in good order. Raises if it could not start."""
    link = Link(control)
    address = control.getsockname()[0]
    hello = {"node": by.node, "version": by.version, "address": address, "model": by.model}
    link.send({"kind": "node", **hello})
    control.settimeout(HANDSHAKE_SECONDS)
    answer = link.receive()
    control.settimeout(None)
    if answer is None:
        return False
    if answer[0].get("kind") == "refused":
        raise OptionError(str(answer[0].get("error")))
    if answer[0].get("kind") != "ranks" or type(answer[0].get("count")) is not int:
        raise RankError(f"the head at {shown(by.head)} answered {answer[0]}, expected ranks")
    connections: list[socket.socket] = []
    try:
        for place in range(answer[0]["count"]):
            connections.append(connect_to(by.head, key))
            Link(connections[-1]).send({"kind": "rank", "place": place, **hello})
    except OSError:  # the head has ended meanwhile
        for connection in connections:
            connection.close()
        return False
    server, error = ForkServer.of(by.module), ""
    pids = server.start_on(connections, START_SECONDS)
    link.send({"kind": "started", "pids": pids})
    tell(f"node {by.node} runs {len(pids)} ranks")
    running, in_order = set(pids), False
    try:
        while True:
            found = link.receive() if readable([control], 0.05) else ({"kind": ""}, b"")
            if found is None:
                break
            message = found[0]
            if message["kind"] == "end":
                in_order = True
                break
            if message["kind"] == "failed":
                if message["is_starting"]:
                    error = message["error"]
                else:
                    tell(f"the engine failed: {message['error']}")
            if message["kind"] == "kill":
                server.kill(pids)
            for pid in list(running):
                status = server.status(pid, 0)
                if status is not None:
                    running.remove(pid)
                    link.send({"kind": "ended", "pid": pid, "status": status})
    except OSError:
        in_order = False
    finally:
        server.kill(pids)
    if error:
        raise RankError(f"the engine could not start: {error}")
    return in_order
