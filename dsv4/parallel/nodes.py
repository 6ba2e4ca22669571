"""Ranks on other machines: they connect to rank 0's node and then act like local ones. No torch.

    node 0    Head listens at HOST:PORT; the engine waits for the nodes before it starts
    node K    `join` connects: one connection for the node, then one for each of its ranks

Both ends prove that they know the shared key before anything else is read: a challenge each way.
Then a rank's connection becomes its link, handed to the process that the fork server starts. The
node's own connection reports how its ranks ended and carries requests to kill them. Nothing is
encrypted: use a private network.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dsv4.errors import OptionError, RankError
from dsv4.parallel.commands import Link, RankMessage
from dsv4.parallel.fork_server import START_SECONDS, ForkServer
from dsv4.util.readiness import readable

log = logging.getLogger(__name__)

KEY = "DSV4_CLUSTER_KEY"
LEAST_KEY = 16  # characters
NONCE = 32
HANDSHAKE_SECONDS = 10.0
GREETED = 64  # connections at once that have not said who they are
RETRY_SECONDS = 0.5
TELL_SECONDS = 10.0  # between two log lines about missing nodes


def cluster_key() -> bytes:
    key = os.environ.get(KEY, "")
    if len(key) < LEAST_KEY:
        raise OptionError(
            f"{KEY} has {len(key)} characters, expected at least {LEAST_KEY}, the same on every "
            "node; make one with: openssl rand -hex 16"
        )
    return key.encode()


def address_of(text: str) -> tuple[str, int]:
    """`HOST:PORT`, or `[IPV6]:PORT`."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise OptionError(f"head is {text!r}, expected HOST:PORT like 10.0.0.1:29500")
    return host, int(port)


def _proof(key: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(key, role + first + second, hashlib.sha256).digest()


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("closed during the handshake")
        data += part
    return data


def _prepare(connection: socket.socket) -> None:
    """Small messages leave immediately; a broken link is noticed within 15 s (on Linux; elsewhere
    only while nothing is sent)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 15_000),  # keepalive rests while pings are unacknowledged
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def greet(connection: socket.socket, key: bytes) -> None:
    """The head's side of the handshake; raises if the other end does not know the key. The caller
    ends the connection's timeout once it has read who that is."""
    connection.settimeout(HANDSHAKE_SECONDS)
    ours = secrets.token_bytes(NONCE)
    connection.sendall(ours)
    theirs, proof = _read(connection, NONCE), _read(connection, NONCE)
    if not hmac.compare_digest(proof, _proof(key, b"node", ours, theirs)):
        raise PermissionError("another key")
    connection.sendall(_proof(key, b"head", theirs, ours))
    _prepare(connection)


def connect_to(address: tuple[str, int], key: bytes) -> socket.socket:
    """The node's side. The head closes the connection if its key differs."""
    connection = socket.create_connection(address, HANDSHAKE_SECONDS)
    try:
        theirs, ours = _read(connection, NONCE), secrets.token_bytes(NONCE)
        connection.sendall(ours + _proof(key, b"node", theirs, ours))
        try:
            proof = _read(connection, NONCE)
        except ConnectionError:
            proof = b""
        if not hmac.compare_digest(proof, _proof(key, b"head", ours, theirs)):
            raise OptionError(f"the head at {address[0]}:{address[1]} has another {KEY}")
        _prepare(connection)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


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
        with contextlib.suppress(OSError, RankError):
            while (found := self.link.receive()) is not None:
                message = found[0]
                with self.changed:
                    if message.get("kind") == "started":
                        self.pids = list(message["pids"])
                    elif message.get("kind") == "ended":
                        self.ended[message["pid"]] = message["status"]
                    self.changed.notify_all()
        with self.changed:
            self.is_gone = True
            self.changed.notify_all()


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
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            self._server = socket.create_server((self.host, self.port), family=family)
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
                ready = readable([self._server], RETRY_SECONDS)
                if ready and self._free.acquire(timeout=RETRY_SECONDS):
                    what = (*self._server.accept(), nodes, ranks_each)
                    threading.Thread(target=self._greet, args=what, daemon=True).start()
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
        except (OSError, RankError, KeyError, TypeError) as error:
            problem = str(error)
        self._free.release()
        if problem is not None:
            log.warning("refused a connection from %s: %s", peer[0], problem)
            connection.close()

    def _take(
        self, hello: RankMessage, connection: socket.socket, link: Link, nodes: int, ranks_each: int
    ) -> str | None:
        """Accept a connection, or return why it is refused."""
        number, version = hello["node"], hello["version"]
        if version != self._version:
            return f"node {number} has dsv4 {version}, the head {self._version}; use the same"
        if type(number) is not int or not 0 < number < nodes:
            return f"node is {number}, expected 1 to {nodes - 1}"
        if hello["kind"] == "rank":
            self._nodes[number].connections[hello["place"]] = connection
        elif number in self._nodes:
            return f"node {number} is here already; give each machine its own --node"
        else:
            node = RemoteNode(number, link, hello["address"], hello["model"])
            self._nodes[number] = node
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
                    f"the head at {by.head[0]}:{by.head[1]} was not reached within "
                    f"{by.timeout:g} s ({error.strerror or error})"
                ) from error
            if not said:
                tell(f"waiting for the head at {by.head[0]}:{by.head[1]}")
                said = True
            time.sleep(RETRY_SECONDS)


def _serve(by: Joining, key: bytes, control: socket.socket, tell: Callable[[str], None]) -> bool:
    """Serve one engine; True if it was closed in good order. Raises if it could not start."""
    link = Link(control)
    address = control.getsockname()[0]
    hello = {"node": by.node, "version": by.version, "address": address, "model": by.model}
    link.send({"kind": "node", **hello})
    answer = link.receive()
    if answer is None:
        return False
    if answer[0]["kind"] == "refused":
        raise OptionError(answer[0]["error"])
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
