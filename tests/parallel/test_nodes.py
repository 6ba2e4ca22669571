"""Ranks on several nodes, as groups of processes on this one: joining, keys, failures, torchrun."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4.engine import Engine
from dsv4.errors import CheckpointError, OptionError, RankError
from dsv4.parallel import handshake, nodes
from dsv4.parallel.commands import Link
from dsv4.parallel.handshake import KEY as VARIABLE
from dsv4.parallel.handshake import address_of, connect_to, shown
from dsv4.parallel.nodes import Head, Joining
from dsv4.request import SamplingParams
from dsv4.runner.ranks import start
from dsv4.testing import random_weights, small_config, write_checkpoint

ROOT = Path(__file__).parents[2]
KEY = "a key of this test, long enough"
PARAMS = SamplingParams(max_tokens=5, temperature=0.8, seed=5, logprobs=2)
PROMPTS = ([7, 8, 9], list(range(1, 90)))
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(num_layers=3, num_hash_layers=1, compress_ratios=(0, 4, 128))
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, config, random_weights(config, 1))
    return path


@pytest.fixture
def port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def run(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", *arguments], env=env, text=True, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def join(
    port: int, node: int, *rest: str, host: str = "localhost", **variables: str
) -> subprocess.Popen[str]:
    command = ("join", f"{host}:{port}", "--node", str(node), *rest)
    return run("from dsv4.cli import main; main()", *command, **variables)


@pytest.fixture
def joined() -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


def answers(engine: Engine) -> Any:
    return [(c.token_ids, c.logprobs) for c in engine.generate(list(PROMPTS), PARAMS)]


def load(folder: Path, port: int, **choices: Any) -> Engine:
    choices = {
        "pp": 2,
        "nodes": 2,
        "head": f"localhost:{port}",
        "join_timeout": PATIENCE_S,
        **choices,
    }
    return Engine.load(folder, device="cpu", **choices)


def test_two_nodes(folder: Path, port: int, joined: list[subprocess.Popen[str]]) -> None:
    """The answers of one process; a killed rank is named with its node; both begin again; a closed
    engine ends the other node."""
    wanted = answers(Engine.load(folder, device="cpu"))
    node = join(port, 1, "--join-timeout", str(PATIENCE_S))
    joined.append(node)
    engine = load(folder, port)
    assert engine._runner.team is not None
    [rank] = engine._runner.team.pids
    assert answers(engine) == wanted
    os.kill(rank, signal.SIGKILL)
    failed = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3000, stop_ids=()))
    name = f"rank 1 (node 1, process {rank}) was ended by signal 9 (SIGKILL)"
    assert name in (failed[0].error or "")
    engine.close()
    again = load(folder, port, tp=2, pp=1)  # each layer over both nodes
    try:
        assert answers(again) == wanted
        [rank] = again._runner.team.pids if again._runner.team else []
    finally:
        again.close()
    out, _ = node.communicate(timeout=PATIENCE_S)
    assert node.returncode == 0, out
    assert out.count("node 1 runs 1 ranks") == 2
    assert "the head is gone" in out
    assert f"the engine failed: {name}" in out
    assert not os.path.exists(f"/proc/{rank}")


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_two_nodes_over_ipv6(folder: Path, port: int, joined: list[subprocess.Popen[str]]) -> None:
    node = join(port, 1, "--join-timeout", str(PATIENCE_S), host="[::1]")
    joined.append(node)
    engine = load(folder, port, head=f"[::1]:{port}")
    try:
        assert answers(engine) == answers(Engine.load(folder, device="cpu"))
        assert engine._runner.team is not None
        assert engine._runner.team.members[0].address == "::1"
    finally:
        engine.close()
    out, _ = node.communicate(timeout=PATIENCE_S)
    assert node.returncode == 0, out
    assert f"the head at [::1]:{port}" in out or "waiting" not in out


def test_another_checkpoint_on_a_node(
    folder: Path, port: int, joined: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Same shapes and headers, other values. The node learns why, too, and ends."""
    config = small_config(num_layers=3, num_hash_layers=1, compress_ratios=(0, 4, 128))
    write_checkpoint(tmp_path, config, random_weights(config, 2))
    node = join(port, 1, "--model", str(tmp_path))
    joined.append(node)
    with pytest.raises(RankError, match="rank 1 cannot start: RankError: found another checkpoint"):
        load(folder, port)
    out, _ = node.communicate(timeout=PATIENCE_S)
    assert node.returncode == 70
    assert "the engine could not start: rank 1 cannot start: RankError: found" in " ".join(
        out.split()
    )


def test_nodes_learn_that_rank_0_cannot_start(
    folder: Path, port: int, joined: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*arguments: Any) -> None:
        raise CheckpointError("a damaged file")

    monkeypatch.setattr(start, "load_rank", damaged)
    node = join(port, 1)
    joined.append(node)
    with pytest.raises(CheckpointError):
        load(folder, port)
    out, _ = node.communicate(timeout=PATIENCE_S)
    assert node.returncode == 70
    assert "rank 0 cannot start: CheckpointError: a damaged file" in " ".join(out.split())


# --- who may come ---------------------------------------------------------------------------------


def test_a_node_that_does_not_come(folder: Path, port: int) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError) as error:
        load(folder, port, join_timeout=0.5)
    assert time.monotonic() - begin < 30
    expected = f"node 1 did not come within 0.5 s; .*dsv4 join localhost:{port} --node 1"
    assert error.match(expected)


def test_options_are_checked_before_nodes_come(folder: Path, port: int) -> None:
    with pytest.raises(OptionError, match="comm is 'nccl' on a CPU, expected auto or gloo"):
        load(folder, port, comm="nccl")  # nobody joins: it would wait


def test_a_port_in_use(folder: Path) -> None:
    with socket.create_server(("localhost", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(OptionError, match=r"cannot listen there \(.*in use.*a free port"):
            load(folder, taken)


def test_options_of_nodes(folder: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for head, words in (
        ("10.0.0.1", "head is '10.0.0.1', expected HOST:PORT like"),
        ("host:0", "expected HOST:PORT"),
        ("host:many", "expected HOST:PORT"),
    ):
        with pytest.raises(OptionError, match=words):
            load(folder, 0, head=head)
    with pytest.raises(OptionError, match="nodes is 2, head is None; expected the HOST:PORT"):
        load(folder, 0, head=None)
    with pytest.raises(OptionError, match=r"tp 1 x pp 3 is 3 ranks, nodes is 2; expected the same"):
        load(folder, port, pp=3)
    with pytest.raises(OptionError, match=r"tp 1 x pp 1 is 1 ranks, nodes is 2; expected the same"):
        load(folder, port, pp=1)
    with pytest.raises(
        OptionError, match=r"head is localhost:\d+, nodes is 1; expected the number"
    ):
        load(folder, port, nodes=1)
    for head in ("0.0.0.0", "[::]"):
        with pytest.raises(OptionError, match=r"which stands for every address of this machine"):
            load(folder, 0, head=f"{head}:29500")
    with pytest.raises(OptionError, match="join_timeout is 0, expected seconds above 0"):
        load(folder, port, join_timeout=0)
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(OptionError, match="DSV4_CLUSTER_KEY has 5 characters, expected at least"):
        load(folder, port)


@pytest.mark.parametrize(
    "text",
    [
        "host:65536", "host:-1", "host:+1", "host:1.5", "host:２９５００", "host:", ":29500", "",
        "[]:29500", "[::1:29500", "::1]:29500", "::1:29500", "[host]:29500", "[::1]29500", "host",
        "a..b:29500", f"{'x' * 64}:29500", "a b:29500", "host:29500:1", "[::1]:0", "[::1]",
    ],
)  # fmt: skip
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match=r"expected HOST:PORT like 10.0.0.1:29500 or \[fd00::1\]"):
        address_of(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:29500", ("10.0.0.1", 29500)), ("gpu-1.lab:1", ("gpu-1.lab", 1)),
        ("[::1]:29500", ("::1", 29500)), ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
    ],
)  # fmt: skip
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert address_of(text) == address
    assert shown(address) == text


@pytest.fixture
def links() -> Iterator[list[Link]]:
    found: list[Link] = []
    yield found
    for link in found:
        link.close()


def with_head(port: int, work: Callable[[], None]) -> str:
    """What a head that waits for two nodes says in the end, while `work` talks to it. However long
    that takes, its patience ends afterwards."""
    head, said, later = Head(f"localhost:{port}", "1.0"), list[str](), [0.0]

    def wait() -> None:
        try:
            head.wait(3, 1, PATIENCE_S)
        except RankError as error:
            said.append(str(error))

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0], sleep=time.sleep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "time", clock)
        thread = threading.Thread(target=wait)
        thread.start()
        try:
            work()
        finally:
            later[0] = 2 * PATIENCE_S
            thread.join()
    return said[0] if said else ""


HELLO = {"kind": "node", "node": 1, "version": "1.0", "address": "localhost", "model": None}


def test_only_those_with_the_key_are_heard(port: int, links: list[Link]) -> None:
    def work() -> None:
        with pytest.raises(
            OptionError, match=r"the head at localhost:\d+ has another DSV4_CLUSTER"
        ):
            connect_to(("localhost", port), b"another key")
        with socket.create_connection(("localhost", port)) as silent:  # closes at once
            silent.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        link = Link(connect_to(("localhost", port), KEY.encode()))
        links.append(link)
        link.send(HELLO)
        assert link.receive() == ({"kind": "ranks", "count": 1, "size": 0}, b"")

    assert "node 1, 2 did not come" in with_head(port, work)


@pytest.mark.parametrize("has_key", [False, True])
def test_silent_connections_hold_up_nobody(port: int, links: list[Link], has_key: bool) -> None:
    def work() -> None:
        for _ in range(3):
            where = ("localhost", port)
            made = connect_to(where, KEY.encode()) if has_key else socket.create_connection(where)
            links.append(Link(made))  # and says nothing
        links.append(Link(connect_to(("localhost", port), KEY.encode())))
        links[-1].send(HELLO)
        assert links[-1].receive() == ({"kind": "ranks", "count": 1, "size": 0}, b"")

    # one after the other they took 30 s, or for ever
    assert "node 1, 2 did not come" in with_head(port, work)


def test_a_connection_that_trickles_ends_in_time(
    port: int, links: list[Link], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A byte now and then is no answer: the whole handshake has one limit."""
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.4)

    def work() -> None:
        with socket.create_connection(("localhost", port), PATIENCE_S) as slow:
            slow.recv(handshake.NONCE)
            with contextlib.suppress(OSError):  # once it is closed at the other end
                for _ in range(31):
                    slow.sendall(b"x")
                    time.sleep(0.1)
                raise AssertionError("it was never closed")

    with_head(port, work)
    assert "the handshake was not finished within 0.4 s" in caplog.text


HEADER = (1 << 30).to_bytes(4, "big")


GARBAGE = {
    HEADER: "found a header of 1073741824 bytes; the link is out of step",
    b"\0\0\0\4\xff\xfe{}": "found a message that is no command",
    b"\0\0\0\2[]": "found a message that is no command",
    b"\0\0\0\x0b" + b'{"size": 0}': "found None, expected that a node or a rank says who it is",
    b"\0\0": "closed or silent before it said who it is",
}


def test_garbage_instead_of_a_hello(
    port: int, links: list[Link], caplog: pytest.LogCaptureFixture
) -> None:
    """From one who has the key. The next node is heard all the same."""

    def work() -> None:
        for sent, words in GARBAGE.items():
            caplog.clear()
            with connect_to(("localhost", port), KEY.encode()) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(1000):
                        pass
            assert words in caplog.text
        links.append(Link(connect_to(("localhost", port), KEY.encode())))
        links[-1].send(HELLO)
        assert links[-1].receive() == ({"kind": "ranks", "count": 1, "size": 0}, b"")

    assert "node 1, 2 did not come" in with_head(port, work)


def test_garbage_from_a_node_gives_it_up(
    port: int, links: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may connect again; before, it counted as present for ever."""
    monkeypatch.setattr(nodes, "RETRY_SECONDS", 0.05)

    def accepted() -> socket.socket:
        while True:  # until the head has seen that the last one is gone
            connection = connect_to(("localhost", port), KEY.encode())
            links.append(Link(connection))
            links[-1].send(HELLO)
            answer = links[-1].receive()
            if answer is not None and answer[0]["kind"] == "ranks":
                return connection

    def work() -> None:
        for sent in ({"kind": "started"}, {"kind": "started", "pids": 3}, None):
            connection = accepted()
            if sent is None:
                connection.sendall(HEADER)
            else:
                links[-1].send(sent)
            assert links[-1].receive() is None
        accepted()

    assert "node 1, 2 did not come" in with_head(port, work)


def test_a_rank_that_ends_while_others_are_waited_for(port: int, links: list[Link]) -> None:
    def work() -> None:
        links.append(Link(connect_to(("localhost", port), KEY.encode())))
        links[-1].send(HELLO)
        assert links[-1].receive() is not None
        links[-1].send({"kind": "started", "pids": [4711]})
        links[-1].send({"kind": "ended", "pid": 4711, "status": -9})
        failed = links[-1].receive()
        assert failed is not None
        assert failed[0]["is_starting"]

    said = with_head(port, work)
    assert said == "a rank of node 1 (process 4711) was ended by signal 9 (SIGKILL)"


def test_a_head_without_descriptors_goes_on(
    port: int, links: list[Link], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, turns = socket.socket.accept, iter([True])

    def failing(server: socket.socket) -> Any:
        if server.getsockname()[1] == port and next(turns, False):
            raise OSError(24, "Too many open files")
        return accept(server)

    monkeypatch.setattr(socket.socket, "accept", failing)
    monkeypatch.setattr(nodes, "RETRY_SECONDS", 0.05)

    def work() -> None:
        links.append(Link(connect_to(("localhost", port), KEY.encode())))
        links[-1].send(HELLO)
        assert links[-1].receive() is not None

    assert "node 1, 2 did not come" in with_head(port, work)
    assert "a connection could not be accepted: [Errno 24] Too many open files" in caplog.text


def test_a_broken_link_is_noticed_soon(port: int, links: list[Link]) -> None:
    """Also while pings wait to be acknowledged, when keepalive rests."""

    def work() -> None:
        connection = connect_to(("localhost", port), KEY.encode())
        links.append(Link(connection))
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert found == 15_000
        assert connection.gettimeout() is None

    with_head(port, work)


def test_a_link_that_timed_out_has_ended() -> None:
    class Cut:
        def recv(self, size: int) -> bytes:
            raise TimeoutError(110, "Connection timed out")  # no ConnectionError

    assert Link(Cut()).receive() is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"node": 3}, "node is 3, expected 1 to 2"),
        ({"node": 0}, "node is 0, expected 1 to 2"),
        ({"node": "1"}, "node is 1, expected 1 to 2"),
        ({"version": "2.0"}, "node 1 has dsv4 2.0, the head 1.0; use the same"),
        ({"node": [1]}, "node is [1], expected 1 to 2"),
        ({"kind": "guest"}, "found 'guest', expected that a node or a rank says who it is"),
        ({"kind": "rank", "place": 0}, "found a rank of node 1, which is not here"),
        ({"address": 7}, "node 1 has the address 7 and model None, expected texts"),
        ({"model": []}, "node 1 has the address 'localhost' and model [], expected texts"),
    ],
)
def test_nodes_that_are_refused(
    port: int, change: dict[str, Any], words: str, links: list[Link]
) -> None:
    def work() -> None:
        link = Link(connect_to(("localhost", port), KEY.encode()))
        links.append(link)
        link.send({**HELLO, **change})
        answer = link.receive()
        assert answer is not None
        assert answer[0]["kind"] == "refused"
        assert words in answer[0]["error"]

    with_head(port, work)


def test_a_number_that_is_taken(port: int, links: list[Link]) -> None:
    def work() -> None:
        for _ in range(2):  # one after the other: each is greeted on a thread
            links.append(Link(connect_to(("localhost", port), KEY.encode())))
            links[-1].send(HELLO)
            answer = links[-1].receive()
            assert answer is not None
        assert "node 1 is here already" in answer[0]["error"]

    with_head(port, work)


def test_two_machines_with_one_number(port: int, links: list[Link]) -> None:
    """The second one ends with the reason."""

    def work() -> None:
        links.append(Link(connect_to(("localhost", port), KEY.encode())))
        links[-1].send(HELLO)
        assert links[-1].receive() is not None
        second = Joining(("localhost", port), 1, "no.module", "1.0", None, PATIENCE_S)
        with pytest.raises(OptionError, match="node 1 is here already; give each machine its own"):
            nodes.join(second, lambda text: None)

    with_head(port, work)


def test_a_rank_in_a_place_that_is_taken_or_none(port: int, links: list[Link]) -> None:
    def come(hello: dict[str, Any]) -> Link:
        links.append(Link(connect_to(("localhost", port), KEY.encode())))
        links[-1].send(HELLO | hello)
        return links[-1]

    def work() -> None:
        assert come({}).receive() is not None
        come({"kind": "rank", "place": 0})
        for place in (1, -1, "0", None, [0], 0):
            answer = come({"kind": "rank", "place": place}).receive()
            assert answer is not None
            assert f"rank {place!r} of node 1 is here already, or one" in answer[0]["error"]

    assert "node 1, 2 did not come" in with_head(port, work)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"kind": "hello"}, "answered {'kind': 'hello', 'size': 0}, expected ranks"),
        ({"kind": "ranks"}, "expected ranks"),
        (None, "found a header of 1073741824 bytes"),
    ],
)
def test_a_head_that_answers_something_else(answer: dict[str, Any] | None, words: str) -> None:
    with socket.create_server(("localhost", 0)) as server:
        at = ("localhost", int(server.getsockname()[1]))

        def head() -> None:
            connection, _ = server.accept()
            with connection:
                handshake.greet(connection, KEY.encode())
                assert Link(connection).receive() is not None
                if answer is None:
                    connection.sendall(HEADER)
                else:
                    Link(connection).send(answer)

        thread = threading.Thread(target=head)
        thread.start()
        with pytest.raises(RankError) as error:
            nodes.join(Joining(at, 1, "no.module", "1.0", None, 1.0), lambda text: None)
        thread.join()
    assert words in str(error.value)


def test_a_head_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its challenge: another service, which reads only."""
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_server(("localhost", 0)) as server:
        at = ("localhost", int(server.getsockname()[1]))
        said: list[str] = []
        words = (
            rf":{at[1]} was not reached within 0.5 s \(the handshake was not finished within 0.2"
        )
        with pytest.raises(RankError, match=words):
            nodes.join(Joining(at, 1, "no.module", "1.0", None, 0.5), said.append)
    [line] = said
    assert line.startswith(f"waiting 0.5 s for the head at localhost:{at[1]} (the handshake")


def test_a_head_that_is_not_there(port: int) -> None:
    node = join(port, 1, "--join-timeout", "0.5")
    out, _ = node.communicate(timeout=PATIENCE_S)
    assert node.returncode == 70
    assert "was not reached within 0.5 s" in " ".join(out.split())


# --- torchrun -------------------------------------------------------------------------------------

SCRIPT = """
import sys
from dsv4 import Engine, SamplingParams
engine = Engine.load(sys.argv[1], device="cpu", tp=2)
print("tokens", *engine.generate([[7, 8, 9]], SamplingParams(max_tokens=4, seed=5))[0].token_ids)
engine.close()
"""


def test_processes_of_torchrun(folder: Path, port: int) -> None:
    """The variables that torchrun sets: rank 0 answers, rank 1 follows and ends with it."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ranks = [run(SCRIPT, str(folder), RANK=str(rank), **common) for rank in (0, 1)]
    outs = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outs
    alone = Engine.load(folder, device="cpu")
    [wanted] = alone.generate([[7, 8, 9]], SamplingParams(max_tokens=4, seed=5))
    assert "tokens " + " ".join(map(str, wanted.token_ids)) in outs[0]
    assert "tokens" not in outs[1]


def test_torchrun_with_another_number_of_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match="torchrun started 4 processes, tp x pp is 2"):
        Engine.load(folder, device="cpu", tp=2)
