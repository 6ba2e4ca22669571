"""Times decode steps against the floor set by the bytes they move.

A decode step is captured as in the engine and replayed; replays are timed with events, and one of
them is profiled kernel by kernel. Repeating this with layers of just one kind gives the cost of
a layer. Without a GPU everything runs once through the references: a trial of the tool, not a
measurement.
"""

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4.cache.kinds import LayerState
from dsv4.config import LayerKind
from dsv4.errors import CapacityError, KernelError
from dsv4.model.transformer import Transformer
from dsv4.ops.core.context import observe
from dsv4.ops.core.op import AnyOp, Arguments
from dsv4.ops.gemm.embed import embed
from dsv4.ops.gemm.linear import linear
from dsv4.ops.mhc.mix import Update, mhc_head
from dsv4.ops.sample.draft_rows import BLOCK
from dsv4.runner.forward import sample_tokens
from dsv4.tools.bench_ops import Ceilings, elapsed_us, measure_ceilings
from dsv4.tools.speed.model import (
    FilledState,
    decode_step,
    filled_state,
    random_model,
    shape_config,
    start_at,
    step_bytes,
)
from dsv4.tools.speed.profile import LayerTrace, Profile, middle_layers, profile_step

REPLAYS = 20


@dataclass(frozen=True)
class StepResult:
    what: str  # decode, prefill, or verify and the rows of each sequence
    shape: str
    layers: int
    batch: int  # sequences; for prefill 1
    context: int  # for prefill the tokens of the chunk
    ms: float
    spread_ms: float
    tokens_per_s: float
    gb_read: float
    floor_ms: float
    ratio: float
    full_layers: int
    full_ms: float  # scaled to all layers; embedding, head and sampling counted once
    rest_us: float  # those three alone
    experts_used: float = 0.0  # distinct ones per layer, on average
    kernels: int = 0
    kernels_of_layer: dict[str, float] = field(default_factory=dict)
    layer_us: dict[str, float] = field(default_factory=dict)  # by kind
    family_us: dict[str, float] = field(default_factory=dict)
    family_floor_us: dict[str, float] = field(default_factory=dict)
    weights: str = "nvfp4"
    position: int = 0  # where a prompt's tokens begin


class Bench:
    """One model in memory, for measuring steps of any batch and context."""

    def __init__(self, shape: str, layers: int | None, device: str, weights: str = "nvfp4") -> None:
        self.device = torch.device(device)
        self.shape, self.weights, self.config = shape, weights, shape_config(shape, layers)
        self.full = shape_config(shape, None)
        self.ceilings = cpu_ceilings() if self.device.type == "cpu" else measure_ceilings()
        give_back(self.device)
        try:
            self.model, self.sizes = random_model(self.config, self.device, weights)
        except torch.cuda.OutOfMemoryError as error:
            raise CapacityError(
                f"{self.config.num_layers} layers of {shape} do not fit the GPU; lower --layers"
            ) from error

    @torch.inference_mode()
    def decode(
        self, batch: int, context: int, traces: list[LayerTrace] | None = None
    ) -> StepResult:
        """`traces`: where to add one layer of each kind, kernel by kernel."""
        state = filled_state(self.config, batch, context, self.device)
        runs = {"all": self.model, **self._models_of_a_kind()}
        timed = {}
        for name, model in runs.items():
            layers = _layers_of(self.model, model, state.layers)
            timed[name] = self._time_decode(model, layers, state, batch, context)
        rest_us, rest_kernels = self._time_rest(state, batch)
        ms, spread, profile = timed["all"]
        start_at(state, max(context - 8, 0))
        visited = experts_used(
            lambda: decode_step(self.model, state.layers, state), self.config.num_experts
        )
        if traces is not None:
            facts = self.config.kinds, self.sizes, visited, self.ceilings.read_gbs
            traces += middle_layers(f"{self.shape}, {batch} x {context}", profile.spans, *facts)
        families = step_bytes(self.config, self.sizes, batch, context, visited)
        layer_us, layer_kernels = {}, {}
        for kind in self._kinds():
            kind_ms, _, kind_profile = timed[kind]
            count = self.config.num_layers_of(kind)
            layer_us[str(kind)] = round((kind_ms * 1e3 - rest_us) / count, 2)
            kernels = kind_profile.num_kernels - rest_kernels
            layer_kernels[str(kind)] = round(kernels / count, 2)
        return self.result(
            ("decode", batch, context, batch),
            (ms, spread, rest_us),
            families,
            0.0,
            experts_used=round(visited * self.config.num_experts, 1),
            kernels=profile.num_kernels,
            kernels_of_layer=layer_kernels,
            layer_us=layer_us,
            family_us={k: round(v, 1) for k, v in profile.share_us.items()},
        )

    @torch.inference_mode()
    def verify(self, batch: int, context: int, width: int, *, same: bool) -> StepResult:
        """A step with `width` rows per sequence: its newest token and drafts."""
        state = filled_state(self.config, batch, context, self.device, width=width)

        def step() -> None:
            decode_step(self.model, state.layers, state)

        start_at(state, max(context - BLOCK, 0), same=same)
        replay = captured(step, self.device)
        count = 1 if self.device.type == "cpu" else REPLAYS
        times = []
        for _ in range(3 if count > 1 else 1):
            replay()
            times.append(elapsed_ms(lambda: [replay() for _ in range(count)], self.device) / count)
        visited = experts_used(step, self.config.num_experts)
        families = step_bytes(self.config, self.sizes, batch * width, context, visited)
        return self.result(
            (f"verify {width}", batch, context, batch * width),
            (statistics.median(times), max(times) - min(times), self._time_rest(state, batch)[0]),
            families,
            0.0,
            experts_used=round(visited * self.config.num_experts, 1),
            kernels=profile_step(replay, self.device).num_kernels,
        )

    def result(
        self,
        case: tuple[str, int, int, int],
        times: tuple[float, float, float],
        families: dict[str, float],
        flops: float,
        **profile: Any,
    ) -> StepResult:
        what, batch, context, num_tokens = case
        ms, spread, rest_us = times
        num_bytes = sum(families.values())
        floor = self.ceilings.floor_us(num_bytes, flops) / 1e3
        full_ms = rest_us / 1e3 + (ms - rest_us / 1e3) * self.full.num_layers / len(
            self.model.blocks
        )
        return StepResult(
            what,
            self.shape,
            self.config.num_layers,
            batch,
            context,
            round(ms, 4),
            round(spread, 4),
            round(num_tokens / full_ms * 1e3, 1),
            round(num_bytes / 1e9, 6),
            round(floor, 4),
            round(ms / floor, 2),
            self.full.num_layers,
            round(full_ms, 4),
            round(rest_us, 2),
            family_floor_us={
                name: round(size / self.ceilings.read_gbs / 1e3, 1)
                for name, size in families.items()
            },
            weights=self.weights,
            **profile,
        )

    def _kinds(self) -> list[LayerKind]:
        return [kind for kind in ("swa", "csa", "hca") if self.config.num_layers_of(kind)]

    def _models_of_a_kind(self) -> dict[str, Transformer]:
        """Models with the same weights but only the layers of one kind."""
        models = {}
        for kind in self._kinds():
            part = copy.copy(self.model)
            chosen = zip(self.model.blocks, self.config.kinds, strict=True)
            part.blocks = [block for block, found in chosen if found == kind]
            models[str(kind)] = part
        return models

    def _time_decode(
        self,
        model: Transformer,
        layers: Sequence[LayerState],
        state: FilledState,
        batch: int,
        context: int,
    ) -> tuple[float, float, Profile]:
        start_at(state, max(context - 8, 0))
        step = captured(lambda: decode_step(model, layers, state), self.device)
        start = max(context - 4 * REPLAYS - 8, 0)
        start_at(state, start)
        count = 1 if self.device.type == "cpu" else REPLAYS
        times = []
        for _ in range(3 if count > 1 else 1):
            start_at(state, start)
            step()
            with no_waiting(self.device):
                step()
            times.append(elapsed_ms(lambda: [step() for _ in range(count)], self.device) / count)
        profile = profile_step(step, self.device)
        return statistics.median(times), max(times) - min(times), profile

    def _time_rest(self, state: FilledState, batch: int) -> tuple[float, int]:
        """Microseconds and kernels of embedding, head and sampling."""
        n = self.config.hc_mult
        post = torch.ones(batch, n, device=self.device)
        comb = torch.eye(n, device=self.device).repeat(batch, 1, 1)
        y = torch.randn(batch, self.config.hidden_size, device=self.device).bfloat16()
        update = Update(y, post, comb)

        def rest() -> None:
            model, buffers = self.model, state.buffers
            ids = buffers.token_ids[:batch]
            streams = embed(ids, model.embedding, model.config.hc_mult, model.dtype)
            h = mhc_head(streams, update, model.head_site)
            logits = linear(h, model.head, torch.float32)
            buffers.logits[:batch].copy_(logits)
            sample_tokens(buffers, batch)

        step = captured(rest, self.device)
        step()
        count = 1 if self.device.type == "cpu" else REPLAYS
        us = elapsed_ms(lambda: [step() for _ in range(count)], self.device) / count * 1e3
        return us, profile_step(step, self.device).num_kernels


def experts_used(step: Callable[[], object], num_experts: int) -> float:
    """The share of a layer's experts that a step visits, on average."""
    found: list[int] = []

    def watch(op: AnyOp, _: Arguments, run: Callable[[], Any]) -> Any:
        result = run()
        if op.name == "router":
            found.append(result[0].unique().numel())
        return result

    with observe(watch):
        step()
    return sum(found) / len(found) / num_experts


def compile_ahead(step: Callable[[], object], device: torch.device) -> None:
    """Compile the kernels of a step on all cores before it runs."""
    if device.type == "cuda":
        from dsv4.ops.core.compile_triton import compile_only

        with compile_only(os.cpu_count() or 1):
            step()


def give_back(device: torch.device) -> None:
    """Return cached memory to the GPU; models here fill it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], object]:
    """The step as a graph, compiled on all cores and run once; on a CPU the step itself."""
    compile_ahead(step, device)
    step()
    if device.type == "cpu":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Raise if the block waits for the GPU or allocates memory."""
    if device.type == "cpu":
        yield
        return
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    if after != before:
        raise KernelError(f"a replayed step took memory: {before} bytes before, {after} after")


def _layers_of(
    whole: Transformer, part: Transformer, state: Sequence[LayerState]
) -> list[LayerState]:
    kept = {id(block) for block in part.blocks}
    return [s for block, s in zip(whole.blocks, state, strict=True) if id(block) in kept]


def cpu_ceilings() -> Ceilings:
    """Rough ceilings for a trial without a GPU: one pass over 64 MB and one product."""
    data = torch.ones(16 << 20)
    read = elapsed_ms(lambda: data.sum(), torch.device("cpu"))
    square = torch.randn(512, 512)
    product = elapsed_ms(lambda: square @ square, torch.device("cpu"))
    return Ceilings(data.nbytes / read / 1e6, 2 * 512**3 / product / 1e9)


def elapsed_ms(action: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        action()
        return (time.perf_counter() - begin) * 1e3
    return elapsed_us(action) / 1e3


def bench_decode(
    shape: str,
    layers: int | None,
    batches: Sequence[int],
    contexts: Sequence[int],
    device: str,
    widths: Sequence[int] = (),
    same: bool = False,
    traces: list[LayerTrace] | None = None,
    weights: str = "nvfp4",
) -> Iterator[Ceilings | StepResult]:
    """`widths`: also steps with this many rows per sequence. `traces`: see `Bench.decode`."""
    bench = Bench(shape, layers, device, weights)
    yield bench.ceilings
    for context in contexts:
        for batch in batches:
            yield bench.decode(batch, context, traces)
            give_back(bench.device)
            for width in widths:
                yield bench.verify(batch, context, width, same=same)
                give_back(bench.device)
