"""Traffic sent directly to an engine: single prompts, then open-loop loads with odd options."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dsv4.chat.dialect import choose_dialect
from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine import Engine
from dsv4.errors import CapacityError, OptionError
from dsv4.runner.load import LoadedModel, find_gpu, state_memory
from dsv4.runner.settings import resolve
from dsv4.tools.speed.expert_memory import RandomPlaced
from dsv4.tools.speed.model import random_model
from dsv4.tools.speed.serving.traffic import (
    MAX_LOAD_S,
    Arrival,
    Load,
    LoadResult,
    Stream,
    Traffic,
    percentiles,
    summarise,
    too_long,
)
from dsv4.util.events import Event
from dsv4.util.progress import Progress

IDLE_S = 0.0005
ALONE_REPEATS = 3

GPU_LENGTHS = (32, 128, 512, 2000, 8000)
GPU_LOADS = (
    Load(8, 48, 512, 64),
    Load(12, 72, 512, 64),
    Load(4, 16, 2000, 64),
    Load(24, 96, 64, 64),
    Load(8, 48, 512, 64, odd=True),
)
GPU_ALONE_OUTPUT, CPU_ALONE_OUTPUT = 33, 9
CPU_LENGTHS = (32, 128, 512)
CPU_LOADS = (Load(2, 12, 64, 16), Load(2, 12, 64, 16, odd=True))
Say = Callable[[str], None]
STREAMS = Load(0, 32, 32, 128)  # the load that measures the server's share


@dataclass(frozen=True)
class Ready:
    model: str
    settings: str
    ready_s: float
    weights_s: float | None = None  # time to generate random weights before that


@dataclass(frozen=True)
class IdleLatency:
    """Medians of a prompt on an idle engine; `cached`: the same prompt again."""

    num_prompt: int
    first_ms: float
    gap_ms: float
    num_cached: int
    cached_first_ms: float


@dataclass(frozen=True)
class Warnings:
    """Everything logged at level WARNING or above since ready; should be empty."""

    count: int
    some: list[str]


@dataclass(frozen=True)
class StepMark:
    """`begin_s` is the end of the previous step unless the engine was idle: the gap streams see."""

    begin_s: float
    end_s: float
    num_prompt: int
    num_decode: int


@dataclass(frozen=True)
class Measured:
    """A load's results, and the data for its timeline."""

    load: Load
    result: LoadResult
    steps: Sequence[StepMark]
    arrivals_s: Sequence[float]


def random_engine(
    shape: str, config: ModelConfig, choices: EngineConfig, progress: Progress | None = None
) -> tuple[Engine, Ready]:
    """An engine over random weights; it has no tokenizer. `shape` is the name of `config`."""
    has_gpu = torch.cuda.is_available()
    device = choices.device
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    if not has_gpu and choices.device != "cpu" and shape != "trial":
        raise OptionError("no CUDA device was found; without --shape the embedded model runs")
    if choices.dtype == "float32":
        raise OptionError("dtype is float32, expected bfloat16: random weights have no other")
    begin = time.perf_counter()
    choices, nowhere = replace(choices, dtype="bfloat16"), Path()  # no checkpoint
    if choices.expert_memory != "auto":
        placed = RandomPlaced(config, choices, torch.device(device))
        settings, swapper = placed.choice.settings, placed.swapper
        loaded = LoadedModel(placed.model, settings, nowhere, swapper=swapper)
    else:
        try:
            model, _ = random_model(config, torch.device(device))
        except torch.cuda.OutOfMemoryError as error:
            raise CapacityError(
                f"{config.num_layers} layers of {shape} do not fit the GPU; lower --layers, or "
                "give --expert-memory in GB"
            ) from error
        if has_gpu:
            torch.cuda.empty_cache()  # free the generator's memory
        memory = state_memory(choices.device, config, 0, has_gpu=has_gpu)
        gpu = find_gpu(choices.device)
        settings = resolve(choices, config, has_gpu=has_gpu, memory_bytes=memory, gpu=gpu)
        loaded = LoadedModel(model, settings, nowhere)
    weights_s = time.perf_counter() - begin
    begin = time.perf_counter()
    dialect = choose_dialect(has_system_marker=False, folder=nowhere)
    engine = Engine(loaded, None, dialect, progress)
    ready_s = time.perf_counter() - begin
    name = f"{shape}, {config.num_layers} random layers"
    return engine, Ready(name, str(settings), round(ready_s, 2), round(weights_s, 2))


class Recorder:
    """A load's steps, recorded from engine events."""

    def __init__(self) -> None:
        self.steps: list[StepMark] = []
        self._event: Event | None = None

    def __call__(self, event: Event) -> None:
        if event.kind == "step":
            self._event = event

    def mark(self, begin_s: float, end_s: float, num_first: int) -> None:
        """`num_first`: sequences that got their first token here; their rows are prompts."""
        event, self._event = self._event, None
        if event is not None:
            num_decode = max(event.values["num_sampled"] - num_first, 0)
            num_prompt = event.values["num_tokens"] - num_decode
            self.steps.append(StepMark(begin_s, end_s, num_prompt, num_decode))


def replay(
    engine: Engine, arrivals: Sequence[Arrival], recorder: Recorder | None = None
) -> tuple[list[Stream], float]:
    """Add requests when they are due; returns what their readers saw, and the total seconds."""
    waiting = deque(arrivals)
    streams = {a.request.id: Stream(a.time_s, len(a.request.prompt_ids)) for a in arrivals}
    begin = time.perf_counter()
    end = 0.0
    while waiting or engine.num_unfinished:
        now = time.perf_counter() - begin
        if now > MAX_LOAD_S:
            raise too_long()
        while waiting and waiting[0].time_s <= now:
            engine.add(waiting.popleft().request)
        if not engine.num_unfinished:
            time.sleep(IDLE_S)
            end = time.perf_counter() - begin
            continue
        outputs = engine.step()
        last, end = end, time.perf_counter() - begin
        num_first = 0
        for output in outputs:
            stream = streams[output.request_id]
            stream.error = output.error or stream.error
            if output.token_ids:
                num_first += not stream.times_s
                stream.times_s.append(end)
                stream.num_tokens += len(output.token_ids)
                stream.num_cached = output.num_cached or stream.num_cached
        if recorder is not None:
            recorder.mark(last, end, num_first)
    return list(streams.values()), time.perf_counter() - begin


def run_alone(engine: Engine, traffic: Traffic, num_prompt: int) -> IdleLatency:
    firsts, gaps, num_output = [], [], alone_output(engine)
    for _ in range(ALONE_REPEATS):
        request = traffic.request(num_prompt, num_output)
        (stream,), _ = replay(engine, [Arrival(0.0, request)])
        _raise_if_failed(stream)
        firsts.append(stream.first_s)
        gaps += stream.gaps_s
    (again,), _ = replay(engine, [Arrival(0.0, request)])
    _raise_if_failed(again)
    return IdleLatency(
        num_prompt,
        percentiles(firsts)["p50"],
        percentiles(gaps)["p50"],
        again.num_cached,
        percentiles([again.first_s])["p50"],
    )


def alone_output(engine: Engine) -> int:
    return CPU_ALONE_OUTPUT if engine.settings.device == "cpu" else GPU_ALONE_OUTPUT


def _raise_if_failed(stream: Stream) -> None:
    if stream.error is not None:
        raise CapacityError(f"a request alone failed: {stream.error}")


def run_load(engine: Engine, traffic: Traffic, load: Load, *, watch: bool = True) -> Measured:
    """Recording costs the engine about 20 us per step."""
    arrivals = traffic.arrivals(load)
    recorder = Recorder() if watch else None
    if recorder is not None:
        engine.listeners.append(recorder)
    try:
        streams, seconds = replay(engine, arrivals, recorder)
    finally:
        if recorder is not None:
            engine.listeners.remove(recorder)
    steps = recorder.steps if recorder is not None else []
    counts = {"num_steps": len(steps), "num_prompt_steps": sum(s.num_prompt > 0 for s in steps)}
    result = summarise(load, "engine", streams, seconds, **(counts if watch else {}))
    return Measured(load, result, steps, [arrival.time_s for arrival in arrivals])


def bench_engine(
    engine: Engine, lengths: Sequence[int], loads: Sequence[Load], say: Say, *, watch: bool = True
) -> Iterator[IdleLatency | Measured | Warnings]:
    """Single prompts of these lengths, then the loads; `say` announces each."""
    room = engine.settings.max_context
    for load in loads:
        if load.num_tokens > room:
            raise OptionError(
                f"load {load}: a sequence has {load.num_tokens} tokens, max_context is {room}; "
                "raise --max-context or lower in and out"
            )
    traffic = Traffic(engine.config.vocab_size)
    with kept_warnings() as lines:
        for length in lengths:
            say(f"prompts of {length} tokens alone")
            yield run_alone(engine, traffic, length)
        for load in loads:
            say(str(load))
            yield run_load(engine, traffic, load, watch=watch)
        engine.check_integrity()
        yield Warnings(len(lines), lines[:6])


def default_loads(engine: Engine) -> tuple[list[int], list[Load]]:
    """The default prompt lengths and loads that fit the engine's context."""
    on_gpu, room = engine.settings.device != "cpu", engine.settings.max_context
    lengths = GPU_LENGTHS if on_gpu else CPU_LENGTHS
    loads = GPU_LOADS if on_gpu else CPU_LOADS
    return (
        [length for length in lengths if length + alone_output(engine) <= room],
        [load for load in loads if load.num_tokens <= room],
    )


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Collects everything logged at level WARNING or above in the block."""
    handler = _Kept()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.lines
    finally:
        logging.getLogger().removeHandler(handler)
