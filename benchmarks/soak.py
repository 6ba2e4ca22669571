"""The engine for a long time: long streams, short churn, aborts, shortage; nothing may drift.

    python benchmarks/soak.py --minutes 20 --record benchmarks/records/DATE_cpu_soak.jsonl

Among the traffic are probes whose answers are known from a cold engine with one slot: each must
come out with the same tokens and log-probabilities, whatever it runs beside. Memory is read every
few seconds; it must not grow between the first half and the end. Exit code 1 on any finding.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dsv4 import Engine, SamplingParams
from dsv4.errors import RequestError
from dsv4.request import Completion, Guide, Output, Request, join_outputs
from dsv4.tools.bench_ops import run_facts

NUM_PROBES = 8
MOST_GROWTH_MB = 24.0


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


@dataclass
class Soak:
    engine: Engine
    probes: list[tuple[Request, Completion]]
    rng: random.Random
    kinds: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    expected: dict[str, tuple[Request, Completion]] = field(default_factory=dict)
    num_added: int = 0

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(1000) for _ in range(count))

    def add(self) -> None:
        """One request of a random kind."""
        kind = self.rng.choice(("probe", "probe", "short", "short", "short", "long", "bad"))
        self.kinds[kind] += 1
        self.num_added += 1
        name = f"{kind}{self.num_added}"
        priority = self.rng.choice((0, 0, 0, 1))
        if kind == "bad":
            self.refuse(name)
            return
        if kind == "probe":
            request, answer = self.rng.choice(self.probes)
            self.expected[name] = (request, answer)
            self.enter(Request(name, request.prompt_ids, request.params, priority))
            return
        short = kind == "short"
        length = self.rng.choice((5, 40, 130)) if short else self.rng.choice((300, 900))
        most = self.rng.choice((2, 8, 16)) if short else self.rng.choice((60, 150))
        guide = Guide("choice", ["yes", "no", "perhaps"]) if self.rng.random() < 0.1 else None
        params = SamplingParams(max_tokens=most, top_p=0.9, stop_ids=(), guide=guide)
        deadline = 20.0 if self.rng.random() < 0.05 else None
        self.enter(Request(name, self.tokens(length), params, priority, deadline))

    def enter(self, request: Request) -> None:
        self.outputs[request.id] = []
        self.engine.add(request)

    def refuse(self, name: str) -> None:
        try:
            self.engine.add(Request(name, (1, 10**9)))
        except RequestError:
            return
        self.findings.append(f"{name}: a bad request was accepted")

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.request_id].append(output)
            if output.finished:
                self.finish(output)

    def finish(self, output: Output) -> None:
        outputs = self.outputs.pop(output.request_id)
        probe = self.expected.pop(output.request_id, None)
        if output.finish_reason == "error":
            self.findings.append(f"{output.request_id}: {output.error}")
        if probe is None or output.finish_reason == "abort":
            return
        found = join_outputs(probe[0], outputs)
        if (found.token_ids, found.logprobs) != (probe[1].token_ids, probe[1].logprobs):
            self.findings.append(f"{output.request_id}: another answer than alone")

    def abort_one(self) -> None:
        if self.outputs:
            name = self.rng.choice(sorted(self.outputs))
            output = self.engine.abort(name)
            self.kinds["aborted"] += 1
            self.outputs[name].append(output)
            self.finish(output)


def make_probes(model: str, rng: random.Random) -> list[tuple[Request, Completion]]:
    """Requests with two common prefixes, and the answer of each when cold and alone."""
    plain = Engine.load(model, device="cpu", prefix_cache=False, max_sequences=1, max_context=2048)
    heads = [[rng.randrange(1000) for _ in range(size)] for size in (256, 700)]
    probes = []
    for number in range(NUM_PROBES):
        prompt = heads[number % 2] + [rng.randrange(1000) for _ in range(rng.choice((3, 60, 129)))]
        params = SamplingParams(
            max_tokens=rng.choice((4, 12, 24)),
            temperature=rng.choice((0.0, 1.0)),
            seed=number,
            logprobs=1,
            stop_ids=(),
        )
        request = Request(f"probe{number}", tuple(prompt), params)
        probes.append((request, plain.generate([prompt], params)[0]))
    return probes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(0)
    probes = make_probes(options.model, rng)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.load(
            options.model,
            device="cpu",
            max_sequences=6,
            max_context=2048,
            state_tokens=3072,
            prefix_disk=folder,
            audit_share=0.02,
            audit_folder=folder,
        )
        soak = Soak(engine, probes, rng)
        memory = run(soak, options.minutes * 60)
        stats = engine.stats()
    third = max(len(memory) // 3, 1)
    early, late = statistics.median(memory[third : 2 * third]), statistics.median(memory[-third:])
    if late - early > MOST_GROWTH_MB:
        soak.findings.append(f"memory grew from {early:.0f} to {late:.0f} MB")
    if stats.num_differences:
        soak.findings.append(f"the audit found {stats.num_differences} differences")
    result = {
        "minutes": options.minutes,
        "requests": dict(soak.kinds),
        "steps": stats.num_steps,
        "output_tokens": stats.num_output_tokens,
        "finished": stats.num_finished,
        "preemptions": stats.num_preemptions,
        "hit_rate": round(stats.num_prefix_hit / max(stats.num_prefix_asked, 1), 3),
        "audited": stats.num_audited,
        "memory_mb": {"first": memory[0], "middle": early, "late": late, "most": max(memory)},
        "findings": soak.findings,
    }
    text = json.dumps(result)
    sys.stdout.write(text + "\n")
    if options.record is not None:
        facts = json.dumps({"run": {**run_facts(), "model": options.model}})
        options.record.write_text(f"{facts}\n{json.dumps({'soak': result})}\n", encoding="utf-8")
    return 1 if soak.findings else 0


def run(soak: Soak, seconds: float) -> list[float]:
    """Traffic until the time is up, then until all is quiet; resident memory along the way."""
    engine, rng = soak.engine, soak.rng
    begin = last = time.monotonic()
    memory = [resident_mb()]
    while time.monotonic() - begin < seconds:
        if len(soak.outputs) < 10 and rng.random() < 0.4:
            soak.add()
        if rng.random() < 0.02:
            soak.abort_one()
        soak.step()
        if time.monotonic() - last > 5.0:
            last = time.monotonic()
            memory.append(resident_mb())
            engine.check_integrity()
    while engine.num_unfinished:
        soak.step()
    engine.check_integrity()
    if soak.outputs:
        soak.findings.append(f"without an answer: {sorted(soak.outputs)}")
    for name, count in engine.stats().pages_used.items():
        if count:
            soak.findings.append(f"{count} {name} pages are still held")
    memory.append(resident_mb())
    return [round(value, 1) for value in memory]


if __name__ == "__main__":
    sys.exit(main())
