"""Checks ranks on this machine: exchanges arrive, answers equal one rank's; and times them.

The embedded model is loaded once on one rank and once over all devices; tokens, log-probabilities
and logits must have the same bits.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine import Engine
from dsv4.errors import OptionError
from dsv4.parallel.layout import MOST_TP, allowed_tp
from dsv4.parallel.probe import probe
from dsv4.request import Request, SamplingParams

SIZES = (4096, 65536, 1 << 20)  # bytes of an exchange
TURNS = 4
BATCHES, STEPS = (1, 8), 16
TEXTS = ("What is the capital of France?", "Once upon a time " * 40, "a", "Count: 1, 2, 3, " * 12)


@dataclass(frozen=True)
class ExchangeTime:
    """`gather`: each rank of a tensor group gets all; `send`: to the next stage."""

    nbytes: int
    gather_us: float
    send_us: float


@dataclass
class ParallelReport:
    tp: int
    pp: int
    device: str
    attention: str = "tp"
    exchanges: list[ExchangeTime] = field(default_factory=list)
    num_tokens: int = 0
    num_logits: int = 0
    differences: list[str] = field(default_factory=list)
    fullest_share: float = 0.0  # load of the fullest rank's experts, 1.0: even; 0: not counted
    # milliseconds by what was timed: on one rank, on these ranks
    times: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def default_layout(config: ModelConfig, gpus: int, attention: str = "tp") -> tuple[int, int]:
    """(tp, pp) over all the GPUs that the embedded model can use; two ranks on a CPU."""
    allowed = allowed_tp(config, data_attention=attention == "dp")
    most = MOST_TP if attention == "dp" else 2
    tp = max(n for n in allowed if gpus % n == 0 and n <= most)
    return tp, min(gpus // tp, config.num_layers)


def examine_ranks(model: str, choices: EngineConfig, tell: Callable[[str], None]) -> ParallelReport:
    """Without tp and pp in `choices`, all devices are used."""
    one = replace(choices, tp=1, pp=1, nodes=1, head=None, attention="tp")
    alone = Engine.load(model, **asdict(one))
    try:
        if choices.tp == "auto" and choices.pp == 1:
            on_gpu = alone.settings.device != "cpu"
            count = torch.cuda.device_count() if on_gpu else 2
            if count < 2:
                raise OptionError("one GPU is visible, expected several; or give --device cpu")
            tp, pp = default_layout(alone.config, count, choices.attention)
        else:
            tp, pp = (1 if choices.tp == "auto" else choices.tp), choices.pp
        if tp * pp == 1:
            raise OptionError("tp x pp is 1, expected several ranks: give --tp or --pp")
        tell(f"one rank is loaded; now tp {tp}, pp {pp}")
        wanted, times = _answers(alone), _times(alone)
    finally:
        alone.close()
    engine = Engine.load(model, **asdict(replace(choices, tp=tp, pp=pp)))
    try:
        report = ParallelReport(tp, pp, engine.settings.device, choices.attention)
        tell("exchanging patterns")
        report.exchanges = [_exchange(engine, nbytes) for nbytes in SIZES]
        tell("comparing answers")
        report.differences = list(_differences(wanted, _answers(engine)))
        report.num_tokens = sum(len(answer[0]) for answer in wanted[0])
        report.num_logits = wanted[1].numel()
        tell("timing steps")
        found = _times(engine)
        report.times = {name: (times[name], found[name]) for name in times}
        fullest, every = engine.stats().expert_pairs
        report.fullest_share = round(fullest * tp / every, 2) if every else 0.0
    finally:
        engine.close()
    return report


def _exchange(engine: Engine, nbytes: int) -> ExchangeTime:
    runner = engine._runner
    team, exchange = runner.team, runner.model.exchange
    assert team is not None
    team.command("probe", (nbytes, TURNS))
    with team.together():
        gather, send = probe(exchange.comm, exchange.layout, nbytes, TURNS, runner.device)
    return ExchangeTime(nbytes, round(gather * 1e6, 1), round(send * 1e6, 1))


def _answers(engine: Engine) -> tuple[list[tuple[Any, Any]], torch.Tensor]:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=7, logprobs=3, stop_ids=())
    found = engine.generate(list(TEXTS), params)
    again = engine.generate([TEXTS[1]], params)  # begins with a cached prefix
    logits = torch.cat([part.cpu() for part in engine.score(engine.encode(TEXTS[1]))])
    return [(answer.token_ids, answer.logprobs) for answer in (*found, *again)], logits


def _differences(wanted: Any, found: Any) -> Iterator[str]:
    for place, (a, b) in enumerate(zip(wanted[0], found[0], strict=True)):
        if a[0] != b[0]:
            yield f"answer {place}: tokens {b[0]}, expected {a[0]}"
        elif a[1] != b[1]:
            yield f"answer {place}: the same tokens with other log-probabilities"
    rows = (wanted[1] != found[1]).any(1).nonzero().flatten().tolist()
    if rows:
        most = float((wanted[1] - found[1]).abs().max())
        yield f"logits differ in {len(rows)} of {len(wanted[1])} rows, by up to {most:.3g}"


def _times(engine: Engine) -> dict[str, float]:
    """Milliseconds per decode step, by batch size, and of a prompt."""
    found = {}
    for batch in BATCHES:
        if batch <= engine.settings.max_sequences:
            found[f"decode step, batch {batch}"] = _decode_ms(engine, batch)
    prompt = engine.encode("A long story. " * 30)
    begin = time.perf_counter()
    for _ in engine.score(prompt):
        pass
    found[f"prompt of {len(prompt)} tokens"] = (time.perf_counter() - begin) * 1e3
    return {name: round(ms, 3) for name, ms in found.items()}


def _decode_ms(engine: Engine, batch: int) -> float:
    params = SamplingParams(max_tokens=STEPS + 4, temperature=0.0, stop_ids=())
    with _running(engine, batch, params):
        for _ in range(4):
            engine.step()
        begin = time.perf_counter()
        # with several stages, each has some of the sequences; a step advances only those
        count = sum(len(out.token_ids) for _ in range(STEPS - 4) for out in engine.step())
        return (time.perf_counter() - begin) * 1e3 * batch / count


@contextmanager
def _running(engine: Engine, batch: int, params: SamplingParams) -> Iterator[None]:
    names = [f"doctor-{batch}-{i}" for i in range(batch)]
    for i, name in enumerate(names):
        engine.add(Request(name, (5 + i, 6, 7), params))
    try:
        yield
    finally:
        for name in names:
            engine.abort(name)
        engine.step()
