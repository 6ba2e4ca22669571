# mypy: ignore-errors
"""What products with many rows do beforehand: NVFP4 weights written out as bf16, inputs put in the
order of summation. Both are read again and again then."""

import triton
import triton.language as tl

from dsv4.ops.device import (
    column_of,
    half_scale,
    launch_options,
    whole_tile,
    workspace,
)

ARRANGE_ROWS = 256  # from here on inputs are put in the order of summation


@triton.jit
def dot_expanded(
    weight, x, x_rows, x_mask, first, last, total_steps, num_columns,
    BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr,
    ARRANGED: tl.constexpr,
):  # fmt: skip
    """`dot_nvfp4` on weights that `expand_kernel` has written out: BN rows of bf16."""
    rn = tl.arange(0, BN)
    rk = tl.arange(0, 64)
    columns = rk if ARRANGED else column_of(rk)
    offsets = x_rows[None, :] + columns[:, None]
    w_ptrs = weight + (rn * (total_steps * 128) + first * 128)[:, None] + rk[None, :]
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for step in tl.range(first * 2, last * 2, num_stages=STAGES):
        base = step * 64 if ARRANGED else (step // 2) * 128 + (step % 2) * 8
        mask = x_mask[None, :]
        if not EVEN_K:
            mask = mask & (base + columns < num_columns)[:, None]
        part = tl.load(x + base + offsets, mask=mask, other=0.0)
        acc = tl.dot(tl.load(w_ptrs), part, acc)
        w_ptrs += 64
    return acc


@triton.jit
def expand_kernel(words, codes, out, total_steps, ASM: tl.constexpr):
    """One tile as bf16 without its global, its columns in the order of summation."""
    step = tl.program_id(0)
    row_tile = tl.program_id(1).to(tl.int64)
    rn = tl.arange(0, 64)
    tile = row_tile * total_steps + step
    w_ptrs = words + tile * 2048 + (rn * 16)[:, None] + tl.arange(0, 16)[None, :]
    code = tl.load(codes + tile * 256 + (rn * 4)[:, None] + tl.arange(0, 4)[None, :])
    weights = whole_tile(
        tl.load(w_ptrs),
        tl.load(w_ptrs + 1024),
        half_scale(code, 0, 64),
        half_scale(code, 1, 64),
        64,
        ASM,
    )
    row = (row_tile * 64 + rn) * (total_steps * 128) + step * 128
    tl.store(out + row[:, None] + tl.arange(0, 128)[None, :], weights)


@triton.jit(do_not_specialize=["num_rows"])
def _arrange_kernel(x, out, x_stride, num_rows, BM: tl.constexpr, BK: tl.constexpr):
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    place = tl.program_id(1) * BK + tl.arange(0, BK)
    column = place // 128 * 128 + column_of(place % 128)
    mask = (row < num_rows)[:, None] & (place >= 0)[None, :]
    found = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask)
    width = tl.num_programs(1) * BK
    tl.store(out + row[:, None] * width + place[None, :], found, mask=mask)


def arranges(num_rows: int, columns: int) -> bool:
    return num_rows >= ARRANGE_ROWS and columns % 128 == 0


def arranged(x):
    """`x` `[rows, K]` with the columns of each 128 in the order in which they are summed: with many
    rows, products that read it again and again then load whole lines."""
    rows, columns = x.shape
    out = workspace(x.device, "arranged", rows * columns, x.dtype)[: rows * columns]
    _arrange_kernel[(triton.cdiv(rows, 16), columns // 128)](
        x, out, x.stride(0), rows, BM=16, BK=128, **launch_options(4)
    )
    return out.view(rows, columns)
