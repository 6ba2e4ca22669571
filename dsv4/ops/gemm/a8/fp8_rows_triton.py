# mypy: ignore-errors
"""a8 rows for FP8 products on sm_90: E4M3 codes, and scales transposed, one row per 128 columns.

A program holds a row in registers; in prompts 16 rows of 512 columns, so that scales are stored 16
at a time. With `groups` row i is that of the i-th sorted pair's token, so that the rows of an
expert are contiguous. Columns are padded with zeros to a multiple of 128.

A copy to shared memory (TMA) must begin at a multiple of 16 bytes, four scales, and an expert's
rows begin anywhere. So there may be four copies of the scales: copy i lacks the first i rows.

With a `limit`, what is quantised is SwiGLU of gate and up, concatenated in `x`, rounded to bf16.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import depend, swiglu, to_e4m3
from dsv4.ops.core.launch import ROW_WARPS, dependent_options
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.quantize_rows import A8_GROUP
from dsv4.ops.gemm.quantize_rows_triton import a8_scale

TALL, TALL_ROWS, TALL_GROUPS = 256, 16, 4  # from how many rows on, and what a program then has
EARLY_ROWS = 64  # up to here launches start before the previous one is complete


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


@triton.jit(do_not_specialize=["num_rows"])
def _a8_rows_kernel(
    x, x_stride, size, codes, columns, scales, scale_stride, num_rows, pairs, chosen, limit,
    GATHER: tl.constexpr, SWIGLU: tl.constexpr, COPIES: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    depend(DEPENDENT)
    place = tl.arange(0, ROWS * GROUPS)
    row = tl.program_id(0).to(tl.int64) * ROWS + place % ROWS
    group = tl.program_id(1) * GROUPS + place // ROWS
    live = (row < num_rows) & (group < columns // 128)
    source = row
    if GATHER:
        source = (tl.load(pairs + row, mask=live, other=0) // chosen).to(tl.int64)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = x + (source * x_stride)[:, None] + column
    mask = live[:, None] & (column < size)
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if SWIGLU:
        up = tl.load(at + size, mask=mask, other=0.0).to(tl.float32)
        value = swiglu(value, up, limit).to(tl.bfloat16).to(tl.float32)
    power, inverse = a8_scale(value)
    to = codes + (row * columns)[:, None] + column
    tl.store(to, to_e4m3(value * inverse[:, None]), mask=live[:, None])
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    for i in tl.static_range(COPIES):
        at = scales + (i * (columns // 128) + group) * scale_stride + row - i
        tl.store(at, scale, mask=live & (row >= i))


def make_a8_rows(x, name: str, *, groups=None, chosen=1, copies=1, limit=None) -> A8Rows:
    """`x` `[rows, size]` quantised into the workspace `name`; with `groups` and `chosen` experts
    per token, a row per pair. `copies` of the scales. `limit`: see above."""
    size = x.shape[1] if limit is None else x.shape[1] // 2
    count = x.shape[0] * chosen if groups is not None else x.shape[0]
    columns = triton.cdiv(size, A8_GROUP) * A8_GROUP
    stride = triton.cdiv(count, 4) * 4  # descriptors need multiples of 16 bytes
    codes = workspace(x.device, f"{name}_codes", count * columns, torch.uint8)
    codes = codes[: count * columns].view(torch.float8_e4m3fn).view(count, columns)
    lines = copies * columns // A8_GROUP
    scales = workspace(x.device, f"{name}_scales", lines * stride, torch.float32)
    scales = scales[: lines * stride].view(lines, stride)
    tall = copies > 1 or count >= TALL
    across = TALL_GROUPS if tall else triton.next_power_of_2(columns // A8_GROUP)
    num = TALL_ROWS if tall else 1
    _a8_rows_kernel[(triton.cdiv(count, num), triton.cdiv(columns // A8_GROUP, across))](
        x, x.stride(0), size, codes, columns, scales, stride, count,
        x if groups is None else groups.sorted_pairs, chosen, limit or 0.0,
        GATHER=groups is not None, SWIGLU=limit is not None, COPIES=copies, ROWS=num, GROUPS=across,
        **dependent_options(x.device, ROW_WARPS if across <= 64 else 8, early=count <= EARLY_ROWS),
    )  # fmt: skip
    return A8Rows(codes, scales)
