# mypy: ignore-errors
"""NVFP4 weights written out as bf16, for products with so many rows that they are read again and
again."""

import triton
import triton.language as tl

from dsv4.ops.device import whole_tile


@triton.jit
def dot_expanded(
    weight, x, x_rows, x_mask, first, last, total_steps, num_columns,
    BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """`dot_nvfp4` on weights that `expand_kernel` has written out: BN rows of bf16."""
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
def expand_kernel(words, codes, out, total_steps, ASM: tl.constexpr):
    """One tile as bf16 without its global."""
    step = tl.program_id(0)
    row_tile = tl.program_id(1).to(tl.int64)
    rn = tl.arange(0, 64)
    tile = row_tile * total_steps + step
    w_ptrs = words + tile * 2048 + (rn * 16)[:, None] + tl.arange(0, 16)[None, :]
    code = tl.load(codes.to(tl.pointer_type(tl.int64), bitcast=True) + tile * 64 + rn)
    weights = whole_tile(tl.load(w_ptrs), tl.load(w_ptrs + 1024), code, 64, ASM)
    row = (row_tile * 64 + rn) * (total_steps * 128) + step * 128
    tl.store(out + row[:, None] + tl.arange(0, 128)[None, :], weights)
