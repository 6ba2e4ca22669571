# mypy: ignore-errors
"""`router` on a GPU. Few rows: one launch, whose last program sums the ranges and selects.

Many rows: the gate runs as a `linear` with the same ranges of K, then one program per row tile
selects. The logits, and so everything after them, have the same bits either way.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.device import (
    await_previous,
    device_reason,
    dot_bf16,
    interpreting,
    launch_options,
    num_ranges,
    release_next,
    workspace,
)
from dsv4.ops.gemm import linear_triton

FUSED_ROWS = 64
ROWS = 8  # of one selecting program
GATE_ROWS = 32  # experts of one program of the fused form


@triton.jit
def _scores(logits):
    """sqrt(softplus); log1p is built so that small values keep their digits."""
    power = tl.exp(-tl.abs(logits))
    one_more = 1.0 + power
    difference = one_more - 1.0
    exact = difference == 0.0
    log1p = tl.log(one_more) * (power / tl.where(exact, 1.0, difference))
    return tl.sqrt_rn(tl.where(exact, power, log1p) + tl.maximum(logits, 0.0))


@triton.jit
def _choose(
    logits, bias, table, token_ids, rows, live, chosen_at, weights_at, num_experts, scaling,
    CHOSEN: tl.constexpr, HASHED: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Experts and weights of the rows of `logits` `[BE, BM]`, stored in ascending order."""
    expert = tl.arange(0, BE)
    real = expert < num_experts
    scores = tl.where(real[:, None], _scores(logits), 0.0)
    out = rows.to(tl.int64) * CHOSEN
    total = tl.zeros((BM,), dtype=tl.float32)
    if HASHED:
        ids = tl.load(token_ids + rows, mask=live, other=0)
        for j in tl.static_range(CHOSEN):
            pick = tl.load(table + ids * CHOSEN + j, mask=live, other=0)
            total += tl.sum(tl.where(expert[:, None] == pick[None, :], scores, 0.0), axis=0)
        for j in tl.static_range(CHOSEN):
            pick = tl.load(table + ids * CHOSEN + j, mask=live, other=0)
            score = tl.sum(tl.where(expert[:, None] == pick[None, :], scores, 0.0), axis=0)
            rank = tl.zeros((BM,), dtype=tl.int32)
            for i in tl.static_range(CHOSEN):
                other = tl.load(table + ids * CHOSEN + i, mask=live, other=0)
                before = (other < pick) if i >= j else (other <= pick)
                rank += before.to(tl.int32)
            tl.store(chosen_at + out + rank, pick, mask=live)
            tl.store(weights_at + out + rank, score / total * scaling, mask=live)
    else:
        offset = tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
        ranked = tl.where(real[:, None], scores + offset[:, None], float("-inf"))
        taken = tl.zeros((BE, BM), dtype=tl.int32)
        for _ in tl.static_range(CHOSEN):
            best = tl.max(ranked, axis=0)
            first = tl.where(ranked == best[None, :], expert[:, None], BE)
            hit = expert[:, None] == tl.min(first, axis=0)[None, :]
            taken = tl.where(hit, 1, taken)
            ranked = tl.where(hit, float("-inf"), ranked)
        rank = tl.cumsum(taken, axis=0) - 1
        for j in tl.static_range(CHOSEN):
            place = (taken == 1) & (rank == j)
            total += tl.sum(tl.where(place, scores, 0.0), axis=0)
        for j in tl.static_range(CHOSEN):
            place = (taken == 1) & (rank == j)
            score = tl.sum(tl.where(place, scores, 0.0), axis=0)
            pick = tl.sum(tl.where(place, expert[:, None], 0), axis=0)
            tl.store(chosen_at + out + j, pick.to(tl.int64), mask=live)
            tl.store(weights_at + out + j, score / total * scaling, mask=live)


@triton.jit
def _router_kernel(
    x, x_stride, gate, bias, table, token_ids, chosen_at, weights_at, partials, counters,
    num_rows, num_columns, num_experts, scaling, total_steps, per_range,
    RANGES: tl.constexpr, CHOSEN: tl.constexpr, HASHED: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    await_previous(ASM)
    m_tile = tl.program_id(2)
    split = tl.program_id(1)
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = m_tile * BM + tl.arange(0, BM)
    live = rows < num_rows
    acc = dot_bf16(
        gate + tl.program_id(0).to(tl.int64) * BN * num_columns, rn < num_experts,
        x, rows * x_stride, live, split * per_range,
        tl.minimum((split + 1) * per_range, total_steps), num_columns, BN, BM, 4, EVEN_K,
    )  # fmt: skip
    release_next(ASM)
    lane = tl.arange(0, BM)
    base = partials + m_tile * (RANGES * BE * BM)
    own = split * (BE * BM) + rn[:, None] * BM + lane[None, :]
    tl.store(base + own, acc, mask=(rn < BE)[:, None] & (lane >= 0)[None, :])
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + m_tile, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) * RANGES - 1:
        tl.store(counters + m_tile, 0)
        expert = tl.arange(0, BE)
        inside = (expert < num_experts)[:, None] & (lane >= 0)[None, :]
        logits = tl.zeros((BE, BM), dtype=tl.float32)
        for index in tl.static_range(RANGES):
            at = index * (BE * BM) + expert[:, None] * BM + lane[None, :]
            logits += tl.load(base + at, mask=inside, other=0.0, cache_modifier=".cg")
        _choose(
            logits, bias, table, token_ids, rows, live, chosen_at, weights_at, num_experts,
            scaling, CHOSEN, HASHED, BE, BM,
        )  # fmt: skip


@triton.jit
def _choose_kernel(
    logits_at, bias, table, token_ids, chosen_at, weights_at, num_rows, num_experts, scaling,
    CHOSEN: tl.constexpr, HASHED: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    await_previous(ASM)
    release_next(ASM)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    live = rows < num_rows
    expert = tl.arange(0, BE)
    at = rows.to(tl.int64)[None, :] * num_experts + expert[:, None]
    inside = (expert < num_experts)[:, None] & live[None, :]
    logits = tl.load(logits_at + at, mask=inside, other=0.0)
    _choose(
        logits, bias, table, token_ids, rows, live, chosen_at, weights_at, num_experts, scaling,
        CHOSEN, HASHED, BE, BM,
    )  # fmt: skip


def choose_config(num_rows: int) -> str:
    return "fused" if num_rows <= FUSED_ROWS else "gate, then selection"


def supports(x, gate, bias, table, token_ids, num_chosen, scaling) -> str | None:
    reason = device_reason(x.device)
    if reason is not None:
        return reason
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
    return None


def run(x, gate, bias, table, token_ids, num_chosen, scaling):
    num_rows, (num_experts, columns) = x.shape[0], gate.shape
    chosen = torch.empty(num_rows, num_chosen, dtype=torch.int64, device=x.device)
    weights = torch.empty(num_rows, num_chosen, dtype=torch.float32, device=x.device)
    ranges, per_range = num_ranges(num_experts, columns)
    hashed = table is not None
    common = {
        "CHOSEN": num_chosen,
        "HASHED": hashed,
        "BE": triton.next_power_of_2(num_experts),
        "BM": ROWS,
        "ASM": not interpreting(),
        **launch_options(4),
    }
    bias, table = (token_ids, table) if hashed else (bias, token_ids)  # one is not read
    m_tiles = triton.cdiv(num_rows, ROWS)
    if num_rows > FUSED_ROWS:
        logits = workspace(x.device, "router_logits", num_rows * num_experts, torch.float32)
        logits = logits[: num_rows * num_experts].view(num_rows, num_experts)
        linear_triton.launch(x, [gate], [logits])
        _choose_kernel[(m_tiles,)](
            logits, bias, table, token_ids, chosen, weights, num_rows, num_experts, scaling,
            **common,
        )  # fmt: skip
        return chosen, weights
    partials = workspace(
        x.device, "router_partials", m_tiles * ranges * common["BE"] * ROWS, torch.float32
    )
    counters = workspace(x.device, "router_counters", m_tiles, torch.int32)
    _router_kernel[(triton.cdiv(num_experts, GATE_ROWS), ranges, m_tiles)](
        x, x.stride(0), gate, bias, table, token_ids, chosen, weights, partials, counters,
        num_rows, columns, num_experts, scaling, triton.cdiv(columns, 128), per_range,
        RANGES=ranges, BN=GATE_ROWS, EVEN_K=columns % 128 == 0, **common,
    )  # fmt: skip
    return chosen, weights
