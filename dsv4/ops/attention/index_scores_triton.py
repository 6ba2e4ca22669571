# mypy: ignore-errors
"""`index_scores` on a GPU: a program per token and tile of BN entries.

The result has the page table's width, not the reference's, which depends on the data: columns
beyond what a token can see are -inf in both. Heads are summed in one tile shape, whatever the
batch.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.device import device_reason, interpreting, launch_options, start_dependents
from dsv4.ops.kv.entry_triton import (
    FP32,
    INDEX_FP4,
    index_tensors_reason,
    pool_format,
    pool_reason,
    pool_tensors,
)

RATIO = 4
BN = 128  # entries of a program

# four bytes -> four bf16, the E2M1 code of the low (high) half times 2^-126
_LOW = tl.constexpr(
    "{ .reg .b32 a, b; prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342; "
    "and.b32 a, a, 0x000F000F; and.b32 b, b, 0x000F000F; "
    "mul.lo.u32 a, a, 0x1040; mul.lo.u32 b, b, 0x1040; "
    "and.b32 $0, a, 0x81C081C0; and.b32 $1, b, 0x81C081C0; }"
)
_HIGH = tl.constexpr(
    "{ .reg .b32 a, b; prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342; "
    "shr.u32 a, a, 4; shr.u32 b, b, 4; and.b32 a, a, 0x000F000F; and.b32 b, b, 0x000F000F; "
    "mul.lo.u32 a, a, 0x1040; mul.lo.u32 b, b, 0x1040; "
    "and.b32 $0, a, 0x81C081C0; and.b32 $1, b, 0x81C081C0; }"
)


@triton.jit
def _e2m1(code, HIGH: tl.constexpr, ASM: tl.constexpr):
    """bf16 of one E2M1 number of each byte, times 2^-126."""
    if ASM:
        CODE: tl.constexpr = _HIGH if HIGH else _LOW
        return tl.inline_asm_elementwise(
            CODE, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    wide = code.to(tl.int16)
    wide = (wide >> 4) if HIGH else (wide & 15)
    return ((wide * 0x1040) & -32320).to(tl.bfloat16, bitcast=True)


@triton.jit
def _products(
    q, data, scale, q_at, slot, shown, live, H: tl.constexpr, DIM: tl.constexpr,
    BN: tl.constexpr, FORMAT: tl.constexpr, MT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """fp32 `[H, BN]`: query heads times keys."""
    zero = tl.zeros((H, BN), tl.float32)
    if FORMAT == 4:
        HALF: tl.constexpr = DIM // 2
        byte = tl.arange(0, HALF)
        code = tl.load(data + slot[:, None] * HALF + byte[None, :], mask=shown[:, None], other=0)
        group = tl.arange(0, DIM // 32)
        power = tl.load(
            scale + slot[:, None] * (DIM // 32) + group[None, :], mask=shown[:, None], other=127
        )
        # 2^(e + 63) as bf16: with the codes' 2^-126 a key is held times 2^-63
        factor = (tl.minimum(power.to(tl.int32) + 63, 254) << 7).to(tl.int16)
        factor = factor.to(tl.bfloat16, bitcast=True)
        factor = factor[:, :, None].broadcast_to(BN, DIM // 32, 16).reshape(BN, HALF)
        even = tl.load(q + q_at + 2 * byte[None, :], mask=live[:, None], other=0.0)
        odd = tl.load(q + q_at + 2 * byte[None, :] + 1, mask=live[:, None], other=0.0)
        low = _e2m1(code, False, ASM) * factor
        high = _e2m1(code, True, ASM) * factor
        if tl.float32 == MT:
            low = low.to(tl.float32)
            high = high.to(tl.float32)
            out = tl.dot(even, tl.trans(low), zero, input_precision="ieee")
            out = tl.dot(odd, tl.trans(high), out, input_precision="ieee")
        else:
            out = tl.dot(even, tl.trans(low), zero)
            out = tl.dot(odd, tl.trans(high), out)
        return out * 9223372036854775808.0  # 2^63
    channel = tl.arange(0, DIM)[None, :]
    x = tl.load(q + q_at + channel, mask=live[:, None], other=0.0).to(MT)
    mask = shown[:, None] & (channel >= 0)
    if FORMAT == 3:
        code = tl.load(data + slot[:, None] * DIM + channel, mask=mask, other=0)
        k = code.to(tl.float8e4nv, bitcast=True).to(MT)
    else:
        k = tl.load(data + slot[:, None] * DIM + channel, mask=mask, other=0.0).to(MT)
    if tl.float32 == MT:
        out = tl.dot(x, tl.trans(k), zero, input_precision="ieee")
    else:
        out = tl.dot(x, tl.trans(k), zero)
    if FORMAT == 3:
        out = out * tl.load(scale + slot, mask=shown, other=0.0)[None, :]
    return out


@triton.jit(do_not_specialize=["table_width"])
def _scores_kernel(
    q, weights, out, positions, seq_idx, data, scale, table, table_width, page_entries, width,
    num_heads, topk,
    H: tl.constexpr, DIM: tl.constexpr, BN: tl.constexpr, FORMAT: tl.constexpr,
    MT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    start_dependents(ASM)
    row = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BN + tl.arange(0, BN)
    visible = (tl.load(positions + row).to(tl.int32) + 1) // 4
    shown = entry < visible
    score = tl.where(shown, 0.0, float("-inf"))
    if (visible > topk) & (tl.program_id(0) * BN < visible):
        seq = tl.load(seq_idx + row).to(tl.int64)
        column = seq * table_width + (entry // page_entries) % table_width
        page = tl.load(table + column, mask=shown, other=0).to(tl.int64)
        slot = page * page_entries + entry % page_entries
        head = tl.arange(0, H)
        live = head < num_heads
        q_at = (row * num_heads + head)[:, None] * DIM
        products = _products(
            q, data, scale, q_at, slot, shown, live, H, DIM, BN, FORMAT, MT, ASM
        )  # fmt: skip
        weight = tl.load(weights + row * num_heads + head, mask=live, other=0.0).to(tl.float32)
        summed = tl.sum(tl.maximum(products, 0.0) * weight[:, None], axis=0)
        score = tl.where(shown, summed, float("-inf"))
    tl.store(out + row * width + entry, score, mask=entry < width)


def supports(q, weights, pool, table, batch, topk) -> str | None:
    if q.dtype not in (torch.float32, torch.bfloat16) or not q.is_contiguous():
        return f"q is {q.dtype} with strides {q.stride()}, not contiguous bfloat16 or float32"
    if not weights.is_contiguous():
        return f"weights have strides {weights.stride()}, kernels need them contiguous"
    if pool.dim & (pool.dim - 1) or pool.dim < 32:
        return f"index keys of {pool.dim} numbers, kernels need a power of two from 32 on"
    return (
        device_reason(q.device)
        or pool_reason(pool)
        or index_tensors_reason(table=table, positions=batch.positions, seq_idx=batch.seq_idx)
    )


def run(q, weights, pool, table, batch, topk):
    tokens, heads, dim = q.shape
    width = table.shape[1] * pool.page_entries
    fmt = pool_format(pool)
    out = torch.empty(tokens, width, dtype=torch.float32, device=q.device)
    data, _, scale = pool_tensors(pool)
    if q.dtype == torch.float32 or fmt == FP32:
        mt = tl.float32
    else:
        mt = tl.bfloat16 if fmt in (INDEX_FP4, 1) else tl.float16
    _scores_kernel[(triton.cdiv(width, BN), tokens)](
        q,
        weights,
        out,
        batch.positions,
        batch.seq_idx,
        data,
        scale,
        table,
        table.shape[1],
        pool.page_entries,
        width,
        heads,
        topk,
        H=max(16, triton.next_power_of_2(heads)),
        DIM=dim,
        BN=BN,
        FORMAT=fmt,
        MT=mt,
        ASM=not interpreting(),
        **launch_options(4),
    )
    return out
