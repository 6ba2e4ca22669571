# mypy: ignore-errors
"""a8 rows for FP8 products on sm_90: E4M3 codes, and scales transposed, one row per 128 columns.

A program holds a row in registers; in prompts 16 rows of 512 columns, so that scales are stored 16
at a time. Columns are padded with zeros to a multiple of 128. `gather_rows` copies quantised rows
of tokens, one for each sorted pair, so that the rows of an expert are contiguous.

A copy to shared memory (TMA) must begin at a multiple of 16 bytes, four scales, and an expert's
rows begin anywhere. So there may be four copies of the scales: copy i lacks the first i rows.

With a `limit`, what is quantised is SwiGLU of gate and up, concatenated in `x`, rounded to bf16.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import depend, swiglu, to_e4m3
from dsv4.ops.core.launch import ROW_WARPS, dependent_options, launch_options
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.quantize_rows import A8_GROUP
from dsv4.ops.gemm.quantize_rows_triton import a8_scale

TALL, TALL_ROWS, TALL_GROUPS = 256, 16, 4  # from how many rows on, and what a program then has
EARLY_ROWS = 64  # up to here launches start before the previous one is complete
COPIES = 4  # of the scales of experts' rows


@dataclass(frozen=True)
class A8Rows:
    codes: torch.Tensor  # float8_e4m3fn [rows, columns]
    scales: torch.Tensor  # float32 [columns / 128, rows or more], or four such, one by one

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]

    @property
    def num_steps(self) -> int:
        return self.codes.shape[1] // A8_GROUP


class A8Buffers(NamedTuple):
    """`A8Rows` as kernels take them."""

    codes: torch.Tensor
    scales: torch.Tensor
    stride: int  # between lines of scales


@triton.jit
def _places(num_rows, columns, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """(rows, groups of 128 columns, whether they exist) of this program, group by group."""
    place = tl.arange(0, ROWS * GROUPS)
    row = tl.program_id(0).to(tl.int64) * ROWS + place % ROWS
    group = tl.program_id(1) * GROUPS + place // ROWS
    return row, group, (row < num_rows) & (group < columns // 128)


@triton.jit
def _store_rows(to, code, scale, row, group, live, columns, COPIES: tl.constexpr):
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(to.codes + (row * columns)[:, None] + column, code, mask=live[:, None])
    for i in tl.static_range(COPIES):
        at = to.scales + (i * (columns // 128) + group) * to.stride + row - i
        tl.store(at, scale, mask=live & (row >= i))


@triton.jit(do_not_specialize=["num_rows"])
def _a8_rows_kernel(
    x, x_stride, size, to, columns, num_rows, limit,
    SWIGLU: tl.constexpr, COPIES: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    depend(DEPENDENT)
    row, group, live = _places(num_rows, columns, ROWS, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = x + (row * x_stride)[:, None] + column
    mask = live[:, None] & (column < size)
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if SWIGLU:
        up = tl.load(at + size, mask=mask, other=0.0).to(tl.float32)
        value = swiglu(value, up, limit).to(tl.bfloat16).to(tl.float32)
    power, inverse = a8_scale(value)
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    code = to_e4m3(value * inverse[:, None])
    _store_rows(to, code, scale, row, group, live, columns, COPIES)


@triton.jit(do_not_specialize=["num_rows"])
def _gather_rows_kernel(
    rows, pairs, chosen, to, columns, num_rows,
    COPIES: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Row i of `to` is that of the i-th sorted pair's token."""
    row, group, live = _places(num_rows, columns, ROWS, GROUPS)
    token = (tl.load(pairs + row, mask=live, other=0) // chosen).to(tl.int64)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    code = tl.load(rows.codes + (token * columns)[:, None] + column, mask=live[:, None], other=0.0)
    scale = tl.load(rows.scales + group * rows.stride + token, mask=live, other=0.0)
    _store_rows(to, code, scale, row, group, live, columns, COPIES)


def _buffers(rows: A8Rows) -> A8Buffers:
    return A8Buffers(rows.codes, rows.scales, rows.scales.stride(0))


def room(device, name: str, count: int, columns: int, copies: int = 1) -> A8Rows:
    """Rows in the workspace `name`."""
    stride = triton.cdiv(count, 4) * 4  # descriptors need multiples of 16 bytes
    codes = workspace(device, f"{name}_codes", count * columns, torch.uint8)
    codes = codes[: count * columns].view(torch.float8_e4m3fn).view(count, columns)
    lines = copies * columns // A8_GROUP
    scales = workspace(device, f"{name}_scales", lines * stride, torch.float32)
    return A8Rows(codes, scales[: lines * stride].view(lines, stride))


def make_a8_rows(x, name: str, *, copies=1, limit=None) -> A8Rows:
    """`x` `[rows, size]` quantised into the workspace `name`. `copies` of the scales. `limit`: see
    above."""
    count, size = x.shape[0], x.shape[1] if limit is None else x.shape[1] // 2
    columns = triton.cdiv(size, A8_GROUP) * A8_GROUP
    rows = room(x.device, name, count, columns, copies)
    tall = copies > 1 or count >= TALL
    across = TALL_GROUPS if tall else triton.next_power_of_2(columns // A8_GROUP)
    num = TALL_ROWS if tall else 1
    _a8_rows_kernel[(triton.cdiv(count, num), triton.cdiv(columns // A8_GROUP, across))](
        x, x.stride(0), size, _buffers(rows), columns, count, limit or 0.0,
        SWIGLU=limit is not None, COPIES=copies, ROWS=num, GROUPS=across,
        **dependent_options(x.device, ROW_WARPS if across <= 64 else 8, early=count <= EARLY_ROWS),
    )  # fmt: skip
    return rows


def gather_rows(rows: A8Rows, groups, chosen: int, name: str) -> A8Rows:
    """A row per sorted pair, and COPIES of its scales, in the workspace `name`; `rows` has one per
    token, of `chosen` pairs each."""
    count, columns = rows.num_rows * chosen, rows.codes.shape[1]
    pairs = room(rows.codes.device, name, count, columns, COPIES)
    _gather_rows_kernel[(triton.cdiv(count, TALL_ROWS), triton.cdiv(rows.num_steps, TALL_GROUPS))](
        _buffers(rows), groups.sorted_pairs, chosen, _buffers(pairs), columns, count,
        COPIES=COPIES, ROWS=TALL_ROWS, GROUPS=TALL_GROUPS, **launch_options(ROW_WARPS),
    )  # fmt: skip
    return pairs
