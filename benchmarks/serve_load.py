"""64 streams at a real server for two minutes, with churn, disconnects and slow readers.

    python benchmarks/serve_load.py [--streams 64] [--seconds 120] [-o RECORD.json]

Every request must end in an answer, the page must stay reachable, memory must not grow. Loopback
only; prints a summary and writes a record. Exit code 1 if a promise does not hold.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
QUESTIONS = (
    "What is the capital of France?",
    "What is 12 plus 30?",
    "On which continent is Kenya?",
    "Tell me a short story.",
    "What do people speak in Peru?",
)
LAG_LIMIT_S = 0.05


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_tokens: int = 0


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


async def one_client(url: str, number: int, end: float, tally: Tally) -> None:
    """One request after another until the time is up; some leave early, some read slowly."""
    rng = random.Random(number)
    limits = httpx.Timeout(180)
    async with httpx.AsyncClient(base_url=url, timeout=limits) as client:
        while time.monotonic() < end:
            kind = rng.choices(("whole", "leaves", "slow"), (7, 2, 1))[0]
            body = {
                "messages": [{"role": "user", "content": rng.choice(QUESTIONS)}],
                "max_tokens": rng.choice((4, 8, 16, 32)),
                "stream": True,
                "reasoning_effort": rng.choice(("none", "high")),
            }
            try:
                tally.outcomes[await ask(client, body, kind, rng, tally)] += 1
            except httpx.HTTPError as error:
                tally.problems.append(f"{kind}: {error!r}")


async def ask(
    client: httpx.AsyncClient, body: Any, kind: str, rng: random.Random, tally: Tally
) -> str:
    begin, is_first = time.monotonic(), True
    leaves_after = rng.randrange(1, 6)
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code == 429:
            await asyncio.sleep(float(answer.headers["retry-after"]))
            return "429"
        if answer.status_code != 200:
            tally.problems.append(f"status {answer.status_code}")
            return str(answer.status_code)
        async for line in answer.aiter_lines():
            text = line or text
            has_text = '"content":"' in line or '"reasoning_content":"' in line
            if has_text and '"role"' not in line:
                tally.num_tokens += 1
                leaves_after -= 1
                if is_first:
                    tally.first_s.append(time.monotonic() - begin)
                    is_first = False
            if kind == "leaves" and leaves_after <= 0:
                return "left"
            if kind == "slow":
                await asyncio.sleep(0.2)
    if text != "data: [DONE]":
        tally.problems.append(f"a stream ended with {text[:80]!r}")
    return "answered"


async def watch_health(url: str, end: float, tally: Tally) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        while time.monotonic() < end:
            begin = time.monotonic()
            answer = await client.get("/health")
            tally.health_s.append(time.monotonic() - begin)
            if answer.status_code != 200:
                tally.problems.append(f"/health said {answer.status_code}")
            await asyncio.sleep(0.1)


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


async def memory(pids: dict[str, int], seconds: float) -> dict[str, list[float]]:
    """Sizes of both processes, twelve times over the run."""
    found: dict[str, list[float]] = {name: [] for name in pids}
    for _ in range(12):
        await asyncio.sleep(seconds / 12)
        for name, pid in pids.items():
            found[name].append(resident_mb(pid))
    return found


def lag(text: str) -> dict[str, float]:
    """The server's own event loop lag: the share of samples under each bound."""
    counts = dict(re.findall(r'event_loop_lag_seconds_bucket\{le="([^"]+)"[^}]*\} (\S+)', text))
    total = float(counts.get("+Inf", 0)) or 1.0
    return {bound: round(float(count) / total, 5) for bound, count in counts.items()}


def start() -> tuple[subprocess.Popen[str], str]:
    code = "from dsv4.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--max-waiting", "256"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"ready: (\S+)", line)
        if found:
            return process, found.group(1)
    raise SystemExit("the server did not start")


async def run(url: str, pids: dict[str, int], streams: int, seconds: float) -> dict[str, Any]:
    tally = Tally()
    end = time.monotonic() + seconds
    clients = [one_client(url, number, end, tally) for number in range(streams)]
    *_, sizes = await asyncio.gather(*clients, watch_health(url, end, tally), memory(pids, seconds))
    async with httpx.AsyncClient(base_url=url) as client:
        for _ in range(100):
            stats = (await client.get("/stats")).json()
            if stats["num_running"] + stats["num_waiting"] == 0:
                break
            await asyncio.sleep(0.1)
        metrics = (await client.get("/metrics")).text
    return {
        "outcomes": dict(tally.outcomes),
        "problems": tally.problems[:20],
        "num_problems": len(tally.problems),
        "chunks_per_s": round(tally.num_tokens / seconds, 1),
        "first_token_s": {f"p{p}": round(percentile(tally.first_s, p / 100), 3) for p in (50, 99)},
        "health_s": {f"p{p}": round(percentile(tally.health_s, p / 100), 4) for p in (50, 99, 100)},
        "event_loop_lag_share_under": lag(metrics),
        "memory_mb": sizes,
        "left_running": stats["num_running"] + stats["num_waiting"],
        "restarts": stats["restarts"],
        "pages_used": stats["pages_used"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    process, url = start()
    assert process.stderr is not None
    log = process.stderr
    drain = asyncio.to_thread(log.read)  # the log must not fill its pipe
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pids = {"web": process.pid, "engine": int(children[0])}

    async def both() -> dict[str, Any]:
        reading = asyncio.create_task(drain)
        result = await run(url, pids, options.streams, options.seconds)
        process.send_signal(signal.SIGTERM)
        await reading
        return result

    try:
        result = asyncio.run(both())
        result["exit_code"] = process.wait(60)
    finally:
        process.kill()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    record = {
        "what": "serve load",
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average_at_end": os.getloadavg()[0],
        "streams": options.streams,
        "seconds": options.seconds,
        **result,
    }
    text = "{\n" + ",\n".join(f' "{key}": {json.dumps(v)}' for key, v in record.items()) + "\n}"
    sys.stdout.write(text + "\n")
    if options.output is not None:
        options.output.write_text(text + "\n")
    late = 1 - record["event_loop_lag_share_under"].get(str(LAG_LIMIT_S), 0)
    promises = {
        "every request was answered": not record["num_problems"],
        "nothing runs on": record["left_running"] == 0 and not any(record["pages_used"].values()),
        "the engine lived": record["restarts"] == 0 and record["exit_code"] == 0,
        f"the event loop was late by more than {LAG_LIMIT_S} s in under 1 %": late < 0.01,
    }
    for promise, holds in promises.items():
        sys.stdout.write(f"{'yes' if holds else 'NO '} {promise}\n")
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
