"""What prefix-aware routing buys: conversations at three replicas, against round robin.

    python benchmarks/serve_routing.py [--conversations 24] [--turns 5] [-o RECORD.json]

Each run starts a Ray of its own with replicas of the embedded model and one router. Clients hold
conversations: all begin with the same system text, each goes on with a text of its own, and every
turn sends everything again. A client asks its next turn when the answer is there, then turns to the
next conversation, so that turns of many conversations interleave. Runs alternate between routers.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
ROUTERS = {
    "prefix": "dsv4.deploy.router.PrefixRouter",
    "round robin": "ray.serve.experimental.round_robin_router.RoundRobinRouter",
}
REPLICAS = 3
START_SECONDS = 300.0
# the process of one run: `dsv4 serve --ray` with a router
SERVER = """
import sys
from dsv4.config import EngineConfig
from dsv4.deploy.options import RayOptions
from dsv4.deploy.ray import serve
from dsv4.server.options import ServerOptions
def notify(message):
    if message["kind"] == "ready":
        print("ready: " + message["address"], flush=True)
serve("tiny", {"device": "cpu", "max_sequences": 4}, ServerOptions(port=0),
      RayOptions(replicas="%d", replica_cpus=0.1), notify, router=sys.argv[1])
"""
WORDS = [
    "river",
    "stone",
    "mountain",
    "garden",
    "winter",
    "letter",
    "engine",
    "window",
    "silver",
    "bridge",
    "market",
    "harbor",
    "candle",
    "forest",
    "planet",
    "music",
    "number",
    "water",
    "paper",
    "house",
    "road",
    "light",
    "summer",
    "story",
    "morning",
    "evening",
    "school",
]


def text(source: random.Random, num_words: int) -> str:
    return " ".join(source.choice(WORDS) for _ in range(num_words))


class Run:
    def __init__(self, url: str, arguments: argparse.Namespace, seed: int) -> None:
        source = random.Random(seed)
        system = {"role": "system", "content": text(source, arguments.system_words)}
        self.url, self.arguments = url, arguments
        self.source = source
        self.conversations: list[list[dict[str, str]]] = [
            [system, {"role": "user", "content": text(source, arguments.first_words)}]
            for _ in range(arguments.conversations)
        ]
        self.requests: list[dict[str, Any]] = []

    async def ask(self, client: httpx.AsyncClient, place: int, turn: int) -> None:
        messages = self.conversations[place]
        body = {
            "messages": messages,
            "max_tokens": self.arguments.max_tokens,
            "temperature": 0,
            "reasoning_effort": "none",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin, first, answer, usage = time.monotonic(), None, "", {}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if piece and first is None:
                        first = time.monotonic()
                    answer += piece
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.requests.append(
            {
                "turn": turn,
                "prompt": usage["prompt_tokens"],
                "cached": cached,
                "first_s": (first or time.monotonic()) - begin,
            }
        )
        messages.append({"role": "assistant", "content": answer})
        more = text(self.source, self.arguments.more_words)
        messages.append({"role": "user", "content": more})

    async def client(self, places: list[int]) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=600, verify=False) as client:
            for turn in range(self.arguments.turns):
                for place in places:
                    await self.ask(client, place, turn)

    async def run(self) -> dict[str, Any]:
        count = self.arguments.clients
        places = [list(range(i, len(self.conversations), count)) for i in range(count)]
        begin = time.monotonic()
        await asyncio.gather(*(self.client(mine) for mine in places))
        return self.summary(time.monotonic() - begin)

    def summary(self, seconds: float) -> dict[str, Any]:
        later = [item for item in self.requests if item["turn"] > 0]
        firsts = sorted(item["first_s"] for item in later)
        prompt = sum(item["prompt"] for item in self.requests)
        return {
            "requests": len(self.requests),
            "prompt_tokens": prompt,
            "hit_rate": round(sum(item["cached"] for item in self.requests) / prompt, 3),
            "hit_rate_later_turns": round(
                sum(item["cached"] for item in later) / sum(item["prompt"] for item in later), 3
            ),
            "first_token_later_turns_s": {
                "p50": round(statistics.median(firsts), 3),
                "p90": round(firsts[int(0.9 * (len(firsts) - 1))], 3),
                "mean": round(statistics.mean(firsts), 3),
            },
            "seconds": round(seconds, 1),
        }


def measure(router: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    variables = {**os.environ, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER % REPLICAS, ROUTERS[router]],
            stdout=log,
            stderr=log,
            env=variables,
        )
        try:
            url = wait_for_replicas(server, log.fileno())
            result = asyncio.run(Run(url, arguments, seed).run())
        finally:
            server.terminate()
            server.wait(120)
    return {"router": router, **result}


def wait_for_replicas(server: "subprocess.Popen[bytes]", log: int) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        found = re.search(r"^ready: (\S+)$", os.pread(log, 1 << 20, 0).decode(), re.M)
        if found:
            stats = httpx.get(f"{found.group(1)}/stats", timeout=30).json()
            if [item["is_healthy"] for item in stats.get("replicas", ())] == [True] * REPLICAS:
                return found.group(1)
        time.sleep(0.5)
    raise SystemExit(f"the replicas did not start:\n{os.pread(log, 1 << 20, 0).decode()}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = {"conversations": 24, "turns": 5, "clients": 6, "system_words": 100}
    numbers |= {"first_words": 400, "more_words": 60, "max_tokens": 16, "runs": 2}
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("-o", type=Path)
    chosen = parser.parse_args(arguments)
    results = []
    for number in range(chosen.runs):
        for router in ROUTERS:
            results.append(measure(router, chosen, seed=number))
            print(json.dumps(results[-1]))  # noqa: T201
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    import ray

    record = {
        "what": "prefix-aware routing against round robin",
        "command": "python benchmarks/serve_routing.py " + " ".join(arguments),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "ray": ray.__version__,
        "model": "tiny",
        "replicas": REPLICAS,
        **{name: getattr(chosen, name) for name in numbers},
    }
    lines = [f' "{key}": {json.dumps(value)}' for key, value in record.items()]
    lines.append(' "results": [\n  ' + ",\n  ".join(map(json.dumps, results)) + "\n ]")
    if chosen.o:
        chosen.o.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
