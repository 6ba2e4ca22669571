# mypy: ignore-errors
"""Device code for products: reads weights in each format and adds up the ranges of K.

The summation order over K belongs to the weight: K is split into *ranges* (`split_k.py`), each
summed separately, and ranges are added in ascending order. Every variant of a kernel (few rows or
many) keeps that order, so a row's bits are always the same.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import append, from_e4m3

# Each lane of a 32-bit register is one int16 word; the result's lanes are bf16.
_SLOT0 = tl.constexpr("and.b32 $0, $1, 0x81C081C0;")
_SLOT1 = tl.constexpr("{ .reg .b32 u; shl.b32 u, $1, 3; and.b32 $0, u, 0x81C081C0; }")
_SLOT2 = tl.constexpr("{ .reg .b32 u; shl.b32 u, $1, 6; and.b32 $0, u, 0x81C081C0; }")
_SLOT3 = tl.constexpr(
    "{ .reg .b32 u; shr.u32 u, $1, 7; and.b32 u, u, 0x00D800D8; "
    "mul.lo.u32 u, u, 0x821; and.b32 $0, u, 0x81C081C0; }"
)
# the first and third (or second and fourth) of four 8-bit codes in a register, as two bf16
_LOW_CODES = tl.constexpr(
    "{ .reg .b32 u; shl.b32 u, $1, 4; lop3.b32 $0, u, 0x0FF00FF0, 0x70007000, 0xEA; }"
)
_HIGH_CODES = tl.constexpr(
    "{ .reg .b32 u; shr.u32 u, $1, 4; lop3.b32 $0, u, 0x0FF00FF0, 0x70007000, 0xEA; }"
)


@triton.jit
def unpack_slot(words, SLOT: tl.constexpr, ASM: tl.constexpr):
    """One weight of each int16 word as bf16, times 2^-126 (layout: gemm/weights/tiled.py)."""
    if ASM:
        CODE: tl.constexpr = (
            _SLOT0 if SLOT == 0 else (_SLOT1 if SLOT == 1 else (_SLOT2 if SLOT == 2 else _SLOT3))
        )
        return tl.inline_asm_elementwise(
            CODE, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    if SLOT == 0:
        bits = words
    elif SLOT == 1:
        bits = words << 3
    elif SLOT == 2:
        bits = words << 6
    else:
        bits = ((words >> 7) & 0xD8) * 0x821
    return (bits & -32320).to(tl.bfloat16, bitcast=True)  # -32320 is int16(0x81C0)


@triton.jit
def scale_pairs(codes, ASM: tl.constexpr, MX: tl.constexpr = False):
    """Each row's codes, int64 or int32 -> four int32 with two bf16 scales each: slots 0 and 1, then
    2 and 3, of the first half, then of the second. In MXFP4 a pair shares one scale."""
    if MX:
        return (
            (codes & 0xFF) * 0x800080,
            (codes >> 8 & 0xFF) * 0x800080,
            (codes >> 16 & 0xFF) * 0x800080,
            (codes >> 24 & 0xFF) * 0x800080,
        )
    else:
        first = codes.to(tl.int32)
        second = (codes >> 32).to(tl.int32)
        if ASM:
            return (
                tl.inline_asm_elementwise(_LOW_CODES, "=r,r", [first], tl.int32, True, 1),
                tl.inline_asm_elementwise(_LOW_CODES, "=r,r", [second], tl.int32, True, 1),
                tl.inline_asm_elementwise(_HIGH_CODES, "=r,r", [first], tl.int32, True, 1),
                tl.inline_asm_elementwise(_HIGH_CODES, "=r,r", [second], tl.int32, True, 1),
            )
        else:
            mask = 0x0FF00FF0
            top = 0x70007000
            return (
                (first << 4) & mask | top,
                (second << 4) & mask | top,
                (first >> 4) & mask | top,
                (second >> 4) & mask | top,
            )


@triton.jit
def unpack_group(words, pairs, GROUP: tl.constexpr, ASM: tl.constexpr):
    """bf16 `[..., 16]`: the weights of one of the eight groups, from the words of its half."""
    both = pairs[GROUP // 2]
    scale = (both if GROUP % 2 == 0 else both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return unpack_slot(words, GROUP % 4, ASM) * tl.expand_dims(scale, -1)


@triton.jit
def whole_tile(low, high, codes, BN: tl.constexpr, ASM: tl.constexpr, MX: tl.constexpr = False):
    """A tile's weights `[BN, 128]`."""
    pairs = scale_pairs(codes, ASM, MX)
    a0 = unpack_group(low, pairs, 0, ASM)
    a1 = unpack_group(low, pairs, 1, ASM)
    a2 = unpack_group(low, pairs, 2, ASM)
    a3 = unpack_group(low, pairs, 3, ASM)
    b0 = unpack_group(high, pairs, 4, ASM)
    b1 = unpack_group(high, pairs, 5, ASM)
    b2 = unpack_group(high, pairs, 6, ASM)
    b3 = unpack_group(high, pairs, 7, ASM)
    even = tl.join(tl.join(a0, b0), tl.join(a2, b2))  # [BN, 16, half, slot // 2]
    odd = tl.join(tl.join(a1, b1), tl.join(a3, b3))
    both = tl.join(even, odd)  # [BN, 16, half, slot // 2, slot % 2]
    return both.permute(0, 2, 3, 4, 1).reshape(BN, 128)


@triton.constexpr_function
def tile_pieces(height):
    """(first row, rows) of power-of-two pieces, longest last, which is fastest (docs/LOG.md)."""
    longest = 1 << (height.bit_length() - 1)
    sizes = [1 << i for i in range(8, -1, -1) if height - longest >> i & 1] + [longest]
    return tuple((sum(sizes[:i]), size) for i, size in enumerate(sizes))


@triton.jit
def tile_rows(start, end, BM: tl.constexpr):
    """Rows of a tile from `start` on, by piece, and a mask of those before `end`."""
    rows = ()
    live = ()
    for i in tl.static_range(len(tile_pieces(BM))):
        piece = start + tile_pieces(BM)[i][0] + tl.arange(0, tile_pieces(BM)[i][1])
        rows = append(rows, piece)
        live = append(live, piece < end)
    return rows, live


@triton.jit
def dot_nvfp4(
    words, codes, x, x_rows, x_mask, first, last, total_steps, num_columns, BN: tl.constexpr,
    STAGES: tl.constexpr, VARIANT: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr,
    MX: tl.constexpr = False,
):  # fmt: skip
    """fp32 `[BN, rows]` over steps `first` to `last` of K, without the factor 128 * global.

    `words` and `codes` point at the first of BN/64 row tiles; input row i starts at `x +
    x_rows[i]`. Rows, masks and results are by piece, see `tile_rows`. Variants of the same sum,
    16 columns at a time: 0, eight small products per step (few rows, one piece); 1, one product
    per piece.
    """
    rn = tl.arange(0, BN)
    tile = (rn // 64) * total_steps + first
    w_ptrs = words + (tile * 2048 + (rn % 64) * 16)[:, None] + tl.arange(0, 16)[None, :]
    codes = codes.to(tl.pointer_type(tl.int32 if MX else tl.int64), bitcast=True)
    s_ptrs = codes + (tile * 64 + rn % 64)
    rk = tl.arange(0, 16 if VARIANT == 0 else 128)
    offsets = ()
    sums = ()
    for i in tl.static_range(len(x_rows)):
        offsets = append(offsets, x_rows[i][None, :] + rk[:, None])
        sums = append(sums, tl.zeros((BN, x_rows[i].shape[0]), dtype=tl.float32))
    x += first * 128
    for step in tl.range(first, last, num_stages=STAGES):
        low = tl.load(w_ptrs)
        high = tl.load(w_ptrs + 1024)
        code = tl.load(s_ptrs)
        added = ()
        if VARIANT == 0:
            pairs = scale_pairs(code, ASM, MX)
            acc = sums[0]
            for group in tl.static_range(8):
                mask = x_mask[0][None, :]
                if not EVEN_K:
                    mask = mask & (step * 128 + group * 16 + rk < num_columns)[:, None]
                part = tl.load(x + group * 16 + offsets[0], mask=mask, other=0.0)
                half = low if group < 4 else high
                acc = tl.dot(unpack_group(half, pairs, group, ASM), part, acc)
            added = append(added, acc)
        else:
            weights = whole_tile(low, high, code, BN, ASM, MX)
            for i in tl.static_range(len(offsets)):
                mask = x_mask[i][None, :]
                if not EVEN_K:
                    mask = mask & (step * 128 + rk < num_columns)[:, None]
                part = tl.load(x + offsets[i], mask=mask, other=0.0)
                added = append(added, tl.dot(weights, part, sums[i]))
        sums = added
        w_ptrs += 2048
        s_ptrs += 64
        x += 128
    return sums


@triton.jit
def dot_two_ranges(
    words, codes, rows, x, x_rows, live, total_steps, num_columns, STAGES: tl.constexpr,
    EVEN: tl.constexpr, ASM: tl.constexpr, MX: tl.constexpr,
):  # fmt: skip
    """Variant 0 of `dot_nvfp4` for two ranges of K at a time, each in its own warps: their sums.
    `rows`: of the tile at `words`. EVEN: ranges of equal length; else the second may be shorter."""
    per_range = tl.cdiv(total_steps, 2)
    codes = codes.to(tl.pointer_type(tl.int32 if MX else tl.int64), bitcast=True)
    first = tl.arange(0, 2) * per_range
    rk = tl.arange(0, 16)
    w_ptrs = words + (first[:, None] * 2048 + rows[None, :] * 16)[:, :, None] + rk
    s_ptrs = codes + (first[:, None] * 64 + rows[None, :])
    x_ptrs = x + (first[:, None] * 128 + rk[None, :])[:, :, None] + x_rows[None, None, :]
    acc = tl.zeros((2, rows.shape[0], x_rows.shape[0]), dtype=tl.float32)
    for step in tl.range(0, per_range, num_stages=STAGES):
        if EVEN:
            low = tl.load(w_ptrs)
            high = tl.load(w_ptrs + 1024)
            code = tl.load(s_ptrs)
        else:
            inside = (first + step < total_steps)[:, None]
            low = tl.load(w_ptrs, mask=inside[:, :, None], other=0)
            high = tl.load(w_ptrs + 1024, mask=inside[:, :, None], other=0)
            code = tl.load(s_ptrs, mask=inside, other=0)
        pairs = scale_pairs(code, ASM, MX)
        for group in tl.static_range(8):
            mask = live[None, None, :]
            if not EVEN:
                column = (first + step)[:, None] * 128 + group * 16 + rk[None, :]
                mask = mask & (column < num_columns)[:, :, None]
            part = tl.load(x_ptrs + group * 16, mask=mask, other=0.0)
            weights = unpack_group(low if group < 4 else high, pairs, group, ASM)
            acc = tl.dot(weights, part, acc)
        w_ptrs += 2048
        s_ptrs += 64
        x_ptrs += 128
    return tl.split(acc.permute(1, 2, 0))


@triton.jit
def dot_expanded(
    weight, x, x_rows, x_mask, first, last, total_steps, num_columns,
    BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """`dot_nvfp4` on dequantised weights: `weight` points at BN rows of bf16."""
    rn = tl.arange(0, BN)
    rk = tl.arange(0, 64)
    w_ptrs = weight + (rn * (total_steps * 128) + first * 128)[:, None] + rk[None, :]
    offsets = x_rows[None, :] + rk[:, None]
    x += first * 128
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for step in tl.range(first * 2, last * 2, num_stages=STAGES):
        mask = x_mask[None, :]
        if not EVEN_K:
            mask = mask & (step * 64 + rk < num_columns)[:, None]
        acc = tl.dot(tl.load(w_ptrs), tl.load(x + offsets, mask=mask, other=0.0), acc)
        w_ptrs += 64
        x += 64
    return acc


@triton.jit
def dot_bf16(
    weight, n_mask, x, x_rows, x_mask, first, last, num_columns, BN: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """fp32 `[BN, BM]` over steps of 128 columns; `weight` points at BN rows of bf16."""
    rn = tl.arange(0, BN)
    rk = tl.arange(0, 64)
    k0 = first * 128
    w_ptrs = weight + (rn.to(tl.int64) * num_columns)[:, None] + (k0 + rk)[None, :]
    x_ptrs = x + x_rows[None, :] + (k0 + rk)[:, None]
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for step in tl.range(first * 2, last * 2, num_stages=STAGES):
        w_mask = n_mask[:, None]
        mask = x_mask[None, :]
        if not EVEN_K:
            inside = (step * 64 + rk) < num_columns
            w_mask = w_mask & inside[None, :]
            mask = mask & inside[:, None]
        w = tl.load(w_ptrs, mask=w_mask, other=0.0)
        part = tl.load(x_ptrs, mask=mask, other=0.0)
        acc = tl.dot(w, part, acc)
        w_ptrs += 64
        x_ptrs += 64
    return acc


@triton.jit
def power_of(codes):
    """E8M0 bytes as bf16: 2^(byte - 127); byte 0 is a subnormal, which no published weight uses."""
    return (codes.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)


@triton.jit
def dot_fp8(
    weight, scale, scale_rows, n_mask, x, x_rows, x_mask, first, last, num_columns,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, EVEN_K: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    """Like `dot_bf16`, for E4M3 tiles. E8M0: weights are multiplied by their scale, exactly, so the
    sum is that of bf16 weights. Other scales: a product over BK columns is scaled in fp32, then
    added.

    `scale_rows` `[BN]`: offset of each weight row's scales.
    """
    rn = tl.arange(0, BN)
    rk = tl.arange(0, BK)
    k0 = first * 128
    w_ptrs = weight + (rn.to(tl.int64) * num_columns)[:, None] + (k0 + rk)[None, :]
    x_ptrs = x + x_rows[None, :] + (k0 + rk)[:, None]
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    per_step: tl.constexpr = 128 // BK
    for step in tl.range(first * per_step, last * per_step, num_stages=STAGES):
        w_mask = n_mask[:, None]
        mask = x_mask[None, :]
        if not EVEN_K:
            inside = (step * BK + rk) < num_columns
            w_mask = w_mask & inside[None, :]
            mask = mask & inside[:, None]
        w = tl.load(w_ptrs, mask=w_mask, other=0.0)
        part = tl.load(x_ptrs, mask=mask, other=0.0)
        live = n_mask & (step * BK < num_columns)
        factor = tl.load(scale + scale_rows + step * BK // BLOCK, mask=live, other=0)
        if E8M0:
            acc = tl.dot(from_e4m3(w, tl.bfloat16) * power_of(factor)[:, None], part, acc)
        else:
            product = tl.dot(from_e4m3(w, tl.bfloat16), part)
            acc = tl.fma(product, factor[:, None].broadcast_to(BN, BM), acc)
        w_ptrs += BK
        x_ptrs += BK
    return acc


@triton.jit
def finish_ranges(
    acc, live, partials, counters, slot, split, num_splits, BN: tl.constexpr, BM: tl.constexpr
):
    """Store this range's partial sums for live rows; the last program of a tile gets the total
    and True. Ranges are added in ascending order, so it does not matter which program is last.
    """
    offsets = tl.arange(0, BN)[:, None] + (tl.arange(0, BM) * BN)[None, :]
    rows = live[None, :] & (offsets >= 0)
    base = partials + slot.to(tl.int64) * (BN * BM)
    tl.store(base + split * (BN * BM) + offsets, acc, mask=rows)
    tl.debug_barrier()  # all threads have stored before the counter is incremented
    arrived = tl.atomic_add(counters + slot, 1, sem="acq_rel")
    is_last = arrived == num_splits - 1
    total = tl.zeros((BN, BM), dtype=tl.float32)
    # several loads in flight; adding +0 for missing ones changes nothing, since total is never -0
    UNROLL: tl.constexpr = 8 if BM <= 16 else 2
    if is_last:
        for group in tl.range(0, num_splits, UNROLL):
            for index in tl.static_range(UNROLL):
                present = rows & (group + index < num_splits)
                part_ptrs = base + (group + index) * (BN * BM) + offsets
                total += tl.load(part_ptrs, mask=present, other=0.0, cache_modifier=".cg")
        tl.store(counters + slot, 0)
    return total, is_last


class Matrices(NamedTuple):
    """The matrices of a launch, one number per matrix: addresses, then sizes."""

    words: tuple[int, ...]
    scales: tuple[int, ...]
    factors: tuple[int, ...]
    outs: tuple[int, ...]
    sizes: tuple[int, ...]  # rows of weights
    parts: tuple[int, ...]  # rows under one factor
    firsts: tuple[int, ...]  # first program
    ranges: tuple[int, ...]  # of K
    range_steps: tuple[int, ...]


def matrices(data, scales, factors, outs, sizes, parts, programs, splits) -> Matrices:
    """Per matrix, `programs`: how many it has; `splits`: ranges of K and the steps in each."""
    addresses = (
        tuple(tensor.data_ptr() for tensor in tensors) for tensors in (data, scales, factors, outs)
    )
    firsts = tuple(sum(programs[:i]) for i in range(len(programs)))
    return Matrices(*addresses, tuple(sizes), tuple(parts), firsts, *zip(*splits, strict=True))


@triton.jit
def store_typed(total, out, offsets, mask, wide):
    """Store fp32 if `wide`, else bf16. `out` is an address: allocations are aligned, but a pointer
    cast from an integer does not carry that."""
    out_f32 = tl.multiple_of(out.to(tl.pointer_type(tl.float32)), 16)
    out_bf16 = tl.multiple_of(out.to(tl.pointer_type(tl.bfloat16)), 16)
    if wide:
        tl.store(out_f32 + offsets, total, mask=mask)
    else:
        tl.store(out_bf16 + offsets, total.to(tl.bfloat16), mask=mask)


@triton.jit
def is_wide(m, pid, F32: tl.constexpr, NUM: tl.constexpr):
    """Whether program `pid`'s matrix has fp32 results: bit i of F32 is set for matrix i."""
    wide = tl.where(pid >= 0, F32 % 2, 0)
    for i in tl.static_range(1, NUM):
        wide = tl.where(pid >= m.firsts[i], (F32 >> i) % 2, wide)
    return wide == 1


@triton.jit
def select_matrix(values, firsts, pid, NUM: tl.constexpr):
    """The value of program `pid`'s matrix; `firsts`: the first program of each matrix."""
    chosen = values[0]
    for i in tl.static_range(1, NUM):
        chosen = tl.where(pid >= firsts[i], values[i], chosen)
    return chosen
