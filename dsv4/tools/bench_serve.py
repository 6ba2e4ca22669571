"""A trace of requests through the engine: latency, throughput, cache hits; and what each part buys.

The same trace (arrivals, prompts, lengths: all from one seed) runs as the engine is, with one
sequence at a time, and without the prefix cache. Two plain measures follow: a full batch against
one request after another, and the first token behind a long cached prefix against a cold one.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4.engine import Engine
from dsv4.errors import OptionError
from dsv4.request import Request, SamplingParams
from dsv4.tools.bench_ops import run_facts

LATE = 600.0  # seconds after which a trace is given up


@dataclass(frozen=True)
class Workload:
    """Lengths are drawn evenly from the lists; `shared` of the prompts begin with one of
    `num_prefixes` common texts."""

    num_requests: int = 24
    rate: float = 2.0  # arrivals in a second, Poisson; 0: all at once
    prompt_lens: tuple[int, ...] = (16, 64, 64, 256)
    output_lens: tuple[int, ...] = (8, 16, 48)
    shared: float = 0.5
    num_prefixes: int = 2
    prefix_len: int = 640
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.rate < 0 or not 0 <= self.shared <= 1:
            raise OptionError(
                f"requests {self.num_requests}, rate {self.rate}, shared {self.shared}: expected "
                "at least 1 request, a rate of 0 or more, a share from 0 to 1"
            )


@dataclass(frozen=True)
class Arrival:
    time_s: float
    request: Request


@dataclass
class Timing:
    """Of one request, in seconds after it arrived."""

    num_prompt: int
    num_cached: int = 0
    num_output: int = 0
    first_s: float = 0.0
    end_s: float = 0.0


@dataclass(frozen=True)
class Report:
    name: str
    num_requests: int
    output_tokens: int
    seconds: float
    tokens_per_s: float
    hit_rate: float
    first_token_ms: dict[str, float]  # p50, p95, p99
    per_token_ms: dict[str, float]
    num_preemptions: int


def make_trace(workload: Workload, vocab_size: int) -> list[Arrival]:
    rng = random.Random(workload.seed)

    def text(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(length))

    prefixes = [text(workload.prefix_len) for _ in range(workload.num_prefixes)]
    arrivals, now = [], 0.0
    for number in range(workload.num_requests):
        prompt = text(rng.choice(workload.prompt_lens))
        if prefixes and rng.random() < workload.shared:
            prompt = rng.choice(prefixes) + prompt
        params = SamplingParams(
            max_tokens=rng.choice(workload.output_lens), seed=number, stop_ids=()
        )
        arrivals.append(Arrival(now, Request(f"request-{number}", prompt, params)))
        now += rng.expovariate(workload.rate) if workload.rate else 0.0
    return arrivals


def replay(engine: Engine, arrivals: list[Arrival]) -> tuple[list[Timing], float]:
    """Requests enter when they are due; timings, and seconds until the last has ended."""
    waiting = sorted(arrivals, key=lambda a: a.time_s)
    timings = {a.request.id: Timing(len(a.request.prompt_ids)) for a in arrivals}
    due = {a.request.id: a.time_s for a in arrivals}
    begin = time.perf_counter()
    while waiting or engine.num_unfinished:
        now = time.perf_counter() - begin
        if now > LATE:
            raise OptionError(f"the trace takes longer than {LATE:g} s; ask for fewer requests")
        while waiting and waiting[0].time_s <= now:
            engine.add(waiting.pop(0).request)
        if not engine.num_unfinished:
            time.sleep(min(waiting[0].time_s - now, 0.01))
            continue
        for output in engine.step():
            now = time.perf_counter() - begin
            timing = timings[output.request_id]
            timing.num_output += len(output.token_ids)
            timing.num_cached = output.num_cached or timing.num_cached
            timing.first_s = timing.first_s or now - due[output.request_id]
            timing.end_s = now - due[output.request_id]
    return list(timings.values()), time.perf_counter() - begin


def summarise(name: str, timings: list[Timing], seconds: float, num_preemptions: int) -> Report:
    tokens = sum(t.num_output for t in timings)
    pace = [(t.end_s - t.first_s) / (t.num_output - 1) for t in timings if t.num_output > 1]
    return Report(
        name=name,
        num_requests=len(timings),
        output_tokens=tokens,
        seconds=round(seconds, 3),
        tokens_per_s=round(tokens / seconds, 2),
        hit_rate=round(sum(t.num_cached for t in timings) / sum(t.num_prompt for t in timings), 3),
        first_token_ms=_percentiles([t.first_s for t in timings]),
        per_token_ms=_percentiles(pace),
        num_preemptions=num_preemptions,
    )


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    places = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    last = len(ordered) - 1
    return {name: round(ordered[round(share * last)] * 1e3, 1) for name, share in places.items()}


Make = Callable[[dict[str, Any]], Engine]  # an engine with these choices changed
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one at a time": {"max_sequences": 1},
    "no prefix cache": {"prefix_cache": False},
}


def bench_trace(make: Make, workload: Workload) -> Iterator[Report]:
    for name, changes in VARIANTS.items():
        engine = make(changes)
        warm_up(engine)
        timings, seconds = replay(engine, make_trace(workload, usable_ids(engine)))
        engine.check_integrity()
        yield summarise(name, timings, seconds, engine.stats().num_preemptions)


def usable_ids(engine: Engine) -> int:
    """Ordinary tokens come first; the markers at the end have a meaning."""
    return max(engine.config.vocab_size * 9 // 10, 1)


def warm_up(engine: Engine) -> None:
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, stop_ids=()))


@dataclass(frozen=True)
class Gain:
    """Two medians, how far runs were apart (largest less smallest), and their ratio."""

    name: str
    unit: str
    with_it: float
    without: float
    spread: tuple[float, float]
    ratio: float


def bench_batching(make: Make, batch: int = 8, num_output: int = 16, repeats: int = 3) -> Gain:
    """Tokens per second of `batch` requests at once, and of the same ones in a row."""
    engine = make({"max_sequences": batch})
    trace = make_trace(Workload(batch, 0, (32,), (num_output,), shared=0.0), usable_ids(engine))
    prompts = [list(arrival.request.prompt_ids) for arrival in trace]
    params = SamplingParams(max_tokens=num_output, seed=0, stop_ids=())
    warm_up(engine)
    together, alone = [], []
    for _ in range(repeats):
        together.append(batch * num_output / _seconds(lambda: engine.generate(prompts, params)))
        alone.append(
            batch * num_output / _seconds(lambda: [engine.generate([p], params) for p in prompts])
        )
    return _gain(f"batch of {batch}", "tokens/s", together, alone, higher=True)


def bench_prefix(make: Make, prefix_len: int = 4096, repeats: int = 3) -> Gain:
    """Seconds to the first token behind a prefix that is cached, and behind one that is not."""
    engine = make({})
    rng = random.Random(1)
    params = SamplingParams(max_tokens=1, seed=0, stop_ids=())
    warm_up(engine)
    cold: list[float] = []
    hit: list[float] = []
    for _ in range(repeats):
        prefix = [rng.randrange(usable_ids(engine)) for _ in range(prefix_len)]
        tails = [[rng.randrange(usable_ids(engine)) for _ in range(24)] for _ in range(2)]
        for times, tail in zip((cold, hit), tails, strict=True):
            times.append(_seconds(lambda: engine.generate([prefix + tail], params)))  # noqa: B023
    return _gain(f"hit on {prefix_len} tokens", "s to first token", hit, cold, higher=False)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _gain(name: str, unit: str, ours: list[float], plain: list[float], *, higher: bool) -> Gain:
    a, b = statistics.median(ours), statistics.median(plain)
    spread = (round(max(ours) - min(ours), 4), round(max(plain) - min(plain), 4))
    ratio = a / b if higher else b / a
    return Gain(name, unit, round(a, 4), round(b, 4), spread, round(ratio, 2))


def write_record(path: Path, facts: dict[str, Any], rows: list[Report | Gain]) -> None:
    """One JSON object per line: the facts, then the results."""
    lines = [json.dumps({"run": {**run_facts(), **facts}})]
    lines += [json.dumps({type(row).__name__.lower(): asdict(row)}) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
