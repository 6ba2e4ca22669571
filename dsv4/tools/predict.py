"""The bytes and operations of the ops, and the time floor that published rates imply.

A floor is the larger of bytes over memory bandwidth and operations over the tensor cores' rate.
Weights, state, inputs and outputs count once; intermediate results of an op do not. For a GPU that
was not available, the floor is only a prediction: no kernel was run there.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dsv4.errors import OptionError
from dsv4.formats.spec import WIDTHS, Activations
from dsv4.runner.ranks.cluster import HERE, GpuRates, gpu_rates

MEASURED = Path(__file__).parent / "measured_ops.json"  # from the records, by scripts/make_docs.py
NVFP4_BYTES = 0.5625  # per weight, including its scale
MXFP4_BYTES = 17 / 32
BF16_BYTES = 2.0
KEY_BYTES, INDEX_BYTES, INDEX_WIDTH, WINDOW = 584, 68, 64 * 128, 128  # FP8 keys, FP4 index keys
MOST_DECODED = 128  # token counts up to this are one token per sequence


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one model that the ops need."""

    name: str
    hidden: int
    inner: int
    num_experts: int
    q_rank: int
    heads: int
    groups: int
    vocabulary: int = 129280
    chosen: int = 6
    head_dim: int = 512
    o_rank: int = 1024
    topk: int = 512

    @property
    def csa_inputs(self) -> list[int]:
        """Rows of the matrices that read a CSA layer's input: query, key, then the
        compressor's and the indexer's, which never round their input."""
        return [self.q_rank, 512, 1024, 1024, 256, 256]


SHAPES = {
    "flash": ModelShape("flash", 4096, 2048, 256, 1024, 64, 8),
    "pro": ModelShape("pro", 7168, 3072, 384, 1536, 128, 16, topk=1024),
}


SOURCE = "as published, dense, quoted at second hand"
MEASURED_HERE = "from what doctor measured on this machine"


@dataclass(frozen=True)
class OpCost:
    """What one call must move and compute. Operations: `rounding` with inputs of reduced
    precision, `fixed` in bf16."""

    num_bytes: float
    rounding: float = 0.0
    fixed: float = 0.0

    @property
    def flops(self) -> float:
        return self.rounding + self.fixed

    def floor_us(self, gpu: GpuRates, width: Activations) -> float:
        products = self.rounding / gpu.rate(int(width[1:])) + self.fixed / gpu.tflops
        return max(self.num_bytes / gpu.read_gbs / 1e3, products / 1e6)


def linear_cost(tokens: int, rows: int, columns: int, weight: float = NVFP4_BYTES) -> OpCost:
    num_bytes = rows * columns * weight + 2.0 * tokens * (columns + rows)
    return OpCost(num_bytes, 2.0 * tokens * rows * columns)


def grouped_cost(shape: ModelShape, tokens: int) -> OpCost:
    width, rows = shape.heads * shape.head_dim, shape.groups * shape.o_rank
    columns = width // shape.groups
    num_bytes = rows * columns * NVFP4_BYTES + 2.0 * tokens * (width + rows)
    return OpCost(num_bytes, 2.0 * tokens * rows * columns)


def experts_cost(
    shape: ModelShape,
    tokens: int,
    visited: float,
    *,
    shared: bool,
    weight_bytes: float = NVFP4_BYTES,
) -> OpCost:
    """`visited`: the number of distinct experts that the tokens chose."""
    extra = 1 if shared else 0
    one = 3 * shape.hidden * shape.inner
    num_bytes = (visited + extra) * one * weight_bytes + 4.0 * tokens * shape.hidden
    return OpCost(num_bytes, 2.0 * tokens * (shape.chosen + extra) * one)


def router_cost(shape: ModelShape, tokens: int) -> OpCost:
    num_bytes = (shape.num_experts + tokens) * shape.hidden * BF16_BYTES
    return OpCost(num_bytes, 0.0, 2.0 * tokens * shape.num_experts * shape.hidden)


def embed_cost(shape: ModelShape, tokens: int) -> OpCost:
    return OpCost(tokens * shape.hidden * 10.0, 0.0)


def expected_experts(shape: ModelShape, tokens: int) -> float:
    """Expected number of distinct experts under random routing."""
    missed = (1 - shape.chosen / shape.num_experts) ** tokens
    return shape.num_experts * (1 - missed)


def op_costs(shape: ModelShape, tokens: int) -> Iterator[tuple[str, OpCost]]:
    """The ops of a model, under their names in benchmarks."""
    h, low = shape.hidden, shape.groups * shape.o_rank
    inputs = linear_cost(tokens, sum(shape.csa_inputs), h)
    rounding = 2.0 * tokens * h * sum(shape.csa_inputs[:2])
    yield "csa inputs", OpCost(inputs.num_bytes, rounding, inputs.flops - rounding)
    yield "wq_b", linear_cost(tokens, shape.heads * shape.head_dim, shape.q_rank)
    yield "wo_a", grouped_cost(shape, tokens)
    yield "wo_b", linear_cost(tokens, h, low)
    yield "shared gate/up", linear_cost(tokens, 2 * shape.inner, h)
    yield "router", router_cost(shape, tokens)
    yield "embed", embed_cost(shape, tokens)
    yield "mhc_boundary", OpCost(tokens * h * 20.0 + 24 * 4 * h * 4.0)
    if tokens <= MOST_DECODED:
        yield from _decode_sizes(shape, tokens)
        head = linear_cost(tokens, shape.vocabulary, h, BF16_BYTES)
        yield "head", OpCost(head.num_bytes, 0.0, head.flops)
    visited = expected_experts(shape, tokens)
    yield "experts+shared", experts_cost(shape, tokens, visited, shared=True)


def _decode_sizes(shape: ModelShape, tokens: int) -> Iterator[tuple[str, OpCost]]:
    """Ops on the sequence state, one new token per sequence; contexts of 128k where named."""
    for name, entries in (("attention csa", shape.topk), ("attention hca 128k", 1024)):
        seen, queries = entries + WINDOW, shape.heads * shape.head_dim
        moved = tokens * (seen * KEY_BYTES + queries * 4.0)
        products = 2.0 * tokens * seen * queries  # with keys; values take the same again
        yield name, OpCost(moved, fixed=2 * products)
    keys = tokens * 131072 / 4
    scores = OpCost(keys * (INDEX_BYTES + 4.0), fixed=keys * INDEX_WIDTH * 2.0)
    yield "index_scores 128k", scores
    yield "index_select 32k", OpCost(tokens * 32768 * 4.0)
    yield "sample", OpCost(tokens * shape.vocabulary * 8.0)


# Kernel launches per call with a4 activations, from this many tokens on; counted for Flash by
# tests/tools/test_predict.py, which fails when they change.
LAUNCHES: dict[str, dict[int, int]] = {
    "csa inputs": {1: 3, 128: 4, 1024: 8},
    "wq_b": {1: 2},
    "wo_a": {1: 2},
    "wo_b": {1: 2},
    "shared gate/up": {1: 2},
    "router": {1: 1, 2: 2},
    "embed": {1: 1},
    "mhc_boundary": {1: 2, 65: 3},
    "attention csa": {1: 2, 61: 1},
    "attention hca 128k": {1: 2, 34: 1},
    "index_scores 128k": {1: 1},
    "index_select 32k": {1: 2},
    "sample": {1: 5},
    "head": {1: 1},
    "experts+shared": {1: 10, 171: 11},
}


def launches(op: str, tokens: int) -> int:
    return next(n for least, n in reversed(LAUNCHES[op].items()) if tokens >= least)


@dataclass(frozen=True)
class Prediction:
    op: str
    shape: str
    tokens: int
    bytes: float
    operations: float
    launches: int
    floor_us: dict[Activations, float]
    bound: str  # what determines the floor at a4
    measured_us: float | None  # on the H200 of the record, activations in bf16
    note: str = "predicted, not run"


def predict(
    gpu: str, shapes: Iterable[str], tokens: Iterable[int], only: str = ""
) -> Iterator[Prediction]:
    chip, counts = gpu_rates(gpu, "predict"), list(tokens)
    measured = measured_ops()[1]
    for name in shapes:
        if name not in SHAPES:
            raise OptionError(f"shape {name!r}, expected one of {', '.join(SHAPES)}")
        for count in counts:
            for op, cost in op_costs(SHAPES[name], count):
                if only not in op:
                    continue
                floors = {width: round(cost.floor_us(chip, width), 2) for width in WIDTHS}
                memory_us = cost.num_bytes / chip.read_gbs / 1e3
                yield Prediction(
                    op,
                    name,
                    count,
                    cost.num_bytes,
                    cost.flops,
                    launches(op, count),
                    floors,
                    "memory" if cost.floor_us(chip, "a4") <= memory_us else "tensor cores",
                    measured.get((op, name, count)),
                )


def measured_ops(path: Path = MEASURED) -> tuple[str, dict[tuple[str, str, int], float]]:
    """The newest record's name, and H200 microseconds by op, shape and tokens."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["record"], {(op, shape, n): us for op, shape, n, us in found["median_us"]}


def to_json(rows: Iterable[Prediction], gpu: str) -> Iterator[str]:
    chip = gpu_rates(gpu, "predict")
    facts = {
        **asdict(chip),
        "source": MEASURED_HERE if gpu == HERE else SOURCE,
        "note": "predicted, not run",
        "h200_record": measured_ops()[0],
    }
    yield json.dumps({"prediction_for": facts})
    yield from (json.dumps({"prediction": asdict(row)}) for row in rows)
