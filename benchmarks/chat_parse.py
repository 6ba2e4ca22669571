"""Is parsing time linear in the length of the output? From 16 kB to 1 MB, in one piece and in
token-sized pieces.

    python benchmarks/chat_parse.py --record benchmarks/records/DATE_cpu_chat_parse.jsonl

Each line is one kind of output: nanoseconds per character at each length (the best of several
runs) and the exponent of the growth between the two longest, which is 1 for linear time. The
kinds besides plain text are chosen to hurt a parser that looks at text twice.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dsv4.chat import V4_PREVIEW, OutputParser

SIZES = (16_000, 64_000, 256_000, 1_000_000)
TOOLS = {"run": frozenset({"command"})}
BLOCK = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="run">\n'
PARAMETER = '<｜DSML｜parameter name="command" string='
PROSE = "The quick brown fox jumps over the lazy dog.\n\n"


def filled(start: str, unit: str) -> Callable[[int], str]:
    return lambda size: start + unit * ((size - len(start)) // len(unit))


KINDS: dict[str, Callable[[int], str]] = {
    "answer": filled("</think>", PROSE),
    "reasoning": filled("", PROSE),
    "string value": filled(BLOCK + PARAMETER + '"true">', PROSE),
    "json value": filled(BLOCK + PARAMETER + '"false">[', '{"a": [1, "x"]}, '),
    "many calls": filled("<｜DSML｜tool_calls>", '<｜DSML｜invoke name="run"></｜DSML｜invoke>\n'),
    "unwrapped calls": filled("", '<｜DSML｜invoke name="run"> prose '),
    "newlines": filled("a", "\n"),
    "angle brackets": filled("</think>", "<"),
    "bars": filled("</think>", "｜"),
    "half markers": filled("</think>", "</thin"),
    "openings": filled("</think>", "<｜DSML｜"),
    "closings": filled("</think>", "</｜DSML｜"),
    "open quotes": filled("<｜DSML｜tool_calls>", 'invoke name="'),
    "open names": filled("<｜DSML｜tool_calls>", 'invoke name="run">'),
    "stop string": filled("</think>", "ab"),
}


def parse_in_pieces(text: str, piece_len: int, stop: tuple[str, ...]) -> None:
    parser = OutputParser(V4_PREVIEW, tools=TOOLS, stop=stop)
    for at in range(0, len(text), piece_len):
        parser.push_text(text[at : at + piece_len])
    parser.finish()


def best_time_ns(text: str, piece_len: int, stop: tuple[str, ...], num_runs: int) -> float:
    best = math.inf
    for _ in range(num_runs):
        start = time.process_time_ns()
        parse_in_pieces(text, piece_len, stop)
        best = min(best, time.process_time_ns() - start)
    return best


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def measure(kind: str, piece_len: int, num_runs: int) -> dict[str, object]:
    stop = ("ab" * 200 + "c",) if kind == "stop string" else ()
    times = {}
    for size in SIZES:
        text = KINDS[kind](size)
        pieces = size if piece_len == 0 else piece_len
        times[size] = best_time_ns(text, pieces, stop, num_runs) / len(text)
    last, before = SIZES[-1], SIZES[-2]
    exponent = 1 + math.log(times[last] / times[before]) / math.log(last / before)
    return {
        "kind": kind,
        "pieces": "whole" if piece_len == 0 else f"{piece_len} characters",
        "ns_per_char": {str(size): round(ns, 1) for size, ns in times.items()},
        "mb_per_s": round(1000 / times[last], 2),
        "growth_exponent": round(exponent, 3),
    }


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--record", type=Path, help="append the result to this file")
    options.add_argument("--runs", type=int, default=2)
    chosen = options.parse_args()
    conditions = {
        "commit": commit(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "command": "python benchmarks/chat_parse.py",
        "runs": chosen.runs,
    }
    lines = []
    for kind in KINDS:
        for piece_len in (0, 4):
            result = measure(kind, piece_len, chosen.runs)
            lines.append(json.dumps({**result, **conditions}))
            sys.stdout.write(
                f"{kind:16} {result['pieces']:13} {result['mb_per_s']:8} MB/s"
                f"  growth {result['growth_exponent']}\n"
            )
    if chosen.record is not None:
        with chosen.record.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
