"""Attacks on a live server, one after the other, while another process asks for `/health`.

    python benchmarks/serve_attack.py [-o RECORD.json]

Each case must get one of its statuses, and the event loop must not be late by more than 100 ms:
`/health` is polled every 20 ms. The same process polls an idle server; how late that one is
depends on the machine and is subtracted. At the end the server, idle but with warm prefixes, is
told to stop: it writes all of them within 5 s. Exit code 1 if a promise does not hold.
"""

import argparse
import http.client
import json
import multiprocessing
import multiprocessing.pool
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.server.support import Server  # noqa: E402  # the path above is needed first

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
LATE_MS = 100.0
STOP_SECONDS = 5.0
NUM_PREFIXES = 12
ASK = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: Callable[[], bytes]
    statuses: tuple[int, ...] = (400,)
    times: int = 1  # at once


def made(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(fields).encode()


def chat(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"messages": ASK, "max_tokens": 4, **fields}).encode()


def said(text: str, times: int) -> Callable[[], bytes]:
    return lambda: json.dumps(
        {"messages": [{"role": "user", "content": text * times}], "max_tokens": 4}
    ).encode()


def schema(value: Any) -> Callable[[], bytes]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
    return chat(response_format=form, reasoning_effort="none")


def regex(pattern: str) -> Callable[[], bytes]:
    return chat(structured_outputs={"regex": pattern}, reasoning_effort="none")


WIDE = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(40)}}
LOGPROBS = {"logprobs": True, "top_logprobs": 20}
CASES = (
    Case("5 M wrong messages", CHAT, lambda: b'{"messages":[' + b"1," * 4_700_000 + b"1]}"),
    Case("16 M empty lists", CHAT, lambda: b'{"messages":[' + b"[]," * 10_000_000 + b"1]}"),
    Case("20,001 messages", CHAT, lambda: json.dumps({"messages": ASK * 20_001}).encode()),
    Case("20,000 messages", CHAT, lambda: json.dumps({"messages": ASK * 20_000}).encode()),
    Case("2,001 tools", CHAT, chat(tools=[{}] * 2_001)),
    Case("300k biases", CHAT, chat(logit_bias={f"k{n}": 1 for n in range(300_000)})),
    Case("1,024 bad biases", CHAT, chat(logit_bias={f"k{n}": 1 for n in range(1024)})),
    Case("100k fields", CHAT, chat(**{f"f{n}": n for n in range(100_000)})),
    Case("257 fields", CHAT, chat(**{f"f{n}": n for n in range(255)})),
    Case("1,025 entries", CHAT, chat(metadata={f"k{n}": "v" for n in range(1025)})),
    Case("129 levels", CHAT, chat(metadata=json.loads('{"a":' * 129 + "1" + "}" * 129))),
    Case("17 stops", CHAT, chat(stop=["x"] * 17)),
    Case("17 choices", CHAT, chat(n=17)),
    Case("65 prompts", TEXT, made(prompt=["x"] * 65)),
    Case("129 answers", TEXT, made(prompt=["x"] * 43, n=3)),
    Case("1 M ids", TEXT, made(prompt=[1] * 1_000_000)),
    Case("4 MB of text", CHAT, said("word ", 800_000)),
    Case("text that just may fit", CHAT, said("1234567 ", 50_000), (200, 400), 3),
    Case("escapes", CHAT, lambda: b'{"messages":"' + b"\\u00e9" * 5_000_000 + b'"}'),
    Case("33 MiB", CHAT, lambda: b" " * (33 << 20), (413,)),
    Case("/tokenize of 8 MB", "/tokenize", made(prompt="a b " * 2_000_000)),
    Case("/tokenize that fits", "/tokenize", made(prompt="a b " * 8_000), (200,)),
    Case("/detokenize of 1 M", "/detokenize", made(tokens=[7] * 1_000_000), (200,)),
    Case("700 wide classes", CHAT, regex("(?i)" + "[\u0100-\uffff]" * 700), times=7),
    Case("regex of 8,193", CHAT, regex("a" * 8193)),
    Case("257 repetitions", CHAT, regex("a?" * 257)),
    Case("count of 4,097", CHAT, regex("a{4097}")),
    Case("4,097 choices", CHAT, chat(guided_choice=[f"c{n}" for n in range(4097)])),
    Case("schema of 65,537", CHAT, schema({"enum": ["x" * 65_537]})),
    Case("nested repetitions", CHAT, regex("((a{1,4000}){1,4000}){1,4000}"), (200, 400, 503)),
    Case("self-reference", CHAT, schema({"$ref": "#"})),
    Case("wide schema", CHAT, schema(WIDE), (200, 400, 503), 4),
    Case("deep schema", CHAT, schema(json.loads('{"a":' * 100 + "1" + "}" * 100))),
    Case("320 logprobs a token", CHAT, chat(n=16, **LOGPROBS, max_tokens=2000)),
    Case("20 logprobs", CHAT, chat(n=8, **LOGPROBS, max_tokens=16), (200,)),
    Case("echo", TEXT, made(prompt=[5] * 3000, echo=True, logprobs=20, max_tokens=0), (200,)),
    Case("priority", CHAT, chat(priority=100), (403,)),
    Case("escape codes in model", CHAT, chat(model="x\n2026 forged\x1b[31m"), (404,)),
    Case("broken JSON", CHAT, lambda: b"[" * 200_000),
    Case("wrong messages, Anthropic", MESSAGES, made(max_tokens=1, messages=[1] * 1_200_000)),
)  # fmt: skip


def post(port: int, case: Case, data: bytes) -> int:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        line.request("POST", case.path, data, {"content-type": "application/json"})
        answer = line.getresponse()
        answer.read()
        return answer.status
    except (BrokenPipeError, ConnectionResetError):
        return 413  # answered and closed while we were still sending
    finally:
        line.close()


def watch(ports: tuple[int, int], pipe: Any) -> None:
    """In a process of its own: how late each of two servers answers, until told to stop."""
    lines = [http.client.HTTPConnection("127.0.0.1", port, timeout=300) for port in ports]
    worst = [0.0, 0.0]
    while True:
        for place, line in enumerate(lines):
            begin = time.perf_counter()
            line.request("GET", "/health")
            line.getresponse().read()
            worst[place] = max(worst[place], (time.perf_counter() - begin) * 1e3)
        if pipe.poll(0.02):
            if pipe.recv() == "end":
                return
            pipe.send(worst)
            worst = [0.0, 0.0]


def idle_server(listener: socket.socket) -> None:
    """Answers immediately, in a process that has nothing else to do."""
    while True:
        line, _ = listener.accept()
        with line:
            while line.recv(65536):
                line.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")


def run(server: Server, idle_port: int) -> list[dict[str, Any]]:
    ours, theirs = multiprocessing.Pipe()
    watcher = multiprocessing.Process(
        target=watch, args=((server.port, idle_port), theirs), daemon=True
    )
    watcher.start()
    results = []
    for case in CASES:
        data = case.body()
        ours.send("begin")
        ours.recv()
        begin = time.perf_counter()
        with multiprocessing.pool.ThreadPool(case.times) as pool:
            statuses = pool.starmap(post, [(server.port, case, data)] * case.times)
        seconds = time.perf_counter() - begin
        ours.send("end of case")
        worst, noise = ours.recv()
        late = max(worst - noise, 0.0)
        is_good = set(statuses) <= set(case.statuses) and late <= LATE_MS
        results.append(
            {
                "case": case.name,
                "bytes": len(data),
                "statuses": sorted(set(statuses)),
                "seconds": round(seconds, 2),
                "health_ms": round(worst, 1),
                "idle_server_ms": round(noise, 1),
                "late_ms": round(late, 1),
                "good": is_good,
            }
        )
        sys.stdout.write(json.dumps(results[-1]) + "\n")
        sys.stdout.flush()
    ours.send("end")
    return results


def stop(server: Server, folder: Path) -> dict[str, float]:
    """How long the idle server takes to end, and how many prefixes it leaves."""
    for number in range(NUM_PREFIXES):
        body = {"prompt": f"{number} alpha beta " * 100, "max_tokens": 1}
        server.post(TEXT, body).raise_for_status()
    server.wait_until_idle()
    begin = time.perf_counter()
    server.stop(60)
    seconds = time.perf_counter() - begin
    written = len(list(folder.glob("*/*.prefix")))
    return {"asked": NUM_PREFIXES, "written": written, "seconds": round(seconds, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0))
    idle = multiprocessing.Process(target=idle_server, args=(listener,), daemon=True)
    idle.start()
    with tempfile.TemporaryDirectory() as folder:
        server = Server("--prefix-disk", folder, fake=False).wait(300)
        try:
            results = run(server, listener.getsockname()[1])
            is_alive = server.chat("hi", max_tokens=2).status_code == 200
            stopped = stop(server, Path(folder))
        finally:
            server.process.kill()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    record = {
        "what": "serve attack",
        "command": "python benchmarks/serve_attack.py",
        "commit": git.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "limit_ms": LATE_MS,
        "worst_health_ms": max(result["health_ms"] for result in results),
        "worst_late_ms": max(result["late_ms"] for result in results),
        "answers_afterwards": is_alive,
        "forged_log_lines": server.final_log.count("\n2026 forged"),
        "stop_when_idle": stopped,
        "cases": results,
    }
    lines = [f' "{key}": {json.dumps(value)}' for key, value in record.items() if key != "cases"]
    cases = ",\n  ".join(map(json.dumps, results))
    text = "{\n" + ",\n".join([*lines, f' "cases": [\n  {cases}\n ]']) + "\n}\n"
    if options.output is not None:
        options.output.write_text(text)
    promises = {
        "it lives": is_alive,
        "no log line is forged": not record["forged_log_lines"],
        "every case is refused or answered as it should be, in time": all(
            result["good"] for result in results
        ),
        f"all prefixes are written within {STOP_SECONDS:g} s": stopped["seconds"] < STOP_SECONDS
        and stopped["written"] >= NUM_PREFIXES,
    }
    for promise, holds in promises.items():
        sys.stdout.write(f"{'yes' if holds else 'NO '} {promise}\n")
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
