"""Clients of every kind at a server whose engine is killed, stopped, starved and cut off its disk.

    python benchmarks/serve_chaos.py [--clients 16] [--seconds 300] [-o RECORD.json]

Every request must be answered or fail cleanly (a status with an error object, an error event):
none hangs, none is lost. Between two faults the engine is given time to work, and must answer.
Afterwards memory, open files, threads and pages are back where they were, and no process is left.
Exit code 1 if a promise does not hold.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
CHAT = "/v1/chat/completions"
READY_SECONDS = 180.0  # for the engine to be back after a fault
WORK_SECONDS = 4.0  # at least, between two faults
FAULTS = ("killed", "stopped", "paused", "starved", "disk full")
MEMORY_GROWTH_MB = 150.0  # of the web process: caches of the allocator and of the tokenizer
KINDS = ("whole", "stream", "leaves", "guided", "scored", "bad")
KIND_SHARES = (4, 4, 3, 1, 1, 2)
LOG_LINES = (
    "restarting it",
    "made no progress",
    "a step failed",
    "no more prefixes are written",
    "Traceback",
)
BAD: tuple[tuple[str, bytes], ...] = (
    (CHAT, b"{"),
    (CHAT, b'{"messages": [' + b"1," * 200_000 + b"1]}"),
    (CHAT, b'{"messages": [{"role": "user", "content": 5}]}'),
    ("/v1/completions", b'{"prompt": [-1]}'),
    ("/v1/messages", b'{"messages": []}'),
    ("/nowhere", b"{}"),
)


class Chaos:
    def __init__(self, clients: int, seconds: float, seed: int, patience: float) -> None:
        self.clients, self.seconds, self.seed = clients, seconds, seed
        self.patience = patience  # a request that takes longer hangs
        self.folder = tempfile.TemporaryDirectory()
        options = ("--prefix-disk", f"{self.folder.name}/prefixes", "--step-timeout", "6")
        # Few pages, so that prefixes are evicted to the disk and sequences preempted.
        sizes = ("--max-sequences", "8", "--max-context", "2048", "--state-tokens", "4096")
        marker = {"DSV4_CHAOS": self.folder.name}  # every process of this server has it
        self.server = subprocess.Popen(
            [sys.executable, "-m", "dsv4", "serve", "--port", "0", *options, *sizes],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **marker},
            stderr=subprocess.PIPE,  # a full disk must not hide the log
            text=True,
        )
        self.log: list[str] = []
        self.reader = threading.Thread(target=self.read_log)
        self.reader.start()
        self.url = ""
        self.outcomes: Counter[str] = Counter()
        self.slowest: dict[str, float] = {}  # of each outcome, in seconds
        self.faults: Counter[str] = Counter()
        self.ready_again_s: list[float] = []
        self.num_idle_times = 0  # pauses between faults without an answer
        self.problems: list[str] = []

    # --- looking at the processes -------------------------------------------------------------

    def read_log(self) -> None:
        assert self.server.stderr is not None
        with self.server.stderr as lines:
            self.log += lines

    def wait_for_address(self) -> None:
        end = time.monotonic() + READY_SECONDS
        while not self.url:
            found = re.search(r"ready: (http\S+)", "".join(self.log))
            if found:
                self.url = found.group(1)
            elif self.server.poll() is not None or time.monotonic() > end:
                raise SystemExit("the server did not become ready")
            time.sleep(0.05)

    def engine_pid(self) -> int | None:
        pid = self.server.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None

    async def stats(self) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=self.url, timeout=READY_SECONDS) as client:
            stats: dict[str, Any] = (await client.get("/stats")).json()
            return {**stats, "is_ready": (await client.get("/ready")).status_code == 200}

    async def state(self) -> dict[str, int]:
        """Wait until nothing runs; what the web process holds then, and the engine's pages."""
        end = time.monotonic() + READY_SECONDS
        while True:
            stats = await self.stats()
            running = stats.get("num_running", 1) + stats.get("num_waiting", 1)
            if stats["is_ready"] and running == 0:
                break
            if time.monotonic() > end:
                raise SystemExit(f"the server did not become idle and ready again: {stats}")
            await asyncio.sleep(0.3)
        status = Path(f"/proc/{self.server.pid}/status").read_text()
        found = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.M))
        return {
            "rss_mb": int(found["VmRSS"]) // 1024,
            "threads": int(found["Threads"]),
            "files": len(os.listdir(f"/proc/{self.server.pid}/fd")),
            "pages_used": sum(stats["pages_used"].values()),
        }

    async def wait_until_ready(self) -> float:
        begin = time.monotonic()
        while not (await self.stats())["is_ready"]:
            if time.monotonic() > begin + READY_SECONDS:
                self.problems.append(f"not ready again after {READY_SECONDS:g} s")
                break
            await asyncio.sleep(0.1)
        return time.monotonic() - begin

    def left_processes(self) -> list[str]:
        """Command lines of this server's remaining processes, children of children included."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended just now
                if self.folder.name.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
        return found

    # --- what happens ---------------------------------------------------------------------------

    async def torment(self, end: float) -> None:
        """One fault after another, all kinds equally often; the engine works in between."""
        rng = random.Random(self.seed)
        kinds: list[str] = []
        while True:
            answered = self.outcomes["answered"]
            await asyncio.sleep(rng.uniform(WORK_SECONDS, 2 * WORK_SECONDS))
            if time.monotonic() > end - WORK_SECONDS:
                return
            pid = self.engine_pid()
            if pid is None or not (await self.stats())["is_ready"]:
                continue  # it ended by itself, late
            self.num_idle_times += self.outcomes["answered"] == answered
            kinds = kinds or rng.sample(FAULTS, len(FAULTS))
            kind = kinds.pop()
            self.faults[kind] += 1
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # the fault ended it
                await self.hurt(pid, kind)
            if kind in ("killed", "stopped"):
                while self.engine_pid() == pid:
                    await asyncio.sleep(0.1)
            self.ready_again_s.append(await self.wait_until_ready())

    async def hurt(self, pid: int, kind: str) -> None:
        if kind == "killed":
            os.kill(pid, signal.SIGKILL)
        elif kind == "stopped":  # for good: only the supervisor helps
            os.kill(pid, signal.SIGSTOP)
        elif kind == "paused":
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(2)
            os.kill(pid, signal.SIGCONT)
        elif kind == "starved":
            status = Path(f"/proc/{pid}/status").read_text()
            found = re.search(r"VmData:\s+(\d+)", status)
            limit = (int(found.group(1)) << 10) + (1 << 20) if found else resource.RLIM_INFINITY
            await self.limited(pid, resource.RLIMIT_DATA, limit)
        else:
            await self.limited(pid, resource.RLIMIT_FSIZE, 4096)

    async def limited(self, pid: int, which: int, limit: int) -> None:
        old = resource.prlimit(pid, which, (limit, resource.RLIM_INFINITY))
        await asyncio.sleep(4)
        resource.prlimit(pid, which, old)

    async def one_client(self, number: int, end: float) -> None:
        rng = random.Random(self.seed * 1000 + number)
        while time.monotonic() < end:
            kind = rng.choices(KINDS, KIND_SHARES)[0]
            begin = time.monotonic()
            try:
                async with asyncio.timeout(self.patience):
                    outcome = await self.ask(kind, rng)
            except TimeoutError:
                outcome = "hung"
                self.problems.append(f"{kind} hung")
            except httpx.HTTPError as error:
                outcome = "lost"
                self.problems.append(f"{kind}: {error!r}")
            seconds = round(time.monotonic() - begin, 2)
            self.outcomes[outcome] += 1
            self.slowest[outcome] = max(self.slowest.get(outcome, 0.0), seconds)
            if outcome == "cleanly failed":
                await asyncio.sleep(0.3)

    async def ask(self, kind: str, rng: random.Random) -> str:
        async with httpx.AsyncClient(base_url=self.url, timeout=None) as client:
            if kind == "bad":
                path, data = rng.choice(BAD)
                json_type = {"content-type": "application/json"}
                answer = await client.post(path, content=data, headers=json_type)
                return self.judge(answer.status_code, answer.json(), expected=(400, 404))
            count = rng.choice((5, 20, 60, 200))
            words = " ".join(rng.choices(("alpha", "beta", "gamma"), k=count))
            if kind == "scored":
                body: Any = {"prompt": words, "echo": True, "logprobs": 3, "max_tokens": 0}
                answer = await client.post("/v1/completions", json=body)
                return self.judge(answer.status_code, answer.json(), expected=(200,))
            body = {
                "messages": [{"role": "user", "content": words}],
                "max_tokens": rng.choice((4, 16, 32)),
                "stream": kind in ("stream", "leaves"),
                "reasoning_effort": "none",
            }
            if kind == "guided":
                body["structured_outputs"] = {"regex": f"[a-z]{{{rng.randrange(1, 20)}}}"}
            if not body["stream"]:
                answer = await client.post(CHAT, json=body)
                return self.judge(answer.status_code, answer.json(), expected=(200,))
            return await self.read_stream(client, body, kind, rng)

    async def read_stream(
        self, client: httpx.AsyncClient, body: Any, kind: str, rng: random.Random
    ) -> str:
        leaves_after, text = rng.randrange(1, 5), ""
        async with client.stream("POST", CHAT, json=body) as answer:
            if answer.status_code != 200:
                error = json.loads(await answer.aread())
                return self.judge(answer.status_code, error, expected=(200,))
            async for part in answer.aiter_text():
                text += part
                if kind == "leaves" and text.count("data:") >= leaves_after:
                    return "left"
        if not text.endswith("data: [DONE]\n\n"):
            self.problems.append(f"a stream ended with {text[-80:]!r}")
            return "lost"
        return "cleanly failed" if '"error":' in text else "answered"

    def judge(self, status: int, body: Any, expected: tuple[int, ...]) -> str:
        if status in expected and status == 200:
            return "answered"
        if isinstance(body, dict) and body.get("error", {}).get("message"):
            if status in expected:
                return "refused as it should be"
            if status in (429, 500, 503):
                return "cleanly failed"
        self.problems.append(f"status {status}: {str(body)[:200]}")
        return "lost"

    async def run(self) -> dict[str, Any]:
        await asyncio.gather(*(self.one_client(n, time.monotonic() + 2) for n in range(4)))
        self.outcomes.clear()
        self.slowest.clear()
        before = await self.state()
        end = time.monotonic() + self.seconds
        clients = [self.one_client(number, end) for number in range(self.clients)]
        await asyncio.gather(*clients, self.torment(end))
        return {"before": before, "after": await self.settle(before)}

    async def settle(self, before: dict[str, int]) -> dict[str, int]:
        """What it holds in the end; connections that were just closed take a moment."""
        allowed = {"rss_mb": MEMORY_GROWTH_MB, "threads": 8, "files": 8, "pages_used": 0}
        for _ in range(20):
            after = await self.state()
            grown = [name for name, room in allowed.items() if after[name] > before[name] + room]
            if not grown:
                break
            await asyncio.sleep(1)
        self.problems += [f"{name}: {before[name]} before, {after[name]} after" for name in grown]
        return after

    def close(self) -> dict[str, int]:
        """End the server; returns how often its log has each event."""
        self.server.send_signal(signal.SIGTERM)
        try:
            self.server.wait(READY_SECONDS)
        except subprocess.TimeoutExpired:
            self.problems.append("the server did not end")
            self.server.kill()
            self.server.wait()
        end = time.monotonic() + READY_SECONDS
        while self.left_processes() and time.monotonic() < end:
            time.sleep(0.2)  # children notice the closed connection
        self.problems += [f"left running: {command}" for command in self.left_processes()]
        self.reader.join(10)
        if self.problems:
            self.problems += [line.rstrip() for line in self.log if "finish=" not in line][-20:]
        self.folder.cleanup()
        text = " ".join("".join(self.log).split())  # long lines are wrapped
        return {line: text.count(line) for line in LOG_LINES}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=90, help="seconds; then a request hangs")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    chaos = Chaos(options.clients, options.seconds, options.seed, options.patience)
    states = {}
    try:
        chaos.wait_for_address()
        states = asyncio.run(chaos.run())
    finally:
        log_lines = chaos.close()
    if not chaos.outcomes["answered"]:
        chaos.problems.append("no request was answered")
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    record = {
        "what": "serve chaos",
        "command": f"python benchmarks/serve_chaos.py --seconds {options.seconds:g}",
        "commit": git.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "clients": options.clients,
        "seconds": options.seconds,
        "seed": options.seed,
        "hung_after_s": options.patience,
        "outcomes": {"hung": 0, "lost": 0, **chaos.outcomes},
        "slowest_s": chaos.slowest,
        "faults": dict(chaos.faults),
        "ready_again_s": {
            "median": round(statistics.median(chaos.ready_again_s or [0.0]), 1),
            "max": round(max(chaos.ready_again_s, default=0.0), 1),
        },
        "times_between_faults_without_answer": chaos.num_idle_times,
        "log_lines": log_lines,
        **states,
        "problems": chaos.problems,
    }
    text = "{\n" + ",\n".join(f' "{key}": {json.dumps(v)}' for key, v in record.items()) + "\n}"
    sys.stdout.write(text + "\n")
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 1 if chaos.problems else 0


if __name__ == "__main__":
    sys.exit(main())
