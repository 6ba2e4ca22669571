"""Tokens a second of the embedded model on this machine's CPU, one sequence at a time.

    python benchmarks/cpu_speed.py benchmarks/records/DATE_tiny_cpu_speed.jsonl

Leave the machine idle. First the default settings, then each drafter and temperature; the answers
of all drafters must be equal. One line per setting, median and spread over five runs; the first
token of an answer, which is the prompt's, is not counted.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from dsv4 import Engine, SamplingParams
from dsv4.tools.bench_ops import run_facts

PROMPTS = ("Tell me a story about a dog.", "Write a story about a red ball and a girl.")
TOKENS, RUNS, WARM_UP = 100, 5, 3  # what drafts cost is learnt from the first answers


def answer(engine: Engine, temperature: float) -> tuple[list[int], int, float]:
    """Token ids, how many of them came after the first step, and in how many seconds."""
    ids: list[int] = []
    counted, seconds = 0, 0.0
    for seed, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=seed)
        outputs = engine.stream(prompt, params)
        ids += next(outputs).token_ids
        begin = time.perf_counter()
        rest = [token for output in outputs for token in output.token_ids]
        seconds += time.perf_counter() - begin
        counted += len(rest)
        ids += rest
    return ids, counted, seconds


def measure(draft: str, temperature: float) -> tuple[dict[str, Any], list[int]]:
    engine = Engine.load("tiny", device="cpu", draft=draft, prefix_cache=False)
    for _ in range(WARM_UP):
        answer(engine, temperature)
    rates = []
    for _ in range(RUNS):
        ids, counted, seconds = answer(engine, temperature)
        rates.append(counted / seconds)
    stats = engine.stats()
    engine.close()
    return {
        "what": f"generate with tiny, one sequence, {len(ids)} tokens in {len(PROMPTS)} answers",
        "draft": draft,
        "temperature": temperature,
        "cores": os.cpu_count(),
        "threads": 1,
        "tokens_per_s": {
            "median": round(statistics.median(rates), 1),
            "least": round(min(rates), 1),
            "most": round(max(rates), 1),
        },
        "drafted": stats.num_drafted,
        "accepted": stats.num_accepted,
    }, ids


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    path = parser.parse_args().record
    facts = {"cpu": cpu_name(), "torch": torch.__version__, "commit": run_facts()["commit"]}
    lines, answers = [], {}
    for temperature in (1.0, 0.0):
        for draft in ("auto", "off", "mtp"):
            result, ids = measure(draft, temperature)
            same = answers.setdefault(temperature, ids)
            assert ids == same, f"draft={draft} changed an answer at temperature {temperature}"
            lines.append(json.dumps({**result, **facts}))
            print(lines[-1], flush=True)  # noqa: T201 - a script
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
