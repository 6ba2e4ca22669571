# mypy: ignore-errors
"""`quantize_rows` on a GPU, and its variants before a block-scaled product (sm_100).

One program holds a row in registers: first the largest magnitude, then scales and codes; nothing is
read twice and the host never waits. It quantises the row itself, or SwiGLU of gate and up, rounded
to bf16 first like the op it replaces.

A product needs rows padded to a multiple of 256 columns, and with many rows the scales in the order
of weights/scaled.py; `QuantizedRows` describes the buffers. Row i may belong to a routed pair.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import from_e4m3, swiglu, to_e4m3
from dsv4.ops.core.launch import ROW_WARPS, launch_options
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.quantize_rows import SIXTH, SMALLEST_AMAX, TOP
from dsv4.ops.gemm.weights.scaled import COLUMN_MULTIPLE, ROWS

PLAIN, SWIGLU = 0, 1
_TOP, _SIXTH, _SMALLEST = (tl.constexpr(value) for value in (TOP, SIXTH, SMALLEST_AMAX))


class RowBuffers(NamedTuple):
    """`QuantizedRows` as kernels take them."""

    codes: torch.Tensor
    scales: torch.Tensor
    row_scale: torch.Tensor
    columns: int
    fold: int  # rows concatenated into one row of the product


@triton.jit
def _e2m1_code(x):
    """Codes 0..15 as int32: ties to the even code, saturating at 6."""
    m = tl.abs(x)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32)
    code += (m >= 1.75).to(tl.int32) + (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32)
    code += (m > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _source_row(
    x, weight, row, x_stride, size, limit, column, live, SOURCE: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The row in fp32, zero beyond its end."""
    base = x + row * x_stride
    value = tl.load(base + column, mask=live, other=0.0).to(tl.float32)
    if SOURCE == 1:
        up = tl.load(base + size + column, mask=live, other=0.0).to(tl.float32)
        value = swiglu(value, up, limit)
        if WEIGHTED:
            value = value * tl.load(weight)
        value = value.to(tl.bfloat16).to(tl.float32)
    return value


@triton.jit
def _scale_at(row, fold, group, num_groups, TILED: tl.constexpr):
    """Offset of the scale of `group`; `fold` adjacent rows form one row of the product."""
    if TILED:
        outer = row // fold
        column = row % fold * num_groups + group
        at = (outer // 128 * (num_groups * fold // 4) + column // 4) * 512
        return at + outer % 32 * 16 + outer // 32 % 4 * 4 + column % 4
    return row * num_groups + group


@triton.jit
def _store_fp4(value, rows, row, TILED: tl.constexpr):
    """Store codes, scales and row scale of `value` `[groups, 16]`; see gemm/quantize_rows.py."""
    GROUPS: tl.constexpr = value.shape[0]
    num_groups = rows.columns // 16
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # as integers Inf and NaN are the largest; a float maximum would skip NaN
    top = tl.max(tl.max(bits, axis=1), axis=0)
    finite = top < 0x7F800000
    amax = tl.maximum(top.to(tl.float32, bitcast=True), _SMALLEST)
    amax = tl.where(finite, amax, 1.0)
    inverse = tl.div_rn(_TOP, amax)
    tl.store(rows.row_scale + row, tl.where(finite, tl.div_rn(amax, _TOP), float("nan")))
    largest = tl.max(bits, axis=1).to(tl.float32, bitcast=True) * inverse * _SIXTH
    largest = tl.where(finite, tl.minimum(tl.maximum(largest, 0.001953125), 448.0), 0.001953125)
    scale = to_e4m3(largest)
    factor = tl.div_rn(tl.zeros_like(largest) + inverse, from_e4m3(scale, tl.float32))
    scaled = tl.where(finite, value * factor[:, None], 0.0)
    pairs = _e2m1_code(scaled).reshape(GROUPS, 8, 2)
    low, high = tl.split(pairs)
    group = tl.arange(0, GROUPS)
    live = group < num_groups
    code_at = rows.codes + row * (num_groups * 8) + group[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(code_at, (low | (high << 4)).to(tl.uint8), mask=live[:, None])
    at = _scale_at(row, rows.fold, group, num_groups, TILED)
    tl.store(rows.scales + at, scale.to(tl.uint8, bitcast=True), mask=live)


@triton.jit
def a8_scale(value):
    """(exponent of the scale, its inverse) of fp32 `[groups, 128]`; the inverse is NaN if the group
    has Inf or NaN."""
    return scale_of(tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))


@triton.jit
def scale_of(bits):
    """`a8_scale` of a group whose largest magnitude has these bits."""
    finite = bits < 0x7F800000
    bits = tl.maximum(bits, 0x38D1B717)  # 1e-4
    power = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 is 1.75 * 2^8
    inverse = ((127 - power) << 23).to(tl.float32, bitcast=True)
    return power, tl.where(finite, inverse, float("nan"))


@triton.jit
def _store_mxfp8(value, rows, row, TILED: tl.constexpr):
    """Store E4M3 codes and E8M0 scales of `value` `[groups, 128]`; the hardware takes a scale per
    32 columns, so each is stored four times."""
    GROUPS: tl.constexpr = value.shape[0]
    power, inverse = a8_scale(value)
    group = tl.arange(0, GROUPS)
    at = rows.codes + row * rows.columns + group[:, None] * 128 + tl.arange(0, 128)[None, :]
    code = to_e4m3(value * inverse[:, None]).to(tl.uint8, bitcast=True)
    tl.store(at, code, mask=(group < rows.columns // 128)[:, None])
    part = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = _scale_at(row, rows.fold, part, rows.columns // 32, TILED)
    bytes_ = (power + 127).to(tl.uint8)[:, None].broadcast_to(GROUPS, 4)
    tl.store(rows.scales + at, bytes_, mask=part < rows.columns // 32)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    x, weight, rows, x_stride, size, num_rows, limit, groups, chosen,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, ROUTED: tl.constexpr, BM: tl.constexpr,
    PAD: tl.constexpr, A8: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """BM > 0: row i is row `i % BM` of routed tile `i // BM`; its source is its pair's token, or
    with SwiGLU its place among the sorted pairs. ROUTED: the weight is the pair's."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    own = weight
    present = row < num_rows
    if ROUTED:
        at = row.to(tl.int32)
        if BM > 0:
            tile = row // BM
            expert = tl.load(groups.tile_expert + tile)
            at = tl.load(groups.tile_start + tile) + (row % BM).to(tl.int32)
            end = tl.load(groups.tile_end + tile)
            present = (expert >= 0) & (at < end)
        pair = tl.load(groups.sorted_pairs + at, mask=present, other=0)
        source = (at if SOURCE == 1 else pair // chosen).to(tl.int64)
        own = weight + pair
    if present:
        column = tl.arange(0, PAD)
        value = _source_row(
            x, own, source, x_stride, size, limit, column, column < size, SOURCE, WEIGHTED
        )  # fmt: skip
        if A8:
            _store_mxfp8(value.reshape(PAD // 128, 128), rows, row, TILED)
        else:
            _store_fp4(value.reshape(PAD // 16, 16), rows, row, TILED)


@dataclass(frozen=True)
class QuantizedRows:
    """Quantised rows in buffers for the next launch: codes `[rows, bytes]`, row scales `[rows]`
    (a4), and block scales in row order, or tiled as in gemm/weights/scaled.py."""

    codes: torch.Tensor
    scales: torch.Tensor
    row_scale: torch.Tensor
    num_rows: int
    columns: int
    tiled: bool = False
    fold: int = 1  # rows concatenated into one row of the product
    a8: bool = False


def make_rows(device, num_rows, columns, *, tiled, fold=1, a8=False) -> QuantizedRows:
    """Buffers for `num_rows` rows of `columns` columns, padded to whole tiles."""
    columns = triton.cdiv(columns, COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    count = triton.cdiv(num_rows // fold, 2 * ROWS) * 2 * ROWS * fold
    codes = workspace(device, "scaled_codes", count * columns // (1 if a8 else 2), torch.uint8)
    scales = workspace(device, "scaled_scales", count * columns // (32 if a8 else 16), torch.uint8)
    row_scale = workspace(device, "scaled_row_scale", count, torch.float32)
    return QuantizedRows(codes, scales, row_scale, num_rows, columns, tiled, fold, a8)


def row_buffers(rows: QuantizedRows) -> RowBuffers:
    return RowBuffers(rows.codes, rows.scales, rows.row_scale, rows.columns, rows.fold)


def fill_rows(
    rows: QuantizedRows, x, *, source=PLAIN, weight=None, limit=0.0, size=None, grouped=None,
    chosen=1, bm=0,
) -> None:  # fmt: skip
    """Quantise `x` `[.., size]` (SWIGLU: gate and up, `[.., 2 size]`) into `rows`. With `grouped`
    these are pairs, in sorted order or (`bm`) by tiles."""
    pad = max(triton.next_power_of_2(rows.columns), COLUMN_MULTIPLE)
    _quantize_kernel[(rows.num_rows,)](
        x, x if weight is None else weight, row_buffers(rows), x.stride(0), size or x.shape[1],
        rows.num_rows, limit, (x,) if grouped is None else grouped.groups, chosen, SOURCE=source,
        WEIGHTED=weight is not None, ROUTED=grouped is not None, BM=bm, PAD=pad,
        A8=rows.a8, TILED=rows.tiled, **launch_options(ROW_WARPS if pad <= 8192 else 8),
    )  # fmt: skip
