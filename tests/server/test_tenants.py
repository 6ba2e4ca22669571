"""Who may what: keys keep to themselves, pages of other origins stay out, files are private."""

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server.support import ASK, Server

CHAT = "/v1/chat/completions"
BODY = {"messages": ASK, "max_tokens": 5}


@dataclass
class Shared:
    server: Server
    folder: Path

    def post(self, key: str, path: str = CHAT, **fields: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return self.server.post(path, {**BODY, **fields}, headers=headers)

    def salts(self) -> list[str]:
        lines = map(json.loads, (self.folder / "log").read_text().splitlines())
        return [line["request"]["cache_salt"] for line in lines if line["kind"] == "add"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text("one\ntwo\n")
    (folder / "urgent").write_text("three\n")
    server = Server(
        "--api-key", "on-the-line", "--api-key-file", str(folder / "keys"),
        "--priority-key-file", str(folder / "urgent"), "--any-model",
        "--trace", str(folder / "trace"),
        env={"FAKE_ENGINE_LOG": str(folder / "log")},
    ).wait()  # fmt: skip
    yield Shared(server, folder)
    assert server.stop() == 0


def test_prefixes_belong_to_a_key(shared: Shared) -> None:
    for key, salt in (("one", None), ("one", None), ("two", None), ("two", "mine")):
        assert shared.post(key, cache_salt=salt).status_code == 200
    body = {"prompt": "x", "cache_salt": "mine"}
    assert shared.post("two", "/v1/completions", **body).status_code == 200
    first, again, other, further, completion = shared.salts()[-5:]
    assert first == again
    assert len({first, other, further}) == 3
    assert further == completion
    assert "one" not in first


def test_prefixes_are_shared_where_the_operator_says_so(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    server = Server(
        "--api-key-file", str(tmp_path / "keys"), "--share-prefixes",
        env={"FAKE_ENGINE_LOG": str(tmp_path / "log")},
    ).wait()  # fmt: skip
    try:
        both = Shared(server, tmp_path)
        for key in ("one", "two"):
            assert both.post(key).status_code == 200
        assert len(set(both.salts())) == 1
    finally:
        server.stop()


def test_only_some_keys_may_hurry(shared: Shared) -> None:
    refused = shared.post("one", priority=1)
    assert refused.status_code == 403
    assert refused.json()["error"]["param"] == "priority"
    assert shared.post("one", priority=-5).status_code == 200  # behind others: everybody may
    assert shared.post("three", priority=7).status_code == 200


def test_without_keys_nobody_may_hurry(server: Server) -> None:
    assert server.chat("hi", priority=1).status_code == 403


def test_names_cannot_forge_log_lines(shared: Shared) -> None:
    name = "m\n2026-01-01 forged line\r\x1b[31mred\u2028"
    assert shared.post("one", model=name).json()["model"] == name
    log = shared.server.log
    assert "\\n2026-01-01 forged line\\r\\x1b[31mred\\u2028" in log
    assert "\n2026-01-01 forged" not in log
    assert "\x1b[31m" not in log


def test_keys_do_not_show_among_the_processes(shared: Shared) -> None:
    command = Path(f"/proc/{shared.server.process.pid}/cmdline").read_bytes()
    assert b"on-the-line" not in command
    assert b"--api-key-file" in command
    assert shared.post("on-the-line").status_code == 200
    assert "chmod 600" in shared.server.log  # the key file of this test is readable by others


def test_the_trace_is_the_operators_alone(shared: Shared) -> None:
    assert shared.post("one").status_code == 200
    mode = (shared.folder / "trace").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize(
    "kind",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
     "text/json", "application/jsonx"],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize"])
def test_bodies_that_a_form_could_send_are_refused(
    server: Server, kind: str | None, path: str
) -> None:
    """A page elsewhere can make a browser send these without asking the server first."""
    headers = {} if kind is None else {"content-type": kind}
    with server.client() as client:
        answer = client.post(path, content=json.dumps(BODY), headers=headers)
        assert answer.status_code == 400
        assert "content-type" in answer.json()["error"]["message"]
        good = {"content-type": "Application/JSON; charset=utf-8"}
        if path == CHAT:
            assert client.post(path, content=json.dumps(BODY), headers=good).status_code == 200


def test_pages_of_other_origins_are_refused(server: Server) -> None:
    with server.client() as client:
        for origin in ("http://evil.example", "null", f"{server.url}.evil.example", ""):
            answer = client.post(CHAT, json=BODY, headers={"origin": origin})
            assert answer.status_code == 403, origin
            assert answer.json()["error"]["code"] == "foreign_origin"
            assert client.get("/stats", headers={"origin": origin}).status_code == 403
        assert client.post(CHAT, json=BODY, headers={"origin": server.url}).status_code == 200


def test_audit_files_are_private(tmp_path: Path) -> None:
    from dsv4.request import Request
    from dsv4.scheduler import Audit, AuditedAnswer

    audit = Audit(1.0, str(tmp_path / "audit"), {})
    old = os.umask(0)
    try:
        name = audit._write(AuditedAnswer(Request("a", (1,)), 1, (), 0, 0), 0, None, None)
    finally:
        os.umask(old)
    [path] = (tmp_path / "audit").iterdir()
    assert path.name in name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
