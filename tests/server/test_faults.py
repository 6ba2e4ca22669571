"""Things that break: the engine, the disk, the network, patience."""

import gc
import json
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dsv4.chat import Tokenizer
from dsv4.cli import main
from dsv4.server import run as server_run
from dsv4.server.options import ServerOptions
from dsv4.server.service import Service
from dsv4.server.worker.wire import Channel
from dsv4.util.models import model_folder
from tests.server.support import ASK, PATIENCE_S, Server, in_background, wait_for

CHAT = "/v1/chat/completions"


@pytest.fixture
def own() -> Iterator[Callable[..., Server]]:
    """Servers that a test may break; they end with it."""
    made: list[Server] = []

    def start(*options: str, **more: Any) -> Server:
        made.append(Server(*options, **more))
        return made[-1]

    yield start
    for server in made:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
        if not server.file.closed:
            server.file.close()


def stream_text(server: Server, content: str, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": content}], "stream": True, **fields}
    with server.client() as client, client.stream("POST", CHAT, json=body) as answer:
        return "".join(answer.iter_text())


def status(server: Server, path: str) -> int:
    with server.client() as client:
        return client.get(path).status_code


def score(server: Server) -> httpx.Response:
    body = {"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 0}
    return server.post("/v1/completions", body)


def test_the_engine_dies_and_comes_back(own: Callable[..., Server]) -> None:
    server = own().wait()
    other = in_background(lambda: server.chat("HANG"))
    wait_for(lambda: server.stats()["num_running"] == 1)
    text = stream_text(server, "SAY </think>one two three\nDIE")
    assert '"code":"engine_died"' in text
    assert text.endswith("data: [DONE]\n\n")
    answer = other.result(PATIENCE_S)  # it was only in the same process
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "overloaded_error"
    wait_for(lambda: status(server, "/ready") == 200)
    assert server.chat("SAY </think>back").json()["choices"][0]["message"]["content"] == "back"
    assert server.stats()["restarts"] == 1
    # and again, from outside, while nothing runs
    os.kill(server.engine_pid, signal.SIGKILL)
    wait_for(lambda: status(server, "/health") == 503)
    answer = server.chat("SAY x")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert status(server, "/v1/models") == 200  # known all the same
    wait_for(lambda: status(server, "/ready") == 200)
    assert server.chat("SAY x").status_code == 200
    assert server.stop() == 0
    assert "restarting" in server.final_log


def test_the_real_engine_is_restarted(tiny: Server) -> None:
    old = tiny.engine_pid
    body = {"messages": ASK, "max_tokens": 8}
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: status(tiny, "/ready") == 503)
    wait_for(lambda: status(tiny, "/ready") == 200, 90)
    assert tiny.engine_pid != old
    assert tiny.post(CHAT, body).status_code == 200


def test_numbers_that_are_none_are_named_in_every_form(own: Callable[..., Server]) -> None:
    """A prompt whose activations are NaN: the same error everywhere, counted; others go on."""
    [bad, *_] = Tokenizer.from_folder(model_folder("tiny")).encode_with_specials("§")
    env = {"FAKE_ENGINE": "poisoned_engine.py", "POISONED": str(bad)}
    server, text = own("--device", "cpu", env=env).wait(), "what is §?"
    said = [{"role": "user", "content": text}]
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": said}),
        ("/v1/completions", {"prompt": text}),
        (CHAT, {"messages": ASK, "logit_bias": {bad: 100}}),  # at its second token
        ("/v1/completions", {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 0}),
        ("/v1/responses", {"input": text}),
        ("/v1/messages", {"messages": said, "max_tokens": 9}),
    ]
    running = in_background(lambda: server.post(CHAT, {"messages": ASK, "max_tokens": 60}))
    for path, body in asked:
        for stream in (False, True):
            answer = server.post(path, {**body, "stream": stream})
            is_whole = not stream or "echo" in body  # scored before the stream begins
            assert answer.status_code == (500 if is_whole else 200), answer.text
            last = answer.text if is_whole else re.findall(r"^data: ({.*)$", answer.text, re.M)[-1]
            found = json.loads(last)
            error = found["error"] if "error" in found else found["response"]["error"]
            code = error["details"]["error_code"] if "messages" in path else error["code"]
            assert code == "numerics_error"
            assert "NaN or infinities" in error["message"]
            assert not is_whole or answer.headers["x-should-retry"] == "false"
    assert running.result(PATIENCE_S).status_code == 200
    with server.client() as client:
        metrics = client.get("/metrics").text
    for name in (
        'request_errors_total{code="numerics_error"',
        'success_total{finished_reason="error"',
    ):
        assert re.findall(re.escape(name) + r".*} (\S+)", metrics) == [f"{2 * len(asked)}.0"], name
    assert server.stop() == 0


@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_an_engine_without_progress_is_restarted(own: Callable[..., Server], how: str) -> None:
    server = own("--step-timeout", "4").wait()
    engine = server.engine_pid
    running = in_background(lambda: server.chat("STUCK" if how == "stuck" else "HANG"))
    if how == "stuck":
        wait_for(lambda: "the loop is stuck" in server.log)
    else:
        wait_for(lambda: server.stats()["num_running"] == 1)
    if how == "stopped":
        os.kill(engine, signal.SIGSTOP)
    others = [in_background(ask) for ask in (lambda: server.chat("x"), lambda: score(server))]
    wait_for(lambda: status(server, "/ready") == 503)
    for waiting in (running, *others):  # also what the engine has not even accepted
        answer = waiting.result(PATIENCE_S)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_died"
    wait_for(lambda: status(server, "/ready") == 200)
    assert server.engine_pid != engine
    assert not os.path.exists(f"/proc/{engine}")
    assert server.chat("SAY </think>back").json()["choices"][0]["message"]["content"] == "back"
    assert server.stop() == 0
    assert "no progress" in server.final_log


def test_a_paused_engine_is_not_ready_until_it_goes_on(own: Callable[..., Server]) -> None:
    """Long before it would be restarted; what was asked meanwhile is answered afterwards."""
    server = own("--step-timeout", "3600").wait()
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    wait_for(lambda: status(server, "/ready") == 503)
    waiting = in_background(lambda: server.chat("SAY </think>late"))
    assert (status(server, "/health"), server.engine_pid) == (503, engine)
    os.kill(engine, signal.SIGCONT)
    wait_for(lambda: status(server, "/ready") == 200)
    answer = waiting.result(PATIENCE_S)
    assert answer.json()["choices"][0]["message"]["content"] == "late"
    assert server.stats()["restarts"] == 0


def test_a_stopped_server_writes_its_prefixes(own: Callable[..., Server], tmp_path: Path) -> None:
    server = own("--prefix-disk", str(tmp_path), fake=False).wait()
    for word in ("alpha", "beta"):
        body = {"prompt": f"{word} " * 200, "max_tokens": 2}
        assert server.post("/v1/completions", body).status_code == 200
    assert server.stop() == 0
    assert len(list(tmp_path.glob("*/*.prefix"))) >= 2


def test_a_signal_lets_running_answers_finish(own: Callable[..., Server], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    server = own("--trace", str(trace)).wait()
    server.chat("SAY a</think>b")
    wait_for(lambda: server.stats()["num_running"] == 0)  # figures come a little late
    running = in_background(lambda: stream_text(server, "SAY </think>" + "w " * 30 + "end\nMS 20"))
    wait_for(lambda: server.stats()["num_running"] == 1)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: status(server, "/ready") == 503)
    refused = server.chat("SAY x")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    text = running.result(20)
    assert '"finish_reason":"stop"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert server.process.wait(PATIENCE_S) == 0
    # the trace has exact prompts and raw outputs; the log has counts, and no words
    entry = json.loads(trace.read_text().splitlines()[0])
    assert entry["prompt"].endswith("<｜User｜>SAY a</think>b<｜Assistant｜><think>")
    assert entry["outputs"] == ["a</think>b<｜end▁of▁sentence｜>"]
    assert "finish=stop" in server.log
    assert "SAY" not in server.log


def test_answers_that_outlive_the_deadline_end_with_an_error(own: Callable[..., Server]) -> None:
    server = own("--drain-seconds", "0.5").wait()
    engine = server.engine_pid
    running = in_background(lambda: stream_text(server, "HANG"))
    wait_for(lambda: server.stats()["num_running"] == 1)
    assert server.stop() == 0
    assert '"code":"shutting_down"' in running.result(PATIENCE_S)
    wait_for(lambda: not os.path.exists(f"/proc/{engine}"))


def test_a_second_signal_ends_it_at_once(own: Callable[..., Server]) -> None:
    server = own().wait()
    engine = server.engine_pid
    running = in_background(lambda: stream_text(server, "HANG"))
    wait_for(lambda: server.stats()["num_running"] == 1)
    server.process.send_signal(signal.SIGINT)
    wait_for(lambda: status(server, "/ready") == 503)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE_S) == 130
    with pytest.raises(httpx.RemoteProtocolError):
        running.result(PATIENCE_S)
    wait_for(lambda: not os.path.exists(f"/proc/{engine}"))  # no orphan is left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_still_loads_stops_without_a_word(
    own: Callable[..., Server], tmp_path: Path, number: signal.Signals
) -> None:
    """Loading is neither awaited nor cut off with a traceback, even where a prefix store would be
    written; without the server it does not go on."""
    server = own("--prefix-disk", str(tmp_path), env={"FAKE_ENGINE": "slow_engine.py"})
    wait_for(lambda: "plan: " in server.log)
    engine = server.engine_pid
    server.process.send_signal(number)
    assert server.process.wait(30) == (-number if number == signal.SIGKILL else 0)
    wait_for(lambda: not os.path.exists(f"/proc/{engine}"), 30)
    said = server.log[server.log.index("plan: ") :].splitlines()[1:]
    assert [" ".join(line.split()) for line in said if line.strip() and "loading" not in line] == (
        [] if number == signal.SIGKILL else ["WARNING shutting down"]
    )


def test_the_engine_ends_with_a_server_that_was_killed(own: Callable[..., Server]) -> None:
    server = own().wait()
    engine = server.engine_pid
    server.process.kill()
    wait_for(lambda: not os.path.exists(f"/proc/{engine}"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nothing_can_be_written(own: Callable[..., Server]) -> None:
    """Log and trace go to a full disk; answers do not depend on them."""
    port = free_port()
    with open("/dev/full", "w") as full:
        server = own("--port", str(port), "--trace", "/dev/full", stderr=full)
    server.url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return status(server, "/ready") == 200
        except httpx.TransportError:
            return False

    wait_for(is_ready)
    for _ in range(3):
        assert server.chat("SAY </think>fine").json()["choices"][0]["message"]["content"] == "fine"
    assert server.stop() == 0


@pytest.fixture(scope="module")
def hurried() -> Iterator[Server]:
    """A server whose limits of time are short."""
    server = Server(env={"FAKE_HURRY": "1"}).wait()
    yield server
    assert server.stop() == 0


def test_slow_clients_are_cut_off(hurried: Server) -> None:
    server = hurried
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    for data, answer in (
        (b"", b""),  # a connection that says nothing
        (head, b""),  # headers that never end
        (head + b"content-length: 100\r\n\r\n{", b"408"),  # a body that never ends
    ):
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as slow:
            slow.sendall(data)
            assert answer in slow.recv(4096)
    # many of them do not keep others out
    several = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    for one in several:
        one.sendall(head)
    assert server.chat("SAY x").status_code == 200
    for one in several:
        one.close()
    # and a second request on one connection has the same time for its headers
    with socket.create_connection(("127.0.0.1", server.port), 10) as again:
        again.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        found = b""
        while b'"ok"' not in found:
            found += again.recv(4096)
        again.sendall(b"GET /health HTTP/1.1\r\n")
        assert again.recv(4096) == b""


def test_signs_of_life_while_nothing_comes(hurried: Server) -> None:
    server = hurried
    for path, sign in ((CHAT, ": keep-alive\n\n"), ("/v1/messages", "event: ping\n")):
        body = {"messages": [{"role": "user", "content": "HANG"}], "stream": True, "max_tokens": 9}
        with server.client() as client, client.stream("POST", path, json=body) as answer:
            text = ""
            for part in answer.iter_text():
                text += part
                if sign in text:
                    break
    server.wait_until_idle()


# --- at the start -----------------------------------------------------------------------------


@dataclass
class Done:
    code: object
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """The command in this process, as far as it gets; what it leaves behind is tidied up."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def call(*options: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["dsv4", "serve", *options])
        with pytest.raises(SystemExit) as end:
            main()
        return Done(end.value.code, " ".join(capsys.readouterr().err.split()))

    yield call
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_port_in_use(run: Callable[..., Done]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("--port", str(taken.getsockname()[1]))
    assert done.code == 2
    assert "cannot listen" in done.err
    assert "--port" in done.err


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (("nowhere", "--port", "0"), 1, "neither a folder nor an embedded model"),
        (("--host", "no.such.host.invalid"), 2, "cannot listen"),
        (("--port", "70000"), 2, "--port"),
        (("--api-key", " x"), 2, "--api-key"),
        (("--api-key-file", "/nonexistent"), 2, "--api-key-file"),
    ],
)
def test_wrong_options(
    run: Callable[..., Done], options: tuple[str, ...], code: int, word: str
) -> None:
    done = run(*options)
    assert done.code == code
    assert word in done.err


def test_without_the_extra(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dsv4.server.run", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = run()
    assert done.code == 2
    assert "pip install 'dsv4[server]'" in done.err


def test_the_engines_own_errors_end_the_start(own: Callable[..., Server]) -> None:
    server = own(env={"FAKE_FAIL": "max_context is too large"})
    assert server.process.wait(PATIENCE_S) == 2
    assert "error: max_context is too large" in server.log
    assert "Traceback" not in server.log


def test_a_server_that_shuts_down_reports_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may be ready after Ctrl-C; uvicorn has then closed the listener."""
    told: list[str] = []

    def serve_and_stop(self: Any, sockets: list[socket.socket]) -> None:
        hear = self._service.link._notify
        hear({"kind": "plan", "text": "x"})
        self._service.is_draining = True
        sockets[0].close()
        hear({"kind": "ready"})

    monkeypatch.setattr(server_run._Server, "run", serve_and_stop)
    for name in ("freeze", "set_threshold"):
        monkeypatch.setattr(gc, name, lambda *_: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    server_run.serve(
        "tiny", {}, ServerOptions(port=0), lambda message: told.append(message["kind"])
    )
    assert told == ["plan"]


def test_a_model_without_a_tokenizer_is_told_before_it_loads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not by the first request, minutes later."""
    link: Any = SimpleNamespace(is_ready=False)
    Service(str(tmp_path), ServerOptions(), link)
    assert f"{tmp_path} has no tokenizer.json: only /v1/completions" in caplog.text


def test_an_engine_that_is_left_while_it_loads_ends_quietly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C while weights are read: no traceback of a broken pipe."""
    from dsv4.server.worker import main as worker

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker, "Heartbeat", lambda _: SimpleNamespace(turned_at=None))
    ours, theirs = socket.socketpair()
    Channel(ours).send({"kind": "load", "model": "tiny", "choices": {}, "log_level": 30})
    ours.close()
    assert worker.main(["engine", str(theirs.detach())]) == 1


@pytest.mark.parametrize(
    ("model", "choices", "code", "word"),
    [("tiny", {"max_context": 10**9}, 2, "max_context"), ("nowhere", {}, 1, "nowhere")],
)
def test_what_the_real_engine_says_then(
    monkeypatch: pytest.MonkeyPatch, model: str, choices: Any, code: int, word: str
) -> None:
    from dsv4.server.worker.main import main as engine_main  # torch is imported here only

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ours, theirs = socket.socketpair()
    with ours:
        channel = Channel(ours)
        channel.send({"kind": "load", "model": model, "choices": choices, "log_level": 30})
        assert engine_main(["engine", str(theirs.detach())]) == code
        message = channel.receive()
        while message is not None and message["kind"] == "beat":
            message = channel.receive()
        assert message is not None
        assert (message["kind"], message["exit_code"]) == ("failed", code)
        assert word in message["error"]
