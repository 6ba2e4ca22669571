# mypy: ignore-errors
"""`index_scores` on a GPU: a program walks tiles of BN entries of a token.

The result has the page table's width, not the reference's, which depends on the data: columns
beyond what a token can see are -inf in both. Heads are summed in one tile shape, whatever the
batch.

On sm_100 FP8 and FP4 keys go to the tensor core as they are stored. A query has been rounded as
keys are, so its codes and power-of-two scales, found again here, are exact.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.device import (
    device_reason,
    interpreting,
    launch_options,
    native_reason,
)
from dsv4.ops.kv.entry_triton import (
    FP32,
    INDEX_FP4,
    INDEX_FP8,
    fp4_groups,
    fp8_groups,
    index_tensors_reason,
    pool_format,
    pool_reason,
    pool_tensors,
    power_of_two,
    scale_byte,
)

RATIO = 4
BN = 64  # entries of a tile; block-scaled products have 128
STAGES = 2
PROGRAMS = 528  # as many as run at once, four on a multiprocessor

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
def _by_thread(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of each 16 in another order, the same for keys and queries: a thread then multiplies
    four that lie side by side."""
    return x.reshape(ROWS, WIDTH // 16, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, WIDTH)


@triton.jit
def _queries(
    q, q_at, live, DIM: tl.constexpr, H: tl.constexpr, FORMAT: tl.constexpr, MT: tl.constexpr
):
    """Query heads `[H, DIM]`; for FP4 keys the even and the odd numbers apart."""
    x = tl.load(q + q_at + tl.arange(0, DIM)[None, :], mask=live[:, None], other=0.0).to(MT)
    even = _by_thread(x, H, DIM) if FORMAT == 3 else x
    odd = even
    if FORMAT == 4:
        even, odd = tl.split(x.reshape(H, DIM // 2, 2))
        even = _by_thread(even, H, DIM // 2)
        odd = _by_thread(odd, H, DIM // 2)
    return even, odd


@triton.jit
def _products(
    even, odd, data, scale, slot, H: tl.constexpr, DIM: tl.constexpr, BN: tl.constexpr,
    FORMAT: tl.constexpr, MT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """fp32 `[BN, H]`: keys (FP4: times 2^-63) times query heads; and the keys' factor `[BN]`."""
    own = tl.full((BN,), 1.0, tl.float32)
    zero = tl.zeros((BN, H), tl.float32)
    if FORMAT == 4:
        HALF: tl.constexpr = DIM // 2
        byte = tl.arange(0, HALF)
        code = _by_thread(tl.load(data + slot[:, None] * HALF + byte[None, :]), BN, HALF)
        group = tl.arange(0, DIM // 32)
        power = tl.load(scale + slot[:, None] * (DIM // 32) + group[None, :])
        # 2^(e + 63) as bf16: with the codes' 2^-126 a key is held times 2^-63
        factor = (tl.minimum(power.to(tl.int32) + 63, 254) << 7).to(tl.int16)
        factor = factor.to(tl.bfloat16, bitcast=True)
        factor = factor[:, :, None].broadcast_to(BN, DIM // 32, 16).reshape(BN, HALF)
        low = _e2m1(code, False, ASM) * factor
        high = _e2m1(code, True, ASM) * factor
        if tl.float32 == MT:
            low = low.to(tl.float32)
            high = high.to(tl.float32)
            out = tl.dot(low, tl.trans(even), zero, input_precision="ieee")
            out = tl.dot(high, tl.trans(odd), out, input_precision="ieee")
        else:
            out = tl.dot(low, tl.trans(even), zero)
            out = tl.dot(high, tl.trans(odd), out)
    else:
        k = tl.load(data + slot[:, None] * DIM + tl.arange(0, DIM)[None, :])
        if FORMAT == 3:
            k = _by_thread(k, BN, DIM).to(tl.float8e4nv, bitcast=True)
        k = k.to(MT)
        if tl.float32 == MT:
            out = tl.dot(k, tl.trans(even), zero, input_precision="ieee")
        else:
            out = tl.dot(k, tl.trans(even), zero)
        if FORMAT == 3:
            own = tl.load(scale + slot)
    return out, own


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
def _code_products(
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
    q, weights, out, positions, seq_idx, data, scale, table, table_width, width, num_heads, topk,
    PAGE: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr, BN: tl.constexpr, FORMAT: tl.constexpr,
    STAGES: tl.constexpr, MT: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tiles of one token, `tl.num_programs(0)` apart; columns that it cannot see get -inf."""
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
        q_at = (row * num_heads + head)[:, None] * DIM
        weight = tl.load(weights + row * num_heads + head, mask=live, other=0.0).to(tl.float32)
        if NATIVE:
            codes, q_scales, factor = _query_codes(q, q_at, live, H, DIM, FORMAT == 4)
            weight = weight * factor
        else:
            even, odd = _queries(q, q_at, live, DIM, H, FORMAT, MT)
            if FORMAT == 4:
                weight = weight * 9223372036854775808.0  # 2^63
        for tile in tl.range(first, tiles, apart, num_stages=STAGES):
            entry = tile * BN + lane
            seen = tl.minimum(entry, tl.minimum(visible, width) - 1)  # behind it are keys, too
            page = tl.load(table + seq * table_width + seen // PAGE).to(tl.int64)
            slot = page * PAGE + seen % PAGE
            if NATIVE:
                products, own = _code_products(
                    codes, q_scales, data, scale, slot, DIM, BN, H, FORMAT == 4
                )
            else:
                products, own = _products(even, odd, data, scale, slot, H, DIM, BN, FORMAT, MT, ASM)
            # scales are powers of two above zero: they may wait until the heads are summed
            score = tl.sum(tl.maximum(products, 0.0) * weight[None, :], axis=1) * own
            score = tl.where(entry < visible, score, float("-inf"))
            tl.store(out + entry, score, mask=entry < width)
        begin = first + tl.cdiv(tl.maximum(tiles - first, 0), apart) * apart
    for tile in tl.range(begin, tl.cdiv(width, BN), apart):
        entry = tile * BN + lane
        tl.store(out + entry, tl.where(entry < visible, 0.0, float("-inf")), mask=entry < width)


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


def native_form_reason(pool) -> str | None:
    """Why keys are not multiplied as they are stored, or None."""
    if pool_format(pool) not in (INDEX_FP8, INDEX_FP4) or pool.dim % 128:
        return f"{pool.dim} numbers in {pool.format}, expected FP8 or FP4 and a multiple of 128"
    return native_reason(pool.device)


def run(q, weights, pool, table, batch, topk, native=None):
    """`native`: whether keys are multiplied as stored; None: where the GPU can."""
    if native is None:
        native = not interpreting() and native_form_reason(pool) is None
    tokens, heads, dim = q.shape
    width = table.shape[1] * pool.page_entries
    fmt = pool_format(pool)
    out = torch.empty(tokens, width, dtype=torch.float32, device=q.device)
    data, _, scale = pool_tensors(pool)
    if q.dtype == torch.float32 or fmt == FP32:
        mt = tl.float32
    else:
        mt = tl.bfloat16 if fmt in (INDEX_FP4, 1) else tl.float16
    bn = 128 if native else BN
    programs = min(triton.cdiv(width, bn), max(1, PROGRAMS // max(tokens, 1)))
    _scores_kernel[(programs, tokens)](
        q,
        weights,
        out,
        batch.positions,
        batch.seq_idx,
        data,
        scale,
        table,
        table.shape[1],
        width,
        heads,
        topk,
        PAGE=pool.page_entries,
        H=max(16, triton.next_power_of_2(heads)),
        DIM=dim,
        BN=bn,
        FORMAT=fmt,
        STAGES=STAGES,
        MT=mt,
        NATIVE=native,
        ASM=not interpreting(),
        **launch_options(4),
    )
    return out
