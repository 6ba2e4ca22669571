"""Checks ranks on this machine: exchanges arrive, answers equal one rank's; and times them.

The embedded model is loaded once on one rank and once over all devices; tokens, log-probabilities
and logits must have the same bits. It has two output groups, so up to two ranks share its layers;
for more, a random model with eight stands in, as Flash and Pro have them.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine import Engine
from dsv4.errors import OptionError
from dsv4.ops.core.gpu import usable_device
from dsv4.parallel.layout import MOST_TP, allowed_tp
from dsv4.parallel.probe import probe
from dsv4.request import Request, SamplingParams
from dsv4.testing import random_weights, write_checkpoint
from dsv4.tools.convert.convert import convert
from dsv4.util.models import BUILTIN_MODELS, model_folder

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
    model: str = "the embedded model"
    fullest_share: float = 0.0  # load of the fullest rank's experts, 1.0: even; 0: not counted
    # milliseconds by what was timed: on one rank, on these ranks
    times: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def default_layout(gpus: int, num_layers: int) -> tuple[int, int]:
    """(tp, pp) over all GPUs, with as many ranks that share a layer as there can be."""
    tp = max(n for n in (1, 2, 4, MOST_TP) if gpus % n == 0)
    return tp, min(gpus // tp, num_layers)


def examine_ranks(model: str, choices: EngineConfig, tell: Callable[[str], None]) -> ParallelReport:
    """Without tp and pp in `choices`, all devices are used."""
    folder, device = model_folder(model), usable_device(choices.device)
    config = ModelConfig.from_folder(folder)
    if choices.tp == "auto" and choices.pp == 1:
        count = 2 if device == "cpu" else torch.cuda.device_count()
        if count < 2:
            raise OptionError(f"GPUs seen: {count}, expected several; or give --device cpu")
        tp, pp = default_layout(count, config.num_layers)
    else:
        tp, pp = (1 if choices.tp == "auto" else choices.tp), choices.pp
    if tp * pp == 1:
        raise OptionError("tp x pp is 1, expected several ranks: give --tp or --pp")
    is_built_in = folder.parent == BUILTIN_MODELS
    allowed = allowed_tp(config, data_attention=choices.attention == "dp")
    with tempfile.TemporaryDirectory(prefix="dsv4-doctor-") as scratch:
        name = "the embedded model" if is_built_in else model
        if is_built_in and tp not in allowed and MOST_TP % tp == 0:
            if choices.nodes > 1:
                raise OptionError(
                    f"tp is {tp} on {choices.nodes} nodes, expected one of {allowed}, or a model "
                    "folder that every node has"
                )
            tell("writing a random model with eight output groups")
            model, name = str(write_random_model(folder, Path(scratch))), "a random model"
        report = _compare(model, replace(choices, tp=tp, pp=pp), tell)
    report.model = name
    return report


def write_random_model(embedded: Path, scratch: Path) -> Path:
    """Of the embedded model's sizes and formats, with heads and output groups for eight ranks."""
    config = ModelConfig.from_folder(embedded)
    config = replace(
        config, num_heads=8 * MOST_TP, o_groups=MOST_TP, num_experts=2 * MOST_TP, num_draft_layers=0
    )
    plain, folder = scratch / "plain", scratch / "random"
    write_checkpoint(plain, config, random_weights(config, 1))
    shutil.copy(embedded / "tokenizer.json", plain)
    convert(plain, folder, "nvfp4-all")
    return folder


def _compare(model: str, choices: EngineConfig, tell: Callable[[str], None]) -> ParallelReport:
    tp, pp = choices.tp, choices.pp
    assert isinstance(tp, int)
    tell("loading on one rank")
    one = replace(choices, tp=1, pp=1, nodes=1, head=None, attention="tp")
    alone = Engine.load(model, **asdict(one))
    try:
        tell(f"one rank is loaded; now tp {tp}, pp {pp}")
        wanted, times = _answers(alone), _times(alone)
    finally:
        alone.close()
    engine = Engine.load(model, **asdict(choices))
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
