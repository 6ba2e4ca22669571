# mypy: ignore-errors
"""FP8 products of a8 rows (sm_90): weights in the tensor core's M slot, at least 16 rows wide.

A product covers 128 columns; then the sums leave the tensor core, whose accumulator is short, and
are added in fp32, times the scales of the input row and of the weight's tile. `wgmma` gives the
same bits for 16 to 256 rows (`mma.sync` would not), so a row's bits do not depend on its batch.

MXFP4 is unpacked to E4M3 with two lookups of four codes each (weights/a8.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import depend, swiglu, through_bf16
from dsv4.ops.core.launch import dependent_options, interpreting, streams
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm import dot_device as dd
from dsv4.ops.gemm.a8.fp8_rows_triton import EARLY_ROWS
from dsv4.ops.gemm.split_k import split_k
from dsv4.ops.gemm.weights.a8 import TILE_ROWS

PLAIN, SWIGLU, PAIRS = 0, 1, 2  # what becomes of the sums
WARPS = 4
EARLY_PAIRS = 512  # of experts; see EARLY_ROWS
# $1: the word, $2 and $3: E4M3 codes of the magnitudes; the four low columns, then the high ones
LOW = tl.constexpr(
    "{ .reg .b32 s, m; and.b32 s, $1, 0x77777777; prmt.b32 m, $2, $3, s; "
    "lop3.b32 $0, m, $1, 0x80808080, 0xF8; }"
)
HIGH = tl.constexpr(
    "{ .reg .b32 s, m, u; and.b32 s, $1, 0x77777777; shr.u32 s, s, 16; prmt.b32 m, $2, $3, s; "
    "shl.b32 u, $1, 4; lop3.b32 $0, m, u, 0x80808080, 0xF8; }"
)


class A8Tile(NamedTuple):
    """Constants of a launch."""

    bm: int  # input rows per program
    tiles: int  # of 64 weight rows per program
    stages: int
    fp8: bool  # FP8 weights, otherwise MXFP4
    even_k: bool
    routed: bool  # rows are those of an expert
    gather: bool  # a pair's row is its token's
    end: int  # PLAIN, SWIGLU or PAIRS
    parallel: bool  # a program per range of K
    partial: bool  # which stores its sum by itself
    asm: bool


@triton.jit
def _four(value):
    """`[r, c] -> [r, c, 4]`, all equal: an element of each of four in one register."""
    both = tl.join(value, value)
    return tl.join(both, both).reshape(value.shape[0], value.shape[1], 4)


@triton.jit
def _four_codes(word, first, second, HIGH_PART: tl.constexpr, ASM: tl.constexpr):
    """int32 `[r, c]` -> E4M3 `[r, c, 4]`: the low or the high columns of each word."""
    if ASM:
        code = tl.inline_asm_elementwise(
            HIGH if HIGH_PART else LOW, "=r,r,r,r", [word, first, second], tl.int32, True, 1
        )
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r,r,r", [_four(code)], tl.float8e4nv, True, 4
        )
    else:
        place = tl.arange(0, 4)[None, None, :]
        word = word[:, :, None]
        size = (word >> (place * 4 + (16 if HIGH_PART else 0))) & 7
        sign = (word >> (place * 8 + (3 if HIGH_PART else 7))) & 1
        table = tl.where(size < 4, first[:, :, None], second[:, :, None])
        code = (table >> ((size & 3) * 8)) & 255
        return (code | (sign << 7)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def unpack_e4m3(words, shifts, ASM: tl.constexpr):
    """int32 `[rows, 16]` and `[rows]` -> E4M3 `[rows, 128]`."""
    R: tl.constexpr = words.shape[0]
    even = tl.join(shifts & 255, (shifts >> 16) & 255)
    odd = tl.join((shifts >> 8) & 255, (shifts >> 24) & 255)
    shift = tl.join(even, odd).reshape(R, 1, 4).broadcast_to(R, 4, 4).reshape(R, 16)
    first = 0x6C686000 - shift * 0x08080800  # codes of 0, 32, 64, 96, lower by `shift` powers
    second = 0x7C787470 - shift * 0x08080808  # 128, 192, 256, 384
    low = _four_codes(words, first, second, False, ASM)
    high = _four_codes(words, first, second, True, ASM)
    both = tl.join(low, high).reshape(R, 4, 4, 4, 2)  # q, s, column, half
    return both.permute(0, 2, 4, 1, 3).reshape(R, 128)


@triton.jit
def _range_sum(
    w, s, tile, live_n, codes, x_rows, scales, scale_rows, scale_stride, live, first, last, steps,
    num_columns, T: tl.constexpr,
):  # fmt: skip
    """fp32 `[64 * tiles, bm]` over steps `first` to `last`; `tile`: the first one."""
    BM: tl.constexpr = T.bm
    BN: tl.constexpr = 64 * T.tiles
    rn = tl.arange(0, BN)
    rk = tl.arange(0, 128)
    if T.fp8:
        w_ptrs = w + ((tile * 64 + rn) * num_columns)[:, None] + (first * 128 + rk)[None, :]
        s_ptrs = s + tile // 2 * steps + first
    else:
        rows = ((tile + rn // 64) * steps + first) * 64 + rn % 64
        w_ptrs = w + (rows * 16)[:, None] + tl.arange(0, 16)[None, :]
        s_ptrs = s + rows
    x_ptrs = codes + x_rows[None, :] + (first * 128 + rk)[:, None]
    scales += scale_rows + first * scale_stride
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for step in tl.range(first, last, num_stages=T.stages):
        factor = tl.load(scales, mask=live, other=0.0)
        if T.fp8:
            mask = live_n[:, None]
            if not T.even_k:
                mask = mask & (step * 128 + rk < num_columns)[None, :]
            weights = tl.load(w_ptrs, mask=mask, other=0.0)
            factor = factor * tl.load(s_ptrs)
            w_ptrs += 128
            s_ptrs += 1
        else:
            weights = unpack_e4m3(tl.load(w_ptrs), tl.load(s_ptrs), T.asm)
            w_ptrs += 1024
            s_ptrs += 64
        product = tl.dot(weights, tl.load(x_ptrs, mask=live[None, :], other=0.0))
        acc = tl.fma(product, factor[None, :].broadcast_to(BN, BM), acc)
        x_ptrs += 128
        scales += scale_stride
    return acc


@triton.jit
def _store_swiglu(
    acc, z, rows, live, tile, inner, weight, limit, BM: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Of 16 weight rows the first 8 are gates. `z` `[rows, inner]` in bf16."""
    BN: tl.constexpr = acc.shape[0]
    acc = through_bf16(acc, ASM)
    gate, up = tl.split(acc.reshape(BN // 16, 2, 8, BM).permute(0, 2, 3, 1))
    value = swiglu(gate, up, limit).reshape(BN // 2, BM) * weight[None, :]
    column = tile * 32 + tl.arange(0, BN // 2)
    mask = (column < inner)[:, None] & live[None, :]
    at = rows.to(tl.int64)[None, :] * inner + column[:, None]
    tl.store(z + at, value.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "first_range"])
def _a8_kernel(
    codes, x_stride, scales, scale_stride, num_rows, w, s, factors, out, size, num_columns, steps,
    ranges, per_range, first_range, partials, counters, groups, weights, chosen, limit,
    T: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`size`: rows of weights, or of SwiGLU's result. Partial sums begin with range `first_range`,
    and so do the rows' columns."""
    depend(DEPENDENT)
    BM: tl.constexpr = T.bm
    BN: tl.constexpr = 64 * T.tiles
    pid = tl.program_id(0)
    split = 0
    if T.parallel:
        split = pid % ranges
        pid = pid // ranges
    expert = 0
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    live = rows < num_rows
    pairs = rows
    if T.routed:
        expert = tl.load(groups.tile_expert + tl.program_id(1))
        if expert < 0:
            return
        rows = tl.load(groups.tile_start + tl.program_id(1)) + tl.arange(0, BM)
        live = rows < tl.load(groups.tile_end + tl.program_id(1))
        pairs = tl.load(groups.sorted_pairs + rows, mask=live, other=0)
    x_rows = tl.where(live, pairs // chosen if T.gather else rows, 0)
    tile = pid.to(tl.int64)
    if T.routed:
        tile += expert.to(tl.int64) * tl.num_programs(0)
    tile *= T.tiles
    live_n = pid * BN + tl.arange(0, BN) < size
    is_last = ranges > 0
    total = tl.zeros((BN, BM), dtype=tl.float32)
    if T.parallel:
        first = split * per_range
        if T.partial:
            first += first_range * per_range
            codes -= first_range * per_range * 128
            scales -= first_range * per_range * scale_stride
        total = _range_sum(
            w, s, tile, live_n, codes, x_rows.to(tl.int64) * x_stride, scales, x_rows,
            scale_stride, live, first, tl.minimum(first + per_range, steps), steps, num_columns, T,
        )  # fmt: skip
        if ranges > 1 and not T.partial:
            slot = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0) - split
            total, is_last = dd.finish_ranges(
                total, live, partials, counters, slot, split, ranges, BN, BM
            )
    else:
        for index in tl.range(0, ranges):
            total += _range_sum(
                w, s, tile, live_n, codes, x_rows.to(tl.int64) * x_stride, scales, x_rows,
                scale_stride, live, index * per_range, tl.minimum((index + 1) * per_range, steps),
                steps, num_columns, T,
            )  # fmt: skip
    if not T.fp8:
        total = total * tl.load(factors + expert)
    if T.end == 1:
        weight = tl.load(weights + pairs, mask=live, other=0.0)
        _store_swiglu(total, out, rows, live, pid * T.tiles, size, weight, limit, BM, T.asm)
    else:
        to = pairs if T.end == 2 else rows
        if T.partial:
            to += split * num_rows
        column = pid * BN + tl.arange(0, BN)
        at = to.to(tl.int64)[None, :] * size + column[:, None]
        mask = (column < tl.where(is_last, size, 0))[:, None] & live[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def fits_prompts(*weights) -> bool:
    """Whether kernels of prompts multiply the matrices: where Gluon runs, sides of whole tiles."""
    whole = all(side % 128 == 0 for weight in weights for side in weight.shape[-2:])
    return whole and streams(weights[0].device)


def choose_rows(num_rows: float, most: int = 64) -> int:
    """Input rows per program; they change no bit of the result. With ranges of K, 128 spill."""
    return next((bm for bm in (16, 32, 64) if num_rows <= bm), most)


def multiply_rows(rows, weight, out, *, bm=None, parallel=None, some=None) -> None:
    """`out` `[rows, n]` = a8 rows times an FP8 matrix. `some`: only these ranges of K, of which the
    rows have the columns; `out` is fp32 `[ranges, rows, n]`."""
    bm = bm or choose_rows(rows.num_rows)
    ranges, per_range = split_k(weight)
    size, columns = weight.shape
    tiles, m_tiles = triton.cdiv(size, TILE_ROWS), triton.cdiv(rows.num_rows, bm)
    first = 0
    if some is not None:
        ranges, first, parallel = len(some), some.start, True
    if parallel is None:
        parallel = bm <= 32 or ranges == 1
    programs = tiles * (ranges if parallel else 1)
    split = programs * m_tiles if parallel and ranges > 1 and some is None else 1
    partials = workspace(out.device, "a8_partials", split * bm * TILE_ROWS, torch.float32)
    counters = workspace(out.device, "a8_counters", split, torch.int32)
    tile = A8Tile(
        bm, 1, 4, True, columns % 128 == 0, False, False, PLAIN, parallel, some is not None,
        not interpreting(),
    )  # fmt: skip
    _a8_kernel[(programs, m_tiles)](
        rows.codes, rows.codes.stride(0), rows.scales, rows.scales.stride(0), rows.num_rows,
        weight.data, weight.scale, weight.scale, out, size, columns,
        triton.cdiv(columns, 128), ranges, per_range, first, partials, counters, (out,), out, 1,
        0.0, T=tile,
        **dependent_options(out.device, WARPS, early=rows.num_rows <= EARLY_ROWS),
    )  # fmt: skip


def multiply_experts(
    rows, weight, out, grouped, bm, *, weights=None, chosen=0, limit=0.0, tiles=1
) -> None:
    """The rows of each expert times its matrix. With `weights`, `out` `[pairs, inner]` is SwiGLU of
    gate and up, in sorted order; otherwise `[pairs, n]`, in the order of pairs. `chosen`: of `rows`
    each token has one, otherwise each sorted pair. `tiles` of 64 weight rows per program."""
    up = weights is not None
    end = SWIGLU if up else PAIRS
    tile = A8Tile(bm, tiles, 4, False, True, True, chosen > 0, end, True, False, not interpreting())
    steps = weight.num_steps
    _a8_kernel[(weight.words.shape[1] // tiles, grouped.num_tiles)](
        rows.codes, rows.codes.stride(0), rows.scales, rows.scales.stride(0), rows.num_rows,
        weight.words, weight.shifts, weight.factor, out, out.shape[1], weight.columns, steps, 1,
        steps, 0, out, out, grouped.groups, out if weights is None else weights, max(chosen, 1),
        limit, T=tile, **dependent_options(out.device, WARPS, early=len(out) <= EARLY_PAIRS),
    )  # fmt: skip
