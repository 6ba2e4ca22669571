# mypy: ignore-errors
"""`router` on a GPU: the gate's logits range by range of K, then one program per row selects.

With few rows small programs write the ranges side by side and the selecting program adds them;
with many the gate runs as a `linear`, whose ranges are the same. The logits, and so everything
after them, have the same bits either way.
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

FEW_ROWS = 64
GATE_TILE = (16, 8)  # experts and rows of one program of the form for few rows


@triton.jit
def _scores(logits):
    """sqrt(softplus); log1p is built so that small values keep their digits."""
    power = tl.exp(-tl.abs(logits))
    one_more = 1.0 + power
    difference = one_more - 1.0
    exact = difference == 0.0
    log1p = tl.log(one_more) * (power / tl.where(exact, 1.0, difference))
    return tl.sqrt_rn(tl.where(exact, power, log1p) + tl.maximum(logits, 0.0))


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(
    x, x_stride, gate, partials, num_rows, num_columns, num_experts, total_steps, per_range,
    BM: tl.constexpr, BN: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`partials` `[ranges, rows, experts]`."""
    await_previous(ASM)
    split = tl.program_id(1)
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(2) * BM + tl.arange(0, BM)
    live = rows < num_rows
    acc = dot_bf16(
        gate + tl.program_id(0).to(tl.int64) * BN * num_columns, rn < num_experts,
        x, rows * x_stride, live, split * per_range,
        tl.minimum((split + 1) * per_range, total_steps), num_columns, BN, BM, 6, EVEN_K,
    )  # fmt: skip
    release_next(ASM)
    at = (split * num_rows + rows)[None, :] * num_experts + rn[:, None]
    tl.store(partials + at, acc, mask=(rn < num_experts)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _choose_kernel(
    partials, bias, table, token_ids, chosen_at, weights_at, num_rows, num_experts, scaling,
    RANGES: tl.constexpr, CHOSEN: tl.constexpr, HASHED: tl.constexpr, BE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """One row: sum the ranges, score, select; results are stored in ascending order."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BE)
    real = expert < num_experts
    if not HASHED:
        offset = tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
    await_previous(ASM)
    release_next(ASM)
    logits = tl.zeros((BE,), dtype=tl.float32)
    for index in tl.static_range(RANGES):
        at = (index * num_rows + row) * num_experts + expert
        logits += tl.load(partials + at, mask=real, other=0.0)
    scores = tl.where(real, _scores(logits), 0.0)
    out = row * CHOSEN
    if HASHED:
        picks = table + tl.load(token_ids + row) * CHOSEN
        total = tl.sum(scores * 0.0)
        for j in tl.static_range(CHOSEN):
            total += tl.sum(tl.where(expert == tl.load(picks + j), scores, 0.0))
        for j in tl.static_range(CHOSEN):
            pick = tl.load(picks + j)
            score = tl.sum(tl.where(expert == pick, scores, 0.0))
            rank = pick * 0
            for i in tl.static_range(CHOSEN):
                other = tl.load(picks + i)
                rank += tl.where((other < pick) | ((other == pick) & (i < j)), 1, 0)
            tl.store(chosen_at + out + rank, pick)
            tl.store(weights_at + out + rank, score / total * scaling)
    else:
        ranked = tl.where(real, scores + offset, float("-inf"))
        taken = tl.zeros((BE,), dtype=tl.int32)
        for _ in tl.static_range(CHOSEN):
            best = tl.max(ranked, axis=0)
            first = tl.min(tl.where(ranked == best, expert, BE), axis=0)
            taken = tl.where(expert == first, 1, taken)
            ranked = tl.where(expert == first, float("-inf"), ranked)
        rank = tl.cumsum(taken, axis=0) - 1
        total = tl.sum(scores * 0.0)
        for j in tl.static_range(CHOSEN):  # one value each, so the order of the sum is fixed
            total += tl.sum(tl.where((taken == 1) & (rank == j), scores, 0.0))
        tl.store(chosen_at + out + rank, expert.to(tl.int64), mask=taken == 1)
        tl.store(weights_at + out + rank, scores / total * scaling, mask=taken == 1)


def choose_config(num_rows: int) -> str:
    """Which form of the gate runs."""
    return "ranges side by side" if num_rows <= FEW_ROWS else "linear"


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
    size = num_rows * num_experts
    asm = not interpreting()
    if num_rows <= FEW_ROWS:
        bn, bm = GATE_TILE
        logits = workspace(x.device, "router_logits", ranges * size, torch.float32)
        grid = (triton.cdiv(num_experts, bn), ranges, triton.cdiv(num_rows, bm))
        _gate_kernel[grid](
            x, x.stride(0), gate, logits, num_rows, columns, num_experts,
            triton.cdiv(columns, 128), per_range,
            BM=bm, BN=bn, EVEN_K=columns % 128 == 0, ASM=asm, **launch_options(1),
        )  # fmt: skip
    else:
        ranges = 1
        logits = workspace(x.device, "router_logits", size, torch.float32)
        linear_triton.launch(x, [gate], [logits[:size].view(num_rows, num_experts)])
    hashed = table is not None
    bias, table = (token_ids, table) if hashed else (bias, token_ids)  # one is not read
    _choose_kernel[(num_rows,)](
        logits, bias, table, token_ids, chosen, weights, num_rows, num_experts, scaling,
        RANGES=ranges, CHOSEN=num_chosen, HASHED=hashed,
        BE=triton.next_power_of_2(num_experts), ASM=asm, **launch_options(1),
    )  # fmt: skip
    return chosen, weights
