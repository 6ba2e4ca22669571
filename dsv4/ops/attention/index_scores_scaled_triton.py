# mypy: ignore-errors
"""`index_scores` on sm_100: keys go to the tensor core as they are stored, FP8 or block-scaled FP4.

A query has been through `index_query`, which rounds it as keys are; so its codes and power-of-two
scales, found again here, are exact. A tile of 128 keys lies in the M slot, the heads in the N
slot: a thread gets all heads of a key and sums them alone. Walks tiles as index_scores_triton.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.attention import index_scores_triton
from dsv4.ops.device import interpreting, launch_options, native_reason, start_dependents
from dsv4.ops.kv.entry_triton import (
    INDEX_FP4,
    fp4_groups,
    fp8_groups,
    pool_format,
    pool_tensors,
    power_of_two,
    scale_byte,
)

BN = 128  # keys of a tile: the tensor core's M
STAGES = 3
PROGRAMS = 592  # as many as run at once, four on a multiprocessor


@triton.jit
def _query_codes(q, at, live, H: tl.constexpr, DIM: tl.constexpr, FP4: tl.constexpr):
    """Codes of the heads `[DIM, H]` (FP4: `[DIM / 2, H]` bytes), scale bytes, factor `[H]`."""
    x = tl.load(q + at + tl.arange(0, DIM)[None, :], mask=live[:, None], other=0.0)
    x = x.to(tl.float32)
    if FP4:
        codes, exponent = fp4_groups(x.reshape(H * (DIM // 32), 32))
        low, high = tl.split(codes.reshape(H, DIM // 2, 2))
        scales = scale_byte(exponent).to(tl.uint8).reshape(H, DIM // 32)
        return tl.trans((low | (high << 4)).to(tl.uint8)), scales, tl.full((H,), 1.0, tl.float32)
    else:
        codes, exponent = fp8_groups(x, live[:, None])
        return tl.trans(codes), exponent, power_of_two(scale_byte(exponent))


@triton.jit
def _key_products(
    codes, q_scales, data, scale, slot, DIM: tl.constexpr, BN: tl.constexpr, H: tl.constexpr,
    FP4: tl.constexpr,
):  # fmt: skip
    """fp32 `[BN, H]` without the factor of the heads, and that of the keys `[BN]`."""
    zero = tl.zeros((BN, H), tl.float32)
    if FP4:
        k = tl.load(data + slot[:, None] * (DIM // 2) + tl.arange(0, DIM // 2)[None, :])
        WORDS: tl.constexpr = DIM // 128  # four scale bytes each
        words = scale.to(tl.pointer_type(tl.int32)) + slot[:, None] * WORDS
        words = tl.load(words + tl.arange(0, WORDS)[None, :])
        halves = tl.join(words, words >> 16)
        both = tl.join(halves, halves >> 8)
        k_scales = (both & 255).to(tl.uint8).reshape(BN, DIM // 32)
        products = tl.dot_scaled(k, k_scales, "e2m1", codes, q_scales, "e2m1", zero)
        return products, tl.full((BN,), 1.0, tl.float32)
    else:
        k = tl.load(data + slot[:, None] * DIM + tl.arange(0, DIM)[None, :])
        products = tl.dot(k.to(tl.float8e4nv, bitcast=True), codes, zero)
        return products, tl.load(scale + slot)


@triton.jit(do_not_specialize=["table_width", "width"])
def _scores_kernel(
    q, weights, out, positions, seq_idx, data, scale, table, table_width, page_entries, width,
    num_heads, topk,
    H: tl.constexpr, DIM: tl.constexpr, BN: tl.constexpr, FP4: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tiles of one token, `tl.num_programs(0)` apart; columns that it cannot see get -inf."""
    start_dependents(ASM)
    first = tl.program_id(0)
    apart = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    visible = (tl.load(positions + row).to(tl.int32) + 1) // 4
    lane = tl.arange(0, BN)
    out += row * width
    tiles = tl.cdiv(tl.minimum(visible, width), BN)
    begin = first
    if visible > topk:
        seq = tl.load(seq_idx + row).to(tl.int64)
        head = tl.arange(0, H)
        live = head < num_heads
        codes, q_scales, factor = _query_codes(
            q, (row * num_heads + head)[:, None] * DIM, live, H, DIM, FP4
        )
        weight = tl.load(weights + row * num_heads + head, mask=live, other=0.0).to(tl.float32)
        weight = weight * factor
        for tile in tl.range(first, tiles, apart, num_stages=STAGES):
            entry = tile * BN + lane
            seen = tl.minimum(entry, visible - 1)  # what lies behind is a key, too
            column = seq * table_width + (seen // page_entries) % table_width
            page = tl.load(table + column).to(tl.int64)
            slot = page * page_entries + seen % page_entries
            products, own = _key_products(codes, q_scales, data, scale, slot, DIM, BN, H, FP4)
            # scales are powers of two above zero: they may wait until the heads are summed
            score = tl.sum(tl.maximum(products, 0.0) * weight[None, :], axis=1) * own
            score = tl.where(entry < visible, score, float("-inf"))
            tl.store(out + entry, score, mask=entry < width)
        begin = first + tl.cdiv(tl.maximum(tiles - first, 0), apart) * apart
    for tile in tl.range(begin, tl.cdiv(width, BN), apart):
        entry = tile * BN + lane
        tl.store(out + entry, tl.where(entry < visible, 0.0, float("-inf")), mask=entry < width)


def supports(q, weights, pool, table, batch, topk) -> str | None:
    if not pool.is_index or pool.format not in ("fp8", "fp4"):
        return f"index keys in {pool.format}, native products take FP8 and FP4"
    if pool.dim % 128:
        return f"index keys of {pool.dim} numbers, native products need multiples of 128"
    return native_reason(q.device) or index_scores_triton.supports(
        q, weights, pool, table, batch, topk
    )


def run(q, weights, pool, table, batch, topk):
    tokens, heads, dim = q.shape
    width = table.shape[1] * pool.page_entries
    out = torch.empty(tokens, width, dtype=torch.float32, device=q.device)
    data, _, scale = pool_tensors(pool)
    programs = min(triton.cdiv(width, BN), triton.cdiv(PROGRAMS, max(tokens, 1)))
    _scores_kernel[(programs, tokens)](
        q, weights, out, batch.positions, batch.seq_idx, data, scale, table, table.shape[1],
        pool.page_entries, width, heads, topk,
        H=max(16, triton.next_power_of_2(heads)), DIM=dim, BN=BN,
        FP4=pool_format(pool) == INDEX_FP4, STAGES=STAGES, ASM=not interpreting(),
        **launch_options(4),
    )  # fmt: skip
    return out
