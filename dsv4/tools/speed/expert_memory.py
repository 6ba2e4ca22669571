"""Times steps of a model whose experts do not all fit the GPU, under known routing.

Weights are random in the official formats, generated in place: no checkpoint is read. Every layer
looks up a token's experts in a table, so routing is even or follows Zipf's law exactly. Steps are
queued one ahead, as in the engine, with swaps between them.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.state import StateTensors
from dsv4.checkpoint.names import parameters
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import OptionError
from dsv4.formats.quantized import Weight
from dsv4.model.transformer import Transformer
from dsv4.runner.experts.budget import ExpertBudget
from dsv4.runner.experts.choose_memory import (
    ExpertChoice,
    WeightBytes,
    choose_experts,
    choose_on_cpu,
)
from dsv4.runner.experts.place import PlacedWeights, open_experts
from dsv4.runner.experts.swapper import Swapper
from dsv4.runner.settings import Settings, resolve
from dsv4.runner.settings import step_bytes as kept_free
from dsv4.tools.bench_ops import random_fp4
from dsv4.tools.plan_weights import parameter_bytes, scheme_named
from dsv4.tools.speed.model import (
    decode_step,
    filled_state,
    official_weight,
    shape_config,
    start_at,
)
from dsv4.tools.speed.prompts import prompt_inputs
from dsv4.tools.speed.steps import captured, compile_ahead, give_back

PIECE = 32  # experts made at a time
TIMED = 100  # steps
SEQUENCES, CONTEXT = 4, 131072  # that the GPU keeps room for


@dataclass(frozen=True)
class PlacedResult:
    what: str  # decode or prompt
    routing: str
    shape: str
    layers: int
    batch: int
    context: int
    ms: float
    spread_ms: float
    still_ms: float  # without swaps
    tokens_per_s: float
    resident_share: float
    missing_mb: float  # read over the bus in a step, or copied ahead of a prompt
    missing_gbs: float  # these bytes over the total time
    num_swaps: int  # since the model was made


@dataclass(frozen=True)
class PlacedModel:
    """A generated model and the most memory it took so far."""

    line: str
    seconds: float
    pinning_s: float
    gpu_gb: float  # used on the whole GPU
    planned_gb: float
    step_gb: float  # kept free besides


class RandomPlaced:
    """A model with random weights, its experts placed as the engine would place them."""

    def __init__(self, config: ModelConfig, choices: EngineConfig, device: torch.device) -> None:
        begin = time.perf_counter()
        self.config, self.choices, self.device = config, choices, device
        self.choice, self.planned = self._choose()
        torch.manual_seed(0)
        self.swapper: Swapper | None = None
        placed = None
        if self.choice.budget is not None:
            placed = open_experts(self.choice, self.config, self.choice.settings, self._one_expert)
            self.swapper = placed.swapper
        self.model = Transformer(self.config, self._weights(placed), torch.bfloat16)
        self._synchronize()
        self.seconds = time.perf_counter() - begin

    def _choose(self) -> tuple[ExpertChoice, int]:
        """The choice, and the GPU bytes it plans to use, without those kept free for a step."""
        nbytes = parameter_bytes(self.config, scheme_named("official"))
        routed = sum(size for name, size in nbytes.items() if ".ffn.experts." in name)
        weights = WeightBytes(sum(nbytes.values()), routed)
        config, has_gpu = self.config, self.device.type == "cuda"

        def resolved(choices: EngineConfig, memory: int) -> Settings:
            return resolve(choices, config, has_gpu=has_gpu, memory_bytes=memory)

        if has_gpu:
            torch.cuda.empty_cache()
            memory = torch.cuda.mem_get_info(self.device)
            found = choose_experts(self.choices, config, weights, *memory, resolved)
        else:
            settings = resolved(self.choices, 2**40)
            found = choose_on_cpu(self.choices, config, weights, settings)
        s = found.settings
        sizes = s.max_context, s.max_sequences, s.state_tokens
        experts = routed if found.budget is None else found.budget.gpu_bytes
        state = s.geometry(config).state_bytes(*sizes)
        return found, weights.total - routed + experts + state

    @property
    def budget(self) -> ExpertBudget | None:
        return None if self.swapper is None else self.swapper.residency.budget

    def _one_expert(self) -> tuple[Weight, Weight]:
        c = self.config
        w13 = random_fp4(
            2 * c.moe_intermediate_size, c.hidden_size, None, True, self.device, mx=True
        )
        return w13, random_fp4(
            c.hidden_size, c.moe_intermediate_size, None, False, self.device, mx=True
        )

    def _weights(self, placed: PlacedWeights | None) -> dict[str, Weight]:
        found: dict[str, Weight] = {}
        for name, parameter in parameters(self.config).items():
            if placed is None or ".ffn.experts." not in name:
                found[name] = official_weight(name, parameter, self.config, self.device)
                continue
            count, rows, columns = parameter.shape
            for first in range(0, count, PIECE):
                some = min(PIECE, count - first)
                stack = random_fp4(rows, columns, some, name.endswith("w13"), self.device, mx=True)
                placed.take(name, stack)
        return found if placed is None else found | placed.weights()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def planned_state(settings: Settings, config: ModelConfig) -> StateTensors:
    """What an engine with these settings allocates; timed steps have a state of their own, but
    memory is to be as full as the engine's."""
    geometry, slots = settings.geometry(config), settings.max_sequences
    num_pages = geometry.num_pages(settings.max_context, slots, settings.state_tokens)
    return StateTensors(geometry, slots, num_pages, settings.device)


class PlacedBench(RandomPlaced):
    def __init__(self, shape: str, layers: int | None, device: str, expert_memory: str) -> None:
        self.shape, config = shape, shape_config(shape, layers)
        choices = EngineConfig(
            device=device, kv_format="fp8", index_format="fp4", max_sequences=SEQUENCES,
            max_context=min(CONTEXT, config.max_positions), expert_memory=expert_memory,
        )  # fmt: skip
        hashed = replace(config, num_hash_layers=config.num_layers)
        super().__init__(hashed, choices, torch.device(device))
        self.state = planned_state(self.choice.settings, self.config)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # free the generator's memory
            torch.cuda.reset_peak_memory_stats(self.device)

    def made(self) -> PlacedModel:
        used = kept = 0
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            outside = total - free - torch.cuda.memory_reserved(self.device)
            used = outside + torch.cuda.max_memory_reserved(self.device)
            kept = kept_free(total, self.config, self.choice.settings.chunk_tokens)
        line = str(self.budget) if self.budget else "experts: all stay on the GPU"
        sizes = (round(size / 1e9, 2) for size in (used, self.planned, kept))
        pinning = self.swapper.residency.host.seconds if self.swapper else 0.0
        return PlacedModel(line, round(self.seconds, 1), round(pinning, 1), *sizes)

    def route(self, routing: str) -> None:
        """Refill every layer's table: `even`, or `zipf:` and an exponent; each layer has its own
        order of experts. Past visits are forgotten, as in a new engine."""
        if self.swapper is not None:
            self.swapper.use.visits[:] = 0
        exponent, count = exponent_of(routing), self.config.num_experts
        ranks = torch.arange(1, count + 1, device=self.device).log()
        for block in self.model.blocks:
            table = block.ffn.gate.table
            assert table is not None
            order = torch.randperm(count, device=self.device)
            for part in torch.split(table, 1 << 14):
                noise = -torch.rand(len(part), count, device=self.device).log().neg().log()
                chosen = (noise - exponent * ranks).topk(table.shape[1], dim=1).indices
                part.copy_(order[chosen])

    @torch.inference_mode()
    def decode(self, batch: int, context: int, routing: str, settle: int) -> PlacedResult:
        """`routing`: the one last passed to `route`."""
        state = filled_state(self.config, batch, context, self.device)
        start = max(context - settle - 4 * TIMED - 8, 0)
        start_at(state, start)

        def step() -> None:
            decode_step(self.model, state.layers, state)

        captured_step = captured(step, self.device)

        def replay() -> None:
            """The next token is any: a random model would sample some more often than others."""
            captured_step()
            state.buffers.newest.random_(0, self.config.vocab_size)

        start_at(state, start)
        self._run(replay, settle)
        count = TIMED if batch == 1 else TIMED // 5  # many sequences are slow over the bus
        count = count if self.device.type == "cuda" else 2
        times = [self._run(replay, count) / count for _ in range(2)]
        still, missing = self._still(replay, max(count, 10))  # between others: steps may get faster
        times.append(self._run(replay, count) / count)
        return self._result("decode", routing, (batch, context, batch), times, still, missing)

    def _run(self, replay: Callable[[], object], count: int) -> float:
        """Milliseconds of `count` steps; the host runs one ahead and swaps between them."""
        queued: list[Any] = []
        begin = time.perf_counter()
        for _ in range(count):
            if self.swapper is not None:
                self.swapper.between_steps()
            replay()
            if self.device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                queued.append(event)
                if len(queued) > 1:
                    queued.pop(0).synchronize()
        self._synchronize()
        return (time.perf_counter() - begin) * 1e3

    @torch.inference_mode()
    def prompt(self, tokens: int, routing: str) -> PlacedResult:
        """As in the engine, a prompt is a graph unless experts are copied ahead of it."""
        state = filled_state(self.config, 1, tokens, self.device, chunk_tokens=tokens)
        inputs, swapper = prompt_inputs(state, tokens), self.swapper

        def step() -> None:
            with nullcontext() if swapper is None else swapper.residency.step(tokens):
                self.model(inputs, state.layers)

        is_staged = swapper is not None and tokens >= swapper.residency.staged_rows
        if is_staged:
            compile_ahead(lambda: self.model(inputs, state.layers), self.device)
        run = step if is_staged else captured(step, self.device)
        self._prompt(run)
        times = [self._prompt(run) for _ in range(3)]
        missing = 0 if self.budget is None else self.budget.missing
        still = statistics.median(times)  # experts stay where they are
        return self._result("prompt", routing, (1, tokens, tokens), times, still, missing)

    def _prompt(self, run: Callable[[], object]) -> float:
        self._synchronize()
        begin = time.perf_counter()
        run()
        self._synchronize()
        return (time.perf_counter() - begin) * 1e3

    def _still(self, replay: Callable[[], object], count: int) -> tuple[float, float]:
        """Milliseconds of a step without swaps, and the missing experts that it visits: swaps
        choose by past visits, so counts of what is missing after them would be too low."""
        swapper, self.swapper = self.swapper, None
        if swapper is None:
            return self._run(replay, count) / count, 0.0
        before = swapper.residency.counts.clone()
        ms = self._run(replay, count) / count
        visits = (swapper.residency.counts - before)[:, : self.config.num_experts].cpu()
        missing: Tensor = visits[torch.from_numpy(~swapper.residency.resident)]
        self.swapper = swapper
        return ms, int(missing.sum()) / count

    def _result(
        self,
        what: str,
        routing: str,
        case: tuple[int, int, int],
        times: Sequence[float],
        still: float,
        missing: float,
    ) -> PlacedResult:
        batch, context, tokens = case
        ms, budget = statistics.median(times), self.budget
        nbytes = missing * budget.block_bytes if budget else 0.0
        return PlacedResult(
            what, routing, self.shape, self.config.num_layers, batch, context, round(ms, 3),
            round(max(times) - min(times), 3), round(still, 3), round(tokens / ms * 1e3, 1),
            round(budget.resident_share, 4) if budget else 1.0, round(nbytes / 1e6, 1),
            round(nbytes / ms / 1e6, 1), self.swapper.num_swaps if self.swapper else 0,
        )  # fmt: skip


def exponent_of(routing: str) -> float:
    """0 for `even`, 1.0 for `zipf:1.0`."""
    kind, _, text = routing.partition(":")
    try:
        found = 0.0 if routing == "even" else float(text)
    except ValueError:
        found = -1.0
    if (kind != "zipf" and routing != "even") or not 0 <= found <= 10:
        raise OptionError(f"routing is {routing!r}, expected even, or zipf and an exponent: zipf:1")
    return found


def bench_placed(
    shape: str,
    layers: int | None,
    cases: Sequence[tuple[int, int]],
    prompts: Sequence[int],
    routings: Sequence[str],
    settle: int,
    device: str,
    expert_memory: str,
) -> Iterator[PlacedModel | PlacedResult]:
    """`cases`: batch and context of decode steps. Even routing has little to settle."""
    bench = PlacedBench(shape, layers, device, expert_memory)
    yield bench.made()
    try:
        for routing in routings:
            bench.route(routing)
            first = settle if exponent_of(routing) else min(settle, TIMED)
            for index, (batch, context) in enumerate(cases):
                yield bench.decode(batch, context, routing, 1 if index else first)
                give_back(bench.device)
        for tokens in prompts:
            yield bench.prompt(tokens, routings[-1])
            give_back(bench.device)
        yield bench.made()
    finally:
        if bench.swapper is not None:
            bench.swapper.close()
        del bench
        gc.collect()  # tables and what moves experts refer to each other
        give_back(torch.device(device))
