"""A server over several ranks: the answers of one process, and a restart of all."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.support import ASK, Server, in_background, wait_for

CHAT = "/v1/chat/completions"
SCORE = {"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 0}


def ranks(engine: int) -> list[int]:
    """The engine's nursery and its ranks."""
    found, waiting = [], [engine]
    while waiting:
        pid = waiting.pop()
        for task in Path(f"/proc/{pid}/task").iterdir():
            waiting += [int(child) for child in (task / "children").read_text().split()]
        found.append(pid)
    return found[1:]


def test_two_ranks_answer_and_are_restarted(tiny: Server) -> None:
    body = {"messages": ASK, "max_tokens": 12, "seed": 3, "logprobs": True}
    wanted = tiny.post(CHAT, body).json()["choices"]
    server = Server("--device", "cpu", "--tp", "2", fake=False).wait()
    try:
        assert server.post(CHAT, body).json()["choices"] == wanted
        nursery, rank = ranks(server.engine_pid)
        with server.client() as client:
            [health] = client.get("/health").json()["ranks"]
            assert (health["rank"], health["pid"]) == (1, rank)
            assert health["silent_s"] < 60
            text = client.get("/metrics").text
        assert re.search(r'dsv4:rank_silent_seconds\{.*node="0",rank="1".*\} \d', text)
        assert "dsv4:rank_commands_behind{" in text
        assert "dsv4:expert_pairs_fullest_rank_total{" in text
        running = in_background(lambda: server.post(CHAT, {**body, "max_tokens": 4000}))
        wait_for(lambda: server.stats()["num_running"] == 1)
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: not _is_ready(server))
        answer = running.result(60)
        check_named(answer, f"rank 1 (process {rank}) was ended by signal 9 (SIGKILL)")
        wait_for(lambda: server.stats()["restarts"] == 1)
        wait_for(lambda: _is_ready(server))
        assert server.post(CHAT, body).json()["choices"] == wanted
        left = [nursery, rank, *ranks(server.engine_pid)]
        os.kill(server.engine_pid, signal.SIGKILL)  # rank 0: the others end, too
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left))
        wait_for(lambda: server.stats()["restarts"] == 2)
        wait_for(lambda: _is_ready(server))
        last = ranks(server.engine_pid)
    finally:
        assert server.stop() == 0
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in last))
    assert f"rank 1 (process {rank}) was ended by signal 9 (SIGKILL)" in server.final_log


def check_named(answer: httpx.Response, words: str) -> None:
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    error = answer.json()["error"]
    assert error["code"] == "engine_died"
    assert words in error["message"]


def test_rank_0_waits_for_a_rank_that_is_gone() -> None:
    """As over a cut link: nothing frees the engine's thread. Its process says why and ends."""
    server = Server("--device", "cpu", "--tp", "2", env={"FAKE_ENGINE": "stuck_engine.py"}).wait()
    try:
        body = {"messages": ASK, "max_tokens": 4000}
        engine, (_, rank) = server.engine_pid, ranks(server.engine_pid)
        asked = in_background(lambda: server.post(CHAT, body))
        scored = in_background(lambda: server.post("/v1/completions", SCORE))
        wait_for(lambda: "rank 0 waits for ever" in server.log)
        os.kill(rank, signal.SIGKILL)
        begin = time.monotonic()
        for waiting in (asked, scored):
            check_named(waiting.result(60), f"rank 1 (process {rank}) was ended by signal 9")
        assert not _is_ready(server)
        wait_for(lambda: not os.path.exists(f"/proc/{engine}"))
        assert time.monotonic() - begin < 30  # 5 s; the supervisor would have waited 60 s
        wait_for(lambda: _is_ready(server))
        assert server.stats()["restarts"] == 1
    finally:
        assert server.stop() == 0
    assert "no progress" not in server.final_log
    assert f"rank 1 (process {rank}) was ended by signal 9 (SIGKILL)" in server.final_log


LAYOUTS = {"--tp 2 --pp 2": 4, "--tp 2 --attention dp": 2}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_answer_like_one_process(tiny: Server, layout: str) -> None:
    body = {"messages": ASK, "max_tokens": 12, "seed": 3, "logprobs": True, "top_logprobs": 3}
    long = {**body, "messages": [{"role": "user", "content": "hello world, " * 60}]}
    server = Server("--device", "cpu", *layout.split(), fake=False).wait()
    try:
        for asked in (body, long):
            found, wanted = (each.post(CHAT, asked).json() for each in (server, tiny))
            assert found["choices"] == wanted["choices"]
        if "dp" in layout:
            wait_for(lambda: "dsv4:home_tokens_fullest_total{" in _metrics(server))
        left = ranks(server.engine_pid)
        assert len(left) == LAYOUTS[layout]  # the nursery and all but rank 0
        if "pp" in layout:
            os.kill(left[-1], signal.SIGKILL)  # nothing runs
            name = rf"rank \d \(process {left[-1]}\) was ended by signal 9"
            wait_for(lambda: re.match(name, _health(server).get("error", "")) is not None)
    finally:
        assert server.stop() == 0
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left))


def _metrics(server: Server) -> str:
    with server.client() as client:
        return client.get("/metrics").text


def _health(server: Server) -> dict[str, Any]:
    with server.client() as client:
        return dict(client.get("/health").json())


def _is_ready(server: Server) -> bool:
    with server.client() as client:
        return client.get("/ready").status_code == 200
