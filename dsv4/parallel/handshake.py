"""Who may connect from another machine: addresses, the shared key, and a proof each way.

Both ends prove that they know the key before anything else is read: each answers the other's
challenge, within `HANDSHAKE_SECONDS`. Nothing is encrypted.
"""

import hashlib
import hmac
import os
import re
import secrets
import socket
import time

from dsv4.errors import OptionError

KEY = "DSV4_CLUSTER_KEY"
LEAST_KEY = 16  # characters
NONCE = 32
HANDSHAKE_SECONDS = 10.0


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
    found = re.fullmatch(r"(?:\[([^][]+:[^][]*)\]|([^][:\s]+)):([0-9]{1,5})", text)
    host = (found[1] or found[2]) if found else ""
    try:
        host.encode("idna")  # as for a connection
    except UnicodeError:
        host = ""
    if found is None or not host or not 0 < int(found[3]) < 65536:
        raise OptionError(
            f"head is {text!r}, expected HOST:PORT like 10.0.0.1:29500 or [fd00::1]:29500"
        )
    return host, int(found[3])


def shown(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int = 0) -> socket.socket:
    """At this address only, of either family."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)


def _proof(key: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(key, role + first + second, hashlib.sha256).digest()


def _read(connection: socket.socket, size: int, until: float) -> bytes:
    """Until then, however slowly it comes."""
    data = b""
    while len(data) < size:
        try:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError
            connection.settimeout(left)
            part = connection.recv(size - len(data))
        except TimeoutError:
            text = f"the handshake was not finished within {HANDSHAKE_SECONDS:g} s"
            raise TimeoutError(text) from None
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
    until = time.monotonic() + HANDSHAKE_SECONDS
    ours = secrets.token_bytes(NONCE)
    connection.sendall(ours)
    theirs, proof = _read(connection, NONCE, until), _read(connection, NONCE, until)
    if not hmac.compare_digest(proof, _proof(key, b"node", ours, theirs)):
        raise PermissionError("another key")
    connection.sendall(_proof(key, b"head", theirs, ours))
    connection.settimeout(HANDSHAKE_SECONDS)
    _prepare(connection)


def connect_to(address: tuple[str, int], key: bytes) -> socket.socket:
    """The node's side. The head closes the connection if its key differs."""
    connection = socket.create_connection(address, HANDSHAKE_SECONDS)
    until = time.monotonic() + HANDSHAKE_SECONDS
    try:
        theirs, ours = _read(connection, NONCE, until), secrets.token_bytes(NONCE)
        connection.sendall(ours + _proof(key, b"node", theirs, ours))
        try:
            proof = _read(connection, NONCE, until)
        except ConnectionError:
            proof = b""
        if not hmac.compare_digest(proof, _proof(key, b"head", ours, theirs)):
            raise OptionError(f"the head at {shown(address)} has another {KEY}")
        _prepare(connection)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection
