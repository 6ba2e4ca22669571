"""Servers as other processes, and small helpers to talk to them."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
REAL = (sys.executable, "-c", "from dsv4.cli import main; main()", "serve")
FAKE = (sys.executable, str(HERE / "fake_server.py"), "serve")
# `make ray` runs client tests through three replicas
RAY = ("--ray", "--replicas", "3", "--replica-cpus", "0.1") if "DSV4_TEST_RAY" in os.environ else ()
ASK = [{"role": "user", "content": "hi"}]
PATIENCE_S = 120.0  # no claim about speed: a busy machine may take its time, a hang ends some day


class Server:
    """A running `dsv4 serve`; `log` holds what it printed."""

    def __init__(
        self, *options: str, fake: bool = True, env: dict[str, str] | None = None, **popen: Any
    ) -> None:
        command = [*(FAKE if fake else REAL), "--port", "0", *options]
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": "local",
            **(env or {}),
        }
        self.file = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by stop
        popen.setdefault("stderr", self.file)
        self.process = subprocess.Popen(command, env=variables, cwd=ROOT, **popen)
        self.url = ""
        self.final_log = ""

    def wait(self, seconds: float = PATIENCE_S) -> "Server":
        """Until the line with the address has come."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = re.search(r"ready: (http\S+)", self.log)
            if found:
                self.url = found.group(1)
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"the server did not become ready:\n{self.log}")

    @property
    def log(self) -> str:
        self.file.flush()
        return os.pread(self.file.fileno(), 1 << 24, 0).decode("utf-8", "replace")

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def client(self, **options: Any) -> httpx.Client:
        options.setdefault("timeout", PATIENCE_S)
        options.setdefault("verify", False)  # plain HTTP; reading certificates takes its time
        return httpx.Client(base_url=self.url, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 200, **fields}
        return self.post("/v1/chat/completions", body)

    def stats(self) -> dict[str, Any]:
        with self.client() as client:
            return dict(client.get("/stats").json())

    def wait_until_idle(self, seconds: float = PATIENCE_S) -> None:
        """Until the engine runs nothing."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stats = self.stats()
            if stats["num_running"] + stats["num_waiting"] == 0:
                return
            time.sleep(0.05)
        raise AssertionError(f"still running: {self.stats()}")

    def stop(self, seconds: float = PATIENCE_S) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.process.wait()
            self.final_log = self.log
            self.file.close()


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.03)


def in_background(work: Callable[[], Any]) -> "Future[Any]":
    """Run in a thread; its result or error waits in the future."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
