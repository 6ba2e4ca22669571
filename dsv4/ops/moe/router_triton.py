# mypy: ignore-errors
"""`router` on a GPU: the gate's logits with split-K, then one program per row selects.

With few rows small programs write partial sums and the selecting program adds them; for a single
row that is the last program to finish, in the same launch. With many rows the gate runs as a
`linear` with the same ranges. The logits, and everything after them, have the same bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import depend
from dsv4.ops.core.launch import dependent_options, device_reason
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm import linear_triton
from dsv4.ops.gemm.dot_device import dot_bf16
from dsv4.ops.gemm.split_k import num_ranges
from dsv4.ops.moe.router import LEAST_TOTAL

FEW_ROWS = 64
LEAST = tl.constexpr(LEAST_TOTAL)
GATE_TILE = (16, 8)  # experts and rows per program of the variant for few rows


@triton.jit
def _scores(logits):
    """sqrt(softplus); its log1p keeps the precision of small values."""
    power = tl.exp(-tl.abs(logits))
    one_more = 1.0 + power
    difference = one_more - 1.0
    exact = difference == 0.0
    log1p = tl.log(one_more) * (power / tl.where(exact, 1.0, difference))
    return tl.sqrt_rn(tl.where(exact, power, log1p) + tl.maximum(logits, 0.0))


@triton.jit
def row_scores(partials, row, num_rows, num_experts, RANGES: tl.constexpr, BE: tl.constexpr):
    """fp32 `[BE]`: scores of the summed ranges of the gate's logits; 0 past the experts."""
    expert = tl.arange(0, BE)
    real = expert < num_experts
    logits = tl.zeros((BE,), dtype=tl.float32)
    for index in tl.static_range(RANGES):
        at = (index * num_rows + row) * num_experts + expert
        logits += tl.load(partials + at, mask=real, other=0.0)
    return tl.where(real, _scores(logits), 0.0)


@triton.jit
def row_bias(bias, num_experts, BE: tl.constexpr):
    """fp32 `[BE]`; loaded early, because it comes from memory."""
    expert = tl.arange(0, BE)
    return tl.load(bias + expert, mask=expert < num_experts, other=0.0).to(tl.float32)


@triton.jit
def best_places(scores, offset, num_experts, CHOSEN: tl.constexpr, BE: tl.constexpr):
    """Each expert's place among the chosen, ascending, or -1; and the sum of their scores. Ties go
    to the lower expert.

    Only integers are compared and counted, so there is no order of summation, and a warp reduces
    them in one instruction.
    """
    expert = tl.arange(0, BE)
    real = expert < num_experts
    ranked = tl.where(real, scores + offset, float("-inf")).to(tl.int32, bitcast=True)
    ranked = ranked ^ ((ranked >> 31) & 0x7FFFFFFF)  # integers ordered like the floats
    taken = expert < 0
    place = tl.zeros((BE,), dtype=tl.int32)
    for _ in tl.static_range(CHOSEN):
        best = tl.max(ranked, axis=0)
        first = tl.min(tl.where(ranked == best, expert, BE), axis=0)
        taken = taken | (expert == first)
        place += tl.where(first < expert, 1, 0)
        ranked = tl.where(expert == first, -(2**31), ranked)
    place = tl.where(taken, place, -1)
    total = tl.zeros((), tl.float32)
    for j in tl.static_range(CHOSEN):
        total += score_of(scores, place == j)
    return place, total + LEAST


@triton.jit
def score_of(scores, chosen):
    """The chosen expert's score: scores are non-negative, so their bits are ordered."""
    bits = tl.where(chosen, scores.to(tl.int32, bitcast=True), 0)
    return tl.max(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def table_pick(picks, scores, index, CHOSEN: tl.constexpr, BE: tl.constexpr):
    """The table's expert number `index`, its place in ascending order and its score."""
    expert = tl.arange(0, BE)
    pick = tl.load(picks + index)
    place = pick * 0
    for i in tl.static_range(CHOSEN):
        other = tl.load(picks + i)
        place += tl.where((other < pick) | ((other == pick) & (i < index)), 1, 0)
    return pick, place, score_of(scores, expert == pick)


@triton.jit
def table_total(picks, scores, CHOSEN: tl.constexpr, BE: tl.constexpr):
    expert = tl.arange(0, BE)
    total = tl.zeros((), tl.float32)
    for j in tl.static_range(CHOSEN):
        total += score_of(scores, expert == tl.load(picks + j))
    return total + LEAST


class GateTensors(NamedTuple):
    """Tensors of a router's kernels; only one of `bias` and `table` is read."""

    partials: torch.Tensor  # [ranges, rows, experts] logits
    bias: torch.Tensor
    table: torch.Tensor
    token_ids: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor


class GateSizes(NamedTuple):
    """Constants of a router's kernels."""

    ranges: int
    chosen: int
    hashed: bool
    be: int  # experts, padded


@triton.jit
def select_row(g, offset, row, num_rows, num_experts, scaling, G: tl.constexpr):
    """Sum the ranges of one row, score, select; stores experts in ascending order."""
    CHOSEN: tl.constexpr = G.chosen
    expert = tl.arange(0, G.be)
    scores = row_scores(g.partials, row, num_rows, num_experts, G.ranges, G.be)
    out = row * G.chosen
    token = tl.load(g.token_ids + row)
    if G.hashed:
        picks = g.table + tl.maximum(token, 0) * G.chosen
        total = table_total(picks, scores, G.chosen, G.be)
        for j in tl.static_range(CHOSEN):
            pick, place, score = table_pick(picks, scores, j, G.chosen, G.be)
            tl.store(g.chosen + out + place, tl.where(token < 0, -1, pick))
            tl.store(g.weights + out + place, score / total * scaling)
    else:
        place, total = best_places(scores, offset, num_experts, G.chosen, G.be)
        at = out + tl.maximum(place, 0)
        chosen = tl.where(token < 0, -1, expert.to(tl.int64))
        tl.store(g.chosen + at, chosen, mask=place >= 0)
        tl.store(g.weights + at, scores / total * scaling, mask=place >= 0)


@triton.jit
def gate_program(
    tile, split, row_tile, programs, x, x_stride, gate, counters, g, num_rows, num_columns,
    num_experts, total_steps, per_range, scaling, BM: tl.constexpr, BN: tl.constexpr,
    SELECT: tl.constexpr, EVEN_K: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """SELECT: the last program to finish selects for the only row."""
    BE: tl.constexpr = G.be
    rn = tile * BN + tl.arange(0, BN)
    rows = row_tile * BM + tl.arange(0, BM)
    live = rows < num_rows
    offset = tl.zeros((BE,), tl.float32)
    if SELECT and not G.hashed:
        offset = row_bias(g.bias, num_experts, BE)
    acc = dot_bf16(
        gate + tile.to(tl.int64) * BN * num_columns, rn < num_experts,
        x, rows * x_stride, live, split * per_range,
        tl.minimum((split + 1) * per_range, total_steps), num_columns, BN, BM, 6, EVEN_K,
    )  # fmt: skip
    at = (split * num_rows + rows)[None, :] * num_experts + rn[:, None]
    tl.store(g.partials + at, acc, mask=(rn < num_experts)[:, None] & live[None, :])
    if SELECT:
        tl.debug_barrier()  # all threads have stored before the counter is incremented
        if tl.atomic_add(counters, 1, sem="acq_rel") == programs - 1:
            tl.store(counters, 0)
            select_row(g, offset, 0, num_rows, num_experts, scaling, G)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(
    x, x_stride, gate, counters, g, num_rows, num_columns, num_experts, total_steps, per_range,
    scaling, BM: tl.constexpr, BN: tl.constexpr, SELECT: tl.constexpr, EVEN_K: tl.constexpr,
    G: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    depend(DEPENDENT)
    gate_program(
        tl.program_id(0), tl.program_id(1), tl.program_id(2),
        tl.num_programs(0) * tl.num_programs(1), x, x_stride, gate, counters, g, num_rows,
        num_columns, num_experts, total_steps, per_range, scaling, BM, BN, SELECT, EVEN_K, G,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _top_k_kernel(g, num_rows, num_experts, scaling, G: tl.constexpr, DEPENDENT: tl.constexpr):
    BE: tl.constexpr = G.be
    offset = tl.zeros((BE,), tl.float32)
    if not G.hashed:
        offset = row_bias(g.bias, num_experts, BE)
    depend(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    select_row(g, offset, row, num_rows, num_experts, scaling, G)


def supports(x, token_ids, by) -> str | None:
    gate, table = by.gate, by.table
    for name, value in (("x", x), ("gate", gate)):
        if value.dtype != torch.bfloat16 or value.stride(-1) != 1:
            return f"{name} is {value.dtype}, kernels read bfloat16 rows"
    if not gate.is_contiguous():
        return "gate is not contiguous"
    if table is not None and (table.dtype != torch.int64 or not table.is_contiguous()):
        return f"table is {table.dtype}, kernels read contiguous int64"
    if token_ids.dtype != torch.int64:
        return f"token_ids are {token_ids.dtype}, expected int64"
    if num_ranges(*gate.shape)[0] > 16:
        return f"a gate of {gate.shape[1]} columns has too many ranges"
    return device_reason(x.device)


def prepare(x, token_ids, by, ranges) -> tuple[GateTensors, GateSizes]:
    """Buffers for logits and results, the selection inputs, and the kernels' constants."""
    rows, num_experts, hashed = x.shape[0], by.gate.shape[0], by.table is not None
    logits = workspace(x.device, "router_logits", ranges * rows * num_experts, torch.float32)
    chosen = torch.empty(rows, by.num_chosen, dtype=torch.int64, device=x.device)
    weights = torch.empty(rows, by.num_chosen, dtype=torch.float32, device=x.device)
    bias, table = (token_ids, by.table) if hashed else (by.bias, token_ids)
    sizes = GateSizes(ranges, by.num_chosen, hashed, triton.next_power_of_2(num_experts))
    return GateTensors(logits, bias, table, token_ids, chosen, weights), sizes


def run(x, token_ids, by):
    num_rows, (num_experts, columns) = x.shape[0], by.gate.shape
    few = num_rows <= FEW_ROWS
    ranges, per_range = num_ranges(num_experts, columns) if few else (1, 0)
    tensors, sizes = prepare(x, token_ids, by, ranges)
    if few:
        bn, bm = GATE_TILE
        counters = workspace(x.device, "counters", 1, torch.int32)
        grid = (triton.cdiv(num_experts, bn), ranges, triton.cdiv(num_rows, bm))
        _gate_kernel[grid](
            x, x.stride(0), by.gate, counters, tensors, num_rows, columns, num_experts,
            triton.cdiv(columns, 128), per_range, by.scaling, BM=bm, BN=bn, SELECT=num_rows == 1,
            EVEN_K=columns % 128 == 0, G=sizes, **dependent_options(x.device, 1),
        )  # fmt: skip
    else:
        logits = tensors.partials[: num_rows * num_experts].view(num_rows, num_experts)
        linear_triton.launch(x, [by.gate], [logits])
    if num_rows > 1:
        _top_k_kernel[(num_rows,)](
            tensors, num_rows, num_experts, by.scaling, G=sizes,
            **dependent_options(x.device, 1, early=few),
        )  # fmt: skip
    return tensors.chosen, tensors.weights
