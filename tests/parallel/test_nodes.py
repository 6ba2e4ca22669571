"""Ranks on several nodes, as groups of processes on this one: joining, keys, failures, torchrun."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4.engine import Engine
from dsv4.errors import CheckpointError, OptionError, RankError
from dsv4.parallel import nodes
from dsv4.parallel.commands import Link
from dsv4.parallel.nodes import Head, address_of, connect_to
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
    monkeypatch.setenv(nodes.KEY, KEY)


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


def join(port: int, node: int, *rest: str, **variables: str) -> subprocess.Popen[str]:
    command = ("join", f"localhost:{port}", "--node", str(node), *rest)
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
    monkeypatch.setenv(nodes.KEY, "short")
    with pytest.raises(OptionError, match="DSV4_CLUSTER_KEY has 5 characters, expected at least"):
        load(folder, port)
    assert address_of("[::1]:29500") == ("::1", 29500)


@pytest.fixture
def links() -> Iterator[list[Link]]:
    found: list[Link] = []
    yield found
    for link in found:
        link.close()


def with_head(port: int, work: Callable[[], None], seconds: float = 1.0) -> str:
    """What a head that waits for two nodes says in the end, while `work` talks to it."""
    head, said = Head(f"localhost:{port}", "1.0"), []

    def wait() -> None:
        try:
            head.wait(3, 1, seconds)
        except RankError as error:
            said.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        work()
    finally:
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
    assert "node 1, 2 did not come" in with_head(port, work, 6.0)


def test_a_broken_link_is_noticed_soon(port: int, links: list[Link]) -> None:
    """Also while pings wait to be acknowledged, when keepalive rests."""

    def work() -> None:
        connection = connect_to(("localhost", port), KEY.encode())
        links.append(Link(connection))
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert found == 15_000
        assert connection.gettimeout() is None

    with_head(port, work, 0.3)


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

    with_head(port, work, 0.3)


def test_a_number_that_is_taken(port: int, links: list[Link]) -> None:
    def work() -> None:
        for _ in range(2):
            links.append(Link(connect_to(("localhost", port), KEY.encode())))
            links[-1].send(HELLO)
        assert links[0].receive() is not None
        answer = links[1].receive()
        assert answer is not None
        assert "node 1 is here already" in answer[0]["error"]

    with_head(port, work, 0.3)


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
