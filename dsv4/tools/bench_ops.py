"""Times the weight ops at V4-Flash and V4-Pro sizes, against floors measured in the same run.

A floor is the larger of bytes over read bandwidth and operations over the matrix rate. Each op is
captured into a graph that rotates through several sets of inputs, together larger than the cache;
the graph's replays are timed.
"""

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib import metadata
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.errors import OptionError
from dsv4.ops.core.gpu import describe
from dsv4.ops.gemm.embed import embed
from dsv4.ops.gemm.grouped_linear import grouped_linear
from dsv4.ops.gemm.linear import linear_multi
from dsv4.ops.gemm.weights.a8 import A8Mxfp4, padded_rows
from dsv4.ops.gemm.weights.tiled import TiledMxfp4, TiledNvfp4
from dsv4.ops.moe.experts import Experts, experts_ffn
from dsv4.ops.moe.router import Gate, router
from dsv4.tools.predict import (
    BF16_BYTES,
    MXFP4_BYTES,
    NVFP4_BYTES,
    SHAPES,
    ModelShape,
    embed_cost,
    experts_cost,
    grouped_cost,
    linear_cost,
    router_cost,
)

ROTATED_BYTES = 300 << 20  # several times the L2 cache
Call = Callable[[], object]
DEFAULT_TOKENS = (1, 8, 32, 128, 8192)


@dataclass(frozen=True)
class Ceilings:
    read_gbs: float
    matrix_tflops: float

    def floor_us(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.read_gbs / 1e3, flops / self.matrix_tflops / 1e6)


@dataclass(frozen=True)
class OpBenchmark:
    """One op at one size: calls over rotated inputs, and what a call must move and compute."""

    op: str
    shape: str
    tokens: int
    calls: list[Call]
    num_bytes: float
    flops: float


@dataclass(frozen=True)
class Result:
    op: str
    shape: str
    tokens: int
    median_us: float
    spread_us: float
    bytes: float
    gbs: float
    tflops: float
    floor_us: float
    ratio: float


def random_fp4(
    rows: int,
    columns: int,
    count: int | None = None,
    paired: bool = False,
    device: torch.device | str = "cuda",
    *,
    mx: bool = False,
) -> Any:
    """Random bits are valid weights; scales near one keep results finite. `mx`: MXFP4 instead."""
    lead = () if count is None else (count,)
    grid = (*lead, ceil(rows / 128) * 2, ceil(columns / 128))
    words = torch.randint(-(2**15), 2**15, (*grid, 2, 64, 16), dtype=torch.int16, device=device)
    codes, most = ((240, 243), 4) if mx else ((168, 184), 8)
    bytes_ = torch.randint(*codes, (*grid, 64, most), dtype=torch.uint8, device=device)
    factor = torch.full((*lead, 1), 2.0**-6 if mx else 0.02, device=device)
    kind = TiledMxfp4 if mx else TiledNvfp4
    return kind(words, bytes_.view(torch.int16), factor, rows, columns, paired)


def random_a8_mxfp4(
    rows: int, columns: int, count: int, paired: bool, device: torch.device | str = "cuda"
) -> A8Mxfp4:
    """Experts as sm_90 multiplies them with FP8 rows."""
    grid = (count, padded_rows(rows, paired) // 64, ceil(columns / 128), 64)
    words = torch.randint(-(2**31), 2**31 - 1, (*grid, 16), dtype=torch.int32, device=device)
    shifts = torch.randint(0, 6, (*grid, 4), dtype=torch.uint8, device=device).view(torch.int32)
    factor = torch.full((count,), 2.0**-12, device=device)
    return A8Mxfp4(words, shifts[..., 0].contiguous(), factor, rows, columns, paired)


def _rotate(num_bytes: float) -> int:
    return max(2, min(24, ceil(ROTATED_BYTES / num_bytes)))


def _rows(tokens: int, size: int) -> Tensor:
    return torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16)


def linear_work(
    name: str, shape: str, tokens: int, sizes: list[int], columns: int, *, dense: bool = False
) -> OpBenchmark:
    cost = linear_cost(tokens, sum(sizes), columns, BF16_BYTES if dense else NVFP4_BYTES)
    calls: list[Call] = []
    for _ in range(_rotate(cost.num_bytes)):
        x = _rows(tokens, columns)
        if dense:
            weights = [torch.randn(n, columns, device="cuda").bfloat16() for n in sizes]
        else:
            weights = [random_fp4(n, columns) for n in sizes]
        calls.append(lambda x=x, weights=weights: linear_multi(x, weights))  # type: ignore[misc]
    return OpBenchmark(name, shape, tokens, calls, cost.num_bytes, cost.flops)


def grouped_work(shape: ModelShape, tokens: int) -> OpBenchmark:
    columns, rows = shape.heads * shape.head_dim // shape.groups, shape.groups * shape.o_rank
    cost = grouped_cost(shape, tokens)
    calls: list[Call] = []
    for _ in range(_rotate(cost.num_bytes)):
        x = _rows(tokens, shape.groups * columns).view(tokens, shape.groups, columns)
        weight = random_fp4(rows, columns)
        calls.append(lambda x=x, weight=weight: grouped_linear(x, weight))  # type: ignore[misc]
    return OpBenchmark("wo_a", shape.name, tokens, calls, cost.num_bytes, cost.flops)


def random_routing(shape: ModelShape, tokens: int) -> tuple[Tensor, Tensor]:
    scores = torch.rand(tokens, shape.num_experts, device="cuda")
    experts = scores.topk(shape.chosen, dim=1).indices.sort(1).values
    return experts, torch.rand(tokens, shape.chosen, device="cuda")


@dataclass(frozen=True)
class ExpertWeights:
    w13: Any
    w2: Any
    shared: list[tuple[Any, Any]]


def expert_weights(shape: ModelShape, *, mx: bool = False) -> ExpertWeights:
    size, inner, count = shape.hidden, shape.inner, shape.num_experts
    shared = [
        (random_fp4(2 * inner, size, paired=True, mx=mx), random_fp4(size, inner, mx=mx))
        for _ in range(6)
    ]
    w13 = random_fp4(2 * inner, size, count, paired=True, mx=mx)
    return ExpertWeights(w13, random_fp4(size, inner, count, mx=mx), shared)


def experts_work(
    shape: ModelShape,
    tokens: int,
    weights: ExpertWeights,
    *,
    shared: bool,
    configs: dict[str, Any] | None = None,
) -> OpBenchmark:
    """With or without the shared expert; other libraries are timed without it."""
    from dsv4.ops.moe import experts_triton  # needs Triton, which a CPU does not

    calls: list[Call] = []
    distinct = []
    for index in range(6):
        x = _rows(tokens, shape.hidden) * 0.1
        experts, routing = random_routing(shape, tokens)
        distinct.append(int((experts.flatten().bincount() > 0).sum()))
        w13, w2 = weights.shared[index]

        def call(
            x: Tensor = x, e: Tensor = experts, r: Tensor = routing, w13: Any = w13, w2: Any = w2
        ) -> object:
            by: Any = Experts(weights.w13, weights.w2, w13, w2, 10.0)
            if shared and configs is None:
                return experts_ffn(x, e, r, by)
            if not shared:
                by = replace(by, shared_w13=None, shared_w2=None)
            return experts_triton.launch(x, e, r, by, **configs or {})

        calls.append(call)
    is_mx = isinstance(weights.w2, TiledMxfp4)
    cost = experts_cost(
        shape,
        tokens,
        statistics.mean(distinct),
        shared=shared,
        weight_bytes=MXFP4_BYTES if is_mx else NVFP4_BYTES,
    )
    name = ("experts+shared" if shared else "experts") + (" mxfp4" if is_mx else "")
    return OpBenchmark(name, shape.name, tokens, calls, cost.num_bytes, cost.flops)


def router_work(shape: ModelShape, tokens: int) -> OpBenchmark:
    calls: list[Call] = []
    cost = router_cost(shape, tokens)
    for _ in range(_rotate(cost.num_bytes)):
        x = _rows(tokens, shape.hidden)
        gate = torch.randn(shape.num_experts, shape.hidden, device="cuda").bfloat16() * 0.02
        bias = torch.randn(shape.num_experts, device="cuda")
        ids = torch.zeros(tokens, dtype=torch.int64, device="cuda")

        def call(x: Tensor = x, gate: Tensor = gate, bias: Tensor = bias, i: Tensor = ids) -> Any:
            return router(x, i, Gate(gate, bias, None, shape.chosen, 1.5))

        calls.append(call)
    return OpBenchmark("router", shape.name, tokens, calls, cost.num_bytes, cost.flops)


def embed_work(shape: ModelShape, tokens: int) -> OpBenchmark:
    table = torch.randn(shape.vocabulary, shape.hidden, device="cuda", dtype=torch.bfloat16)
    calls: list[Call] = []
    for _ in range(8):
        ids = torch.randint(0, shape.vocabulary, (tokens,), device="cuda")
        calls.append(lambda ids=ids: embed(ids, table, 4, torch.bfloat16))  # type: ignore[misc]
    return OpBenchmark("embed", shape.name, tokens, calls, embed_cost(shape, tokens).num_bytes, 0.0)


def all_work(
    shape: ModelShape, tokens: Sequence[int], only: str = ""
) -> list[Callable[[], OpBenchmark]]:
    """Every weight op at one model's sizes; each entry allocates its own weights when called."""
    h, heads = shape.hidden, shape.heads * shape.head_dim
    csa = shape.csa_inputs
    plans: list[tuple[str, Callable[[int], OpBenchmark]]] = [
        ("csa inputs", lambda t: linear_work("csa inputs", shape.name, t, csa, h)),
        ("wq_b", lambda t: linear_work("wq_b", shape.name, t, [heads], shape.q_rank)),
        ("wo_a", lambda t: grouped_work(shape, t)),
        (
            "wo_b",
            lambda t: linear_work("wo_b", shape.name, t, [h], shape.groups * shape.o_rank),
        ),
        (
            "shared gate/up",
            lambda t: linear_work("shared gate/up", shape.name, t, [2 * shape.inner], h),
        ),
        ("router", lambda t: router_work(shape, t)),
        ("embed", lambda t: embed_work(shape, t)),
        (
            "head",
            lambda t: linear_work(
                "head", shape.name, min(t, 128), [shape.vocabulary], h, dense=True
            ),
        ),
    ]
    works: list[Callable[[], OpBenchmark]] = [
        partial(plan, count)
        for name, plan in plans
        if only in name
        for count in tokens
        if name != "head" or count <= 128
    ]
    for name, mx in (("experts", False), ("experts mxfp4", True)):
        if only not in name:
            continue
        weights = cache(partial(expert_weights, shape, mx=mx))

        def make_experts(count: int, shared: bool, weights: Any = weights) -> OpBenchmark:
            return experts_work(shape, count, weights(), shared=shared)

        for count in tokens:
            works += [partial(make_experts, count, False), partial(make_experts, count, True)]
    return works


def num_results(shapes: Iterable[str], tokens: Sequence[int], only: str = "") -> int:
    """How many results `bench_ops` will yield."""
    return sum(len(all_work(SHAPES[name], tokens, only)) for name in shapes if name in SHAPES)


def time_calls(
    calls: list[Call], repeats: int = 15, budget_us: float = 3000.0
) -> tuple[float, float]:
    """Microseconds per call: median and spread (max - min) over graph replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    first = elapsed_us(lambda: [call() for call in calls]) / len(calls)
    rounds = max(1, int(budget_us / (first * len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(2):
        graph.replay()
    times = [elapsed_us(graph.replay) / (rounds * len(calls)) for _ in range(repeats)]
    del graph
    return statistics.median(times), max(times) - min(times)


def elapsed_us(action: Callable[[], object]) -> float:
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stop: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    action()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def measure_ceilings() -> Ceilings:
    """Read bandwidth over 4 GB, or an eighth of what is free, and a large bf16 product on random
    data."""
    from dsv4.tools import bandwidth_triton  # needs Triton, which a CPU does not

    size = min(1 << 30, torch.cuda.mem_get_info()[0] // 8 // 4)
    data = torch.randint(0, 100, (size,), dtype=torch.int32, device="cuda")
    programs = 8 * describe(data.device).multiprocessors
    out = torch.empty(programs, dtype=torch.int32, device="cuda")
    read_us, _ = time_calls([lambda: bandwidth_triton.read(data, out)])
    gbs = data.nbytes / read_us / 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_us, _ = time_calls([lambda: a @ b], budget_us=20000.0)
    return Ceilings(gbs, 2 * 8192**3 / product_us / 1e6)


def measure(work: OpBenchmark, ceilings: Ceilings) -> Result:
    median, spread = time_calls(work.calls)
    floor = ceilings.floor_us(work.num_bytes, work.flops)
    return Result(
        work.op,
        work.shape,
        work.tokens,
        round(median, 2),
        round(spread, 2),
        work.num_bytes,
        round(work.num_bytes / median / 1e3, 1),
        round(work.flops / median / 1e6, 1),
        round(floor, 2),
        round(median / floor, 2),
    )


def bench_ops(
    shapes: Iterable[str], tokens: Sequence[int], only: str = ""
) -> Iterator[Ceilings | Result]:
    """Yields the ceilings, then one result per op, shape and token count."""
    if not torch.cuda.is_available():
        raise OptionError("no CUDA device was found; --predict h200 lists floors without one")
    ceilings = measure_ceilings()
    yield ceilings
    for name in shapes:
        if name not in SHAPES:
            raise OptionError(f"shape {name!r}, expected one of {', '.join(SHAPES)}")
        for make in all_work(SHAPES[name], tokens, only):
            work = make()
            yield measure(work, ceilings)
            work.calls.clear()
            torch.cuda.empty_cache()


def run_facts() -> dict[str, Any]:
    """Facts about the run that every record includes."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "python": platform.python_version(),
        "command": " ".join(Path(part).name if "/" in part else part for part in sys.argv),
    }


def write_record(path: Path, rows: list[Ceilings | Result]) -> None:
    """One JSON object per line: the facts, the ceilings, the results."""
    lines = [json.dumps({"run": run_facts()})]
    for row in rows:
        kind = "ceilings" if isinstance(row, Ceilings) else "result"
        lines.append(json.dumps({kind: asdict(row)}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
