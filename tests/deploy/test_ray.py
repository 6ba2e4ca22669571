"""A real Ray on this machine: three replicas, and what goes wrong with them (`make ray`)."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="dsv4[ray] is not installed")

from tests.server.support import PATIENCE_S, Server, in_background, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SMALL = ("--ray", "--replica-cpus", "0.1", "--health-seconds", "1")
WORDS = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Server]:
    """Three replicas with the scripted engine."""
    running = Server(*SMALL, "--replicas", "3", "--step-timeout", "4").wait()
    wait_for_replicas(running, 3)
    yield running
    assert running.stop() == 0


def replicas(server: Server) -> list[dict[str, Any]]:
    return list(server.stats().get("replicas", []))


def wait_for_replicas(server: Server, count: int) -> None:
    wait_for(lambda: [r["is_healthy"] for r in replicas(server)] == [True] * count, 2 * PATIENCE_S)


def stream(server: Server, content: str) -> list[Any]:
    """The events of a streamed answer, parsed."""
    body = {"messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": 300}
    events: list[Any] = []
    with (
        server.client(timeout=2 * PATIENCE_S) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        if answer.status_code != 200:
            answer.read()
            return [answer.json()]
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
    return events


def text_of(events: list[Any]) -> str:
    deltas = [e["choices"][0]["delta"] for e in events if isinstance(e, dict) and e.get("choices")]
    return "".join(delta.get("content") or "" for delta in deltas)


def outcome(events: list[Any]) -> str:
    """`whole`, or the code of the error that ended the stream; anything else is a lost request."""
    errors = [event["error"] for event in events if isinstance(event, dict) and "error" in event]
    if errors:
        return str(errors[-1]["code"])
    if not events or events[-1] != "[DONE]":
        return f"broken off after {len(events)} events"
    return "whole" if text_of(events) == WORDS else f"cut: {text_of(events)!r}"


def slowly(milliseconds: int) -> str:
    return f"MS {milliseconds}\nSAY </think>{WORDS}"


def running_streams(server: Server, count: int, milliseconds: int = 400) -> list[Any]:
    """So many slow streams, all of them under way."""
    found = [in_background(lambda: stream(server, slowly(milliseconds))) for _ in range(count)]
    wait_for(lambda: server.stats()["num_running"] == count)
    return found


def test_a_killed_replica_ends_its_own_streams_only(fleet: Server) -> None:
    before = replicas(fleet)
    streams = running_streams(fleet, 16)
    os.kill(before[0]["process"], signal.SIGKILL)
    outcomes = [item.result(2 * PATIENCE_S) for item in streams]
    kinds = [outcome(events) for events in outcomes]
    assert set(kinds) == {"whole", "engine_died"}, kinds
    assert 1 <= kinds.count("engine_died") <= 10  # about a third was there
    wait_for_replicas(fleet, 3)
    names = {replica["name"] for replica in replicas(fleet)}
    assert before[0]["name"] not in names
    assert {replica["name"] for replica in before[1:]} <= names  # untouched
    assert outcome(stream(fleet, slowly(0))) == "whole"


def test_an_engine_that_dies_takes_its_replica_along(fleet: Server) -> None:
    before = {replica["name"] for replica in replicas(fleet)}
    answer = fleet.chat("DIE\nSAY one two three")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_died"
    assert answer.headers["retry-after"] == "2"
    wait_for(lambda: len({r["name"] for r in replicas(fleet)} - before) == 1)
    wait_for_replicas(fleet, 3)


def test_a_replica_that_hangs_is_replaced(fleet: Server) -> None:
    """Stopped in the middle of streams: they end with an error, health checks notice."""
    before = replicas(fleet)
    streams = running_streams(fleet, 9)
    os.kill(before[0]["process"], signal.SIGSTOP)
    kinds = [outcome(item.result(2 * PATIENCE_S)) for item in streams]
    assert set(kinds) == {"whole", "engine_died"}, kinds
    wait_for(lambda: before[0]["name"] not in {r["name"] for r in replicas(fleet)})
    wait_for_replicas(fleet, 3)
    wait_for(lambda: not Path(f"/proc/{before[0]['process']}").exists())


def test_a_stuck_engine_is_noticed(fleet: Server) -> None:
    """Its process lives and answers nothing; the replica is well otherwise."""
    before = {replica["name"] for replica in replicas(fleet)}
    assert outcome(stream(fleet, "STUCK\nSAY x")) == "engine_died"
    wait_for(lambda: len({r["name"] for r in replicas(fleet)} - before) == 1)
    wait_for_replicas(fleet, 3)


def test_requests_keep_their_errors(fleet: Server) -> None:
    assert fleet.chat("REFUSE messages: too odd").status_code == 400
    assert fleet.chat("BUSY no room").status_code == 503
    assert fleet.chat("FAIL\nSAY x").status_code == 500
    with fleet.client() as client:
        found = client.get("/nowhere")
    assert (found.status_code, found.json()["error"]["type"]) == (404, "not_found_error")


def test_who_leaves_ends_the_work(fleet: Server) -> None:
    body = {"messages": [{"role": "user", "content": "HANG\nSAY x"}], "stream": True}
    with (
        fleet.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        wait_for(lambda: fleet.stats()["num_running"] == 1)
    wait_for(lambda: fleet.stats()["num_running"] == 0)


def test_metrics_of_all_replicas_and_the_ingress(fleet: Server) -> None:
    assert fleet.chat("SAY x").status_code == 200
    with fleet.client() as client:
        text = client.get("/metrics").text
    up = re.findall(r'^dsv4:engine_up\{model_name="tiny",replica="(\w+)"\} 1.0$', text, re.M)
    assert sorted(up) == sorted(replica["name"] for replica in replicas(fleet))
    assert re.search(r'^dsv4:request_success_total\{[^}]*ingress="\w+"', text, re.M)
    kinds = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(kinds) == len(set(kinds))  # a family twice would be refused by Prometheus


def test_more_than_all_replicas_take() -> None:
    """Six run or wait in replicas, two wait before them; the rest is told to come back."""
    options = ("--replicas", "3", "--max-sequences", "1", "--max-waiting", "2")
    server = Server(*SMALL, *options).wait()
    try:
        wait_for_replicas(server, 3)
        found = [in_background(lambda: server.chat(slowly(500))) for _ in range(24)]
        answers: list[httpx.Response] = [item.result(2 * PATIENCE_S) for item in found]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert {answer.status_code for answer in answers} == {200, 429}
        assert len(answers) - len(refused) >= 6
        for answer in refused:
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"
        assert server.chat("SAY x").status_code == 200
    finally:
        assert server.stop() == 0


def test_scale_up_and_down_and_drain() -> None:
    """A stream that is under way when its replica has to leave is finished there."""
    scale = ("--replicas", "1-3", "--upscale-seconds", "1", "--downscale-seconds", "2")
    often = {
        f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5"
        for who in ("HANDLE", "REPLICA")
    }
    options = (*SMALL, *scale, "--max-sequences", "2", "--drain-seconds", "60")
    server = Server(*options, env=often).wait()
    try:
        wait_for_replicas(server, 1)
        is_over = threading.Event()

        def ask_on() -> list[str]:
            kinds = []
            while not is_over.is_set():
                kinds.append(outcome(stream(server, slowly(200))))
            return kinds

        askers = [in_background(ask_on) for _ in range(8)]
        wait_for_replicas(server, 3)
        long = running_streams_of(server, 4, is_over)
        kinds = [kind for item in askers for kind in item.result(2 * PATIENCE_S)]
        assert set(kinds) == {"whole"}
        wait_for_replicas(server, 1)
        assert [outcome(item.result(2 * PATIENCE_S)) for item in long] == ["whole"] * 4
        assert server.chat("SAY x").status_code == 200
    finally:
        assert server.stop() == 0


def running_streams_of(server: Server, count: int, is_over: threading.Event) -> list[Any]:
    """Streams of some 20 s that begin while all replicas are there."""
    found = [in_background(lambda: stream(server, slowly(1800))) for _ in range(count)]
    time.sleep(1.0)
    is_over.set()
    return found


def test_shutting_down_ends_running_streams_first() -> None:
    server = Server(*SMALL, "--replicas", "2", "--drain-seconds", "60").wait()
    wait_for_replicas(server, 2)
    streams = running_streams(server, 4)
    late: list[int] = []

    def knock() -> None:
        while not late or late[-1] != 503:
            late.append(server.chat("SAY x").status_code)

    end = in_background(server.stop)
    in_background(knock).result(PATIENCE_S)
    assert set(late) <= {200, 503}
    assert [outcome(item.result(PATIENCE_S)) for item in streams] == ["whole"] * 4
    assert end.result(2 * PATIENCE_S) == 0


def test_conversations_return_to_the_replica_that_knows_them() -> None:
    """The embedded model: the second turn finds the first one's tokens, every time."""
    server = Server(*SMALL, "--replicas", "3", "--device", "cpu", fake=False).wait()
    options: Any = {"reasoning_effort": "none", "temperature": 0, "max_tokens": 8}
    try:
        wait_for_replicas(server, 3)
        talks = [
            [{"role": "user", "content": f"Talk {n}. " + "The river is long. " * 60}]
            for n in range(6)
        ]
        for talk in talks:
            answer = server.post("/v1/chat/completions", {"messages": talk, **options}).json()
            said = answer["choices"][0]["message"]["content"]
            talk += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": "And then?"},
            ]
        figures = [
            server.post("/v1/chat/completions", {"messages": talk, **options}).json()["usage"]
            for talk in talks
        ]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in figures]
        assert all(usage["prompt_tokens"] > 256 for usage in figures)
        assert all(count >= 256 for count in cached), cached
        wait_for(lambda: server.stats()["num_running"] == 0)
        assert server.stats()["num_prefix_hit"] > 0
    finally:
        assert server.stop() == 0
