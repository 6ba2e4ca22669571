"""Keys, limits, headers, and everything a client can get wrong below the level of fields."""

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dsv4.errors import OptionError
from dsv4.server.options import clean_origins
from tests.server.support import ASK, PATIENCE_S, Server, in_background, wait_for

CHAT = "/v1/chat/completions"
BODY = {"messages": ASK, "max_tokens": 5}


def raw(server: Server, data: bytes, seconds: float = PATIENCE_S) -> bytes:
    """Bytes in, everything that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), seconds) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def post_bytes(server: Server, data: bytes, **headers: str) -> httpx.Response:
    kinds = {"content-type": "application/json", **headers}
    with server.client() as client:
        return client.post(CHAT, content=data, headers=kinds)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "body"),
        (b"{", "not JSON"),
        (b"[]", "body"),
        (b"null", "body"),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', ""),
        (b"[" * 100_000, "not JSON"),
        (b'{"messages":' * 100_000, "not JSON"),
        (b'{"messages": [], "temperature": NaN}', "not JSON"),
        (b'{"messages": [], "seed": ' + b"9" * 5000 + b"}", ""),
        (json.dumps({**BODY, "tools": [{}] * 3000}).encode(), "tools"),
        (json.dumps({"messages": ASK * 30_000}).encode(), "messages"),
        (json.dumps({**BODY, "metadata": {"a": 1}, "temperature": None, "n": "2"}).encode(), "n"),
    ],
    ids=lambda value: str(value[:40]),
)
def test_bad_bodies(server: Server, data: bytes, word: str) -> None:
    answer = post_bytes(server, data)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert word in error["message"]
    assert "Traceback" not in answer.text
    assert ".py" not in answer.text


def test_too_large_bodies(server: Server) -> None:
    answer = post_bytes(server, b" " * (33 << 20))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"

    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 20)

    with server.client() as client:
        try:
            late = client.post(CHAT, content=chunks(), headers={"content-type": "application/json"})
            assert late.status_code == 413
        except httpx.WriteError:
            pass  # the server has answered and closed while we were still sending
    assert server.chat("SAY ok").status_code == 200


def test_compressed_bodies_are_not_unpacked(server: Server) -> None:
    answer = post_bytes(server, b"\x1f\x8b" + b"\0" * 100, **{"content-encoding": "gzip"})
    assert answer.status_code == 400
    assert "content-encoding" in answer.json()["error"]["message"]


def test_other_content_types(server: Server) -> None:
    answer = post_bytes(server, json.dumps(BODY).encode(), **{"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "content-type" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (1 << 20) + b"\r\n\r\n",
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00" + b"\0" * 100 + b"\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
    ],
    ids=["header of 1 MB", "path of 1 MB", "TLS", "HTTP/9"],
)
def test_bad_http(server: Server, data: bytes) -> None:
    try:
        answer = raw(server, data)
    except ConnectionError:
        answer = b""  # refused while we were still sending
    assert not answer or answer.startswith(b"HTTP/1.1 400")
    assert not answer or b"invalid_request_error" in answer
    assert server.chat("SAY ok").status_code == 200


def test_unknown_paths_and_methods(server: Server) -> None:
    with server.client() as client:
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("GET", "/v1/embeddings", 404),
            ("GET", CHAT, 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/static/../app.py", 404),
            ("GET", "/static/%2e%2e/app.py", 404),
        ):
            answer = client.request(method, path)
            assert answer.status_code == status, path
            assert answer.json()["error"]["message"]


def test_request_ids_and_headers(server: Server) -> None:
    with server.client() as client:
        mine = client.post(CHAT, json=BODY, headers={"x-request-id": "abc-1"})
        odd = client.post(CHAT, json=BODY, headers={"x-request-id": "a b\tc" * 50})
    assert mine.headers["x-request-id"] == "abc-1"
    assert mine.json()["id"] == "chatcmpl-abc-1"
    assert len(odd.headers["x-request-id"]) == 24
    assert mine.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in mine.headers
    assert "server" not in mine.headers


def test_two_requests_with_one_id(server: Server) -> None:
    """An id that a client chose twice must not mix up two answers."""

    def ask(word: str) -> str:
        body = {"messages": [{"role": "user", "content": f"SAY </think>{word}\nMS 5"}]}
        answer = server.post(CHAT, body, headers={"x-request-id": "same"})
        return str(answer.json()["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(4) as pool:
        words = ["alpha", "beta", "gamma", "delta"]
        assert list(pool.map(ask, words)) == words


def test_a_foreign_name_is_refused_without_keys(server: Server) -> None:
    with server.client() as client:
        for host in ("evil.example", "evillocalhost:80", "localhost.evil.example"):
            answer = client.get("/v1/models", headers={"host": host})
            assert answer.status_code == 400, host
            assert "host" in answer.json()["error"]["message"]
        for host in ("localhost:1", "my.localhost", "127.0.0.1", "[::1]:8000"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200


def test_a_slow_reader_is_not_waited_for(server: Server) -> None:
    """It reads nothing; others are answered meanwhile."""
    text = json.dumps({"messages": [{"role": "user", "content": "SAY " + "x " * 900}], "stream": 1})
    body = text.replace('"stream": 1', '"stream": true').encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        for _ in range(3):
            assert server.chat("SAY </think>ok").json()["choices"][0]["message"]["content"] == "ok"
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(server: Server, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "HANG"}], "stream": stream, "n": 3}
    with server.client(timeout=0.5) as client, pytest.raises(httpx.TimeoutException):
        client.post(CHAT, json=body)
    server.wait_until_idle()


def test_curl_sees_the_bytes_of_a_stream(server: Server) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "SAY </think>hi"}], "stream": True})
    command = ["curl", "-sN", "-i", f"{server.url}{CHAT}", "-d", body]
    done = subprocess.run(
        [*command, "-H", "content-type: application/json"], capture_output=True, timeout=PATIENCE_S
    )
    head, _, events = done.stdout.partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream; charset=utf-8" in head
    assert b"x-accel-buffering: no" in head
    assert events.endswith(b"data: [DONE]\n\n")
    lines = [line for line in events.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    bad = subprocess.run([*command[:-1], "{oops"], capture_output=True, timeout=PATIENCE_S)
    assert b"400 Bad Request" in bad.stdout
    assert b"content-type" in bad.stdout


def test_metrics_and_health(server: Server) -> None:
    server.chat("SAY a</think>b")
    with server.client() as client:
        text = client.get("/metrics").text
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").status_code == 200
        assert client.get("/version").json()["version"]
        assert client.get("/openapi.json").status_code == 200
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "prompt_tokens_cached_total",
        "generation_tokens_total",
        'request_success_total{finished_reason="stop"',
        "num_preemptions_total",
        "step_surprises_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "request_time_per_output_token_seconds_sum",
        "e2e_request_latency_seconds_count",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
        "reasoning_tokens_total",
        "time_per_output_token_seconds_bucket",
        "request_queue_time_seconds_sum",
        "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_bucket",
        'iteration_tokens_total_bucket{le="2.0",model_name="tiny"} 7.0',
        'iteration_tokens_total_bucket{le="+Inf",model_name="tiny"} 12.0',
        'iteration_tokens_total_sum{model_name="tiny"} 70.0',
        "cache_config_info{block_size=",
    ):
        assert f"dsv4:{name}" in text, name
    figures = dict(re.findall(r"^(dsv4:\S+?)\{[^}]*\} (\S+)$", text, re.M))
    waited, computed = (
        float(figures[f"dsv4:request_{word}_time_seconds_sum"]) for word in ("queue", "prefill")
    )
    assert 0 < waited == computed / 2  # as the engine of the test says


def test_small_doors(server: Server) -> None:
    with server.client() as client:
        assert client.get("/ping").json() == client.post("/ping").json() == {"status": "ok"}
        assert client.get("/load").json() == {"server_load": 0}
        page = client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "POST /v1/chat/completions" in page.text
        assert "min_tokens" in page.text
        assert "<script" not in page.text
        info = client.get("/tokenizer_info").json()
        assert (info["bos_token"], info["eos_token"]) == (
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
        )


@pytest.mark.parametrize(
    "path", ["/", "/health", "/v1/models", "/v1/models/tiny", "/metrics", "/docs", "/openapi.json"]
)
def test_head_is_where_get_is(server: Server, path: str) -> None:
    with server.client() as client:
        got, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
        assert client.head("/v1/chat/completions").status_code == 405


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_who_leaves_is_counted_as_abort(server: Server, path: str, stream: bool) -> None:
    raw = "<｜User｜>HANG\n<｜Assistant｜>"
    said = {"prompt": raw} if path == "/v1/completions" else {"messages": HANG}

    def counts() -> dict[str, float]:
        with server.client() as client:
            found = re.findall(
                r'request_success_total\{finished_reason="(abort|error)".*\} (\S+)',
                client.get("/metrics").text,
            )
        return {"abort": 0.0, "error": 0.0} | {name: float(value) for name, value in found}

    before = counts()
    with server.client(timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post(path, json={**said, "max_tokens": 9, "stream": stream}).read()
    server.wait_until_idle()
    wait_for(lambda: counts() == {**before, "abort": before["abort"] + 1})


HANG = [{"role": "user", "content": "HANG"}]


# --- servers with options ---------------------------------------------------------------------


def test_keys(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("second\n\nthird\n")
    server = Server("--api-key", "first", "--api-key-file", str(file), env={"DSV4_API_KEY": ""})
    server.wait()
    try:
        with server.client() as client:
            for headers in (
                {"authorization": "Bearer first"},
                {"authorization": "bearer second"},
                {"x-api-key": "third"},
            ):
                assert client.get("/v1/models", headers=headers).status_code == 200
            for headers in ({}, {"authorization": "Bearer firs"}, {"x-api-key": "\xe9"}):
                raw_headers = {key: value.encode("latin-1") for key, value in headers.items()}
                answer = client.post(CHAT, json=BODY, headers=raw_headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "authentication_error"
            anthropic = client.post("/v1/messages", json={})
            assert anthropic.json()["error"]["type"] == "authentication_error"
            assert anthropic.json()["type"] == "error"
            assert client.get("/metrics").status_code == 401
            assert client.get("/stats").status_code == 401
            for path in ("/health", "/ready", "/", "/static/app.js"):
                assert client.get(path).status_code == 200
            # with keys, a server may be reached under any name
            named = {"host": "models.example", "x-api-key": "first"}
            assert client.get("/v1/models", headers=named).status_code == 200
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize(
    "origin", ["page.example", "https://page.example/", "https://Page.example", "", "*.example"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(OptionError, match=r"--cors-origin is .* expected one like https://"):
        clean_origins(["https://page.example:8443", "*", "null", origin])


def test_a_full_queue_names_and_cors() -> None:
    server = Server(
        "--max-waiting", "0", "--served-model-name", "a", "--alias", "b/c", "--any-model",
        "--cors-origin", "http://page.example",
    ).wait()  # fmt: skip
    try:
        with server.client() as client:
            names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert names == ["a", "b/c"]
        assert server.chat("x", model="whatever").json()["model"] == "whatever"
        asked = {"origin": "http://page.example", "access-control-request-method": "POST"}
        with server.client() as client:
            answer = client.options(CHAT, headers=asked)
            assert answer.headers["access-control-allow-origin"] == "http://page.example"
            other = client.options(CHAT, headers={**asked, "origin": "http://evil.example"})
            assert "access-control-allow-origin" not in other.headers
        # four sequences run at once; a fifth finds no place to wait
        waiting = in_background(lambda: server.chat("HANG", n=4))
        wait_for(lambda: server.stats()["num_running"] == 4)
        answer = server.chat("SAY x")
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        assert not waiting.done()
    finally:
        server.process.kill()
        server.process.wait()
        server.file.close()
