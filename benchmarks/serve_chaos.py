"""Clients of every kind at a server whose engine is killed, stopped, starved and cut off its disk.

    python benchmarks/serve_chaos.py [--clients 16] [--seconds 300] [--seed 1] [-o RECORD.json]

Every request must be answered or fail cleanly (a status with an error object, an error event):
none hangs, none is lost. Afterwards memory, open files, threads and pages are back where they were.
Exit code 1 if a promise does not hold.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
CHAT = "/v1/chat/completions"
HUNG_SECONDS = 90.0
MEMORY_GROWTH_MB = 150.0  # of the web process: caches of the allocator and of the tokenizer
BAD: tuple[tuple[str, bytes], ...] = (
    (CHAT, b"{"),
    (CHAT, b'{"messages": [' + b"1," * 200_000 + b"1]}"),
    (CHAT, b'{"messages": [{"role": "user", "content": 5}]}'),
    ("/v1/completions", b'{"prompt": [-1]}'),
    ("/v1/messages", b'{"messages": []}'),
    ("/nowhere", b"{}"),
)


class Chaos:
    def __init__(self, clients: int, seconds: float, seed: int) -> None:
        self.clients, self.seconds, self.seed = clients, seconds, seed
        self.folder = tempfile.TemporaryDirectory()
        self.log = open(Path(self.folder.name) / "log", "w+b")  # noqa: SIM115  # until the end
        options = ("--prefix-disk", f"{self.folder.name}/prefixes", "--step-timeout", "6")
        sizes = ("--max-sequences", "8", "--max-context", "2048")
        self.server = subprocess.Popen(
            [sys.executable, "-m", "dsv4", "serve", "--port", "0", *options, *sizes],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stderr=self.log,
        )
        self.url = ""
        self.outcomes: Counter[str] = Counter()
        self.torments: Counter[str] = Counter()
        self.problems: list[str] = []

    # --- looking at the processes -------------------------------------------------------------

    def wait_for_address(self) -> None:
        end = time.monotonic() + 180
        while not self.url:
            found = re.search(rb"ready: (http\S+)", os.pread(self.log.fileno(), 1 << 22, 0))
            if found:
                self.url = found.group(1).decode()
            elif self.server.poll() is not None or time.monotonic() > end:
                raise SystemExit("the server did not become ready")
            time.sleep(0.05)

    def engine_pid(self) -> int | None:
        pid = self.server.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None

    async def state(self) -> dict[str, float]:
        """Once nothing runs: what the web process holds, and the engine's pages."""
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            end = time.monotonic() + 120
            while time.monotonic() < end:
                stats = (await client.get("/stats")).json()
                ready = (await client.get("/ready")).status_code == 200
                if ready and stats.get("num_running", 1) + stats.get("num_waiting", 1) == 0:
                    break
                await asyncio.sleep(0.3)
            else:
                self.problems.append("the server did not become idle and ready again")
                return {}
        status = Path(f"/proc/{self.server.pid}/status").read_text()
        found = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.M))
        return {
            "rss_mb": int(found["VmRSS"]) / 1024,
            "threads": int(found["Threads"]),
            "files": len(os.listdir(f"/proc/{self.server.pid}/fd")),
            "pages_used": sum(stats["pages_used"].values()),
        }

    async def is_ready(self) -> bool:
        async with httpx.AsyncClient(base_url=self.url, timeout=HUNG_SECONDS) as client:
            return (await client.get("/ready")).status_code == 200

    # --- what happens ---------------------------------------------------------------------------

    async def torment(self, end: float) -> None:
        rng = random.Random(self.seed)
        while time.monotonic() < end - 8:
            await asyncio.sleep(rng.uniform(4, 12))
            if not await self.is_ready():
                continue
            pid = self.engine_pid()
            if pid is None:
                continue
            kind = rng.choice(("killed", "stopped", "paused", "starved", "disk full"))
            try:
                await self.hurt(pid, kind)
            except (ProcessLookupError, FileNotFoundError):
                continue  # it ended by itself meanwhile
            self.torments[kind] += 1

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
            kind = rng.choices(("whole", "stream", "leaves", "bad"), (4, 4, 3, 2))[0]
            begin = time.monotonic()
            try:
                async with asyncio.timeout(HUNG_SECONDS):
                    outcome = await self.ask(kind, rng)
            except TimeoutError:
                outcome = "hung"
            except httpx.HTTPError as error:
                outcome = "lost"
                after = time.monotonic() - begin
                self.problems.append(f"{kind}: {error!r} after {after:.1f} s")
            self.outcomes[outcome] += 1
            if outcome == "cleanly failed":
                await asyncio.sleep(0.3)

    async def ask(self, kind: str, rng: random.Random) -> str:
        async with httpx.AsyncClient(base_url=self.url, timeout=HUNG_SECONDS + 5) as client:
            if kind == "bad":
                path, data = rng.choice(BAD)
                json_type = {"content-type": "application/json"}
                answer = await client.post(path, content=data, headers=json_type)
                return self.judge(answer.status_code, answer.json(), expected=(400, 404))
            words = " ".join(rng.choices(("alpha", "beta", "gamma"), k=rng.randrange(1, 300)))
            body = {
                "messages": [{"role": "user", "content": words}],
                "max_tokens": rng.choice((4, 16, 48)),
                "stream": kind != "whole",
                "reasoning_effort": "none",
            }
            if kind == "whole":
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
        await asyncio.gather(*(self.one_client(n, time.monotonic() + 3) for n in range(4)))
        self.outcomes.clear()
        before = await self.state()
        end = time.monotonic() + self.seconds
        clients = [self.one_client(number, end) for number in range(self.clients)]
        await asyncio.gather(*clients, self.torment(end))
        after = await self.state()
        self.compare(before, after)
        return {"before": before, "after": after}

    def compare(self, before: dict[str, float], after: dict[str, float]) -> None:
        limits = {"rss_mb": MEMORY_GROWTH_MB, "threads": 8, "files": 8, "pages_used": 0}
        for name, room in limits.items():
            if before and after and after[name] > before[name] + room:
                self.problems.append(f"{name}: {before[name]:.0f} before, {after[name]:.0f} after")
        for outcome in ("hung", "lost"):
            if self.outcomes[outcome]:
                self.problems.append(f"{self.outcomes[outcome]} requests {outcome}")

    def close(self) -> None:
        self.server.send_signal(signal.SIGTERM)
        try:
            self.server.wait(60)
        except subprocess.TimeoutExpired:
            self.problems.append("the server did not end")
            self.server.kill()
            self.server.wait()
        if self.problems:
            text = os.pread(self.log.fileno(), 1 << 24, 0).decode("utf-8", "replace")
            lines = [line for line in text.splitlines() if "finish=" not in line]
            self.problems += lines[-20:]
        self.log.close()
        self.folder.cleanup()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    chaos = Chaos(options.clients, options.seconds, options.seed)
    try:
        chaos.wait_for_address()
        states = asyncio.run(chaos.run())
    finally:
        chaos.close()
    record = {
        "what": "serve_chaos",
        "command": f"python benchmarks/serve_chaos.py --seconds {options.seconds:g}",
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "clients": options.clients,
        "seconds": options.seconds,
        "outcomes": dict(chaos.outcomes),
        "hung": chaos.outcomes["hung"],
        "lost": chaos.outcomes["lost"],
        "torments": dict(chaos.torments),
        **states,
        "problems": chaos.problems,
    }
    text = json.dumps(record, indent=1)
    sys.stdout.write(text + "\n")
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 1 if chaos.problems else 0


if __name__ == "__main__":
    sys.exit(main())
