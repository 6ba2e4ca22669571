# mypy: ignore-errors
"""`query_prepare` and `index_query` on a GPU: a program per token and block of heads."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import narrow, widen
from dsv4.ops.core.launch import interpreting, launch_options
from dsv4.ops.kv import entry_device as ed
from dsv4.ops.kv import rope_triton
from dsv4.ops.kv.rope_device import rope_tile

HEADS = 16  # per program; fixed, because a head's norm is summed in this tile
INDEX_HEADS = 16  # per warp
FORMATS = {"fp32": 0, "bf16": 1, "fp8": 3, "fp4": 4}
REGISTERS = 80  # per thread of such a warp: 25 of them per multiprocessor


@triton.jit
def _places(
    num_heads, row, block, BH: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr = 1
):  # fmt: skip
    """The first of PARTS of each head."""
    head, channel = tl.arange(0, BH), tl.arange(0, triton.next_power_of_2(DIM // PARTS))
    first = (row.to(tl.int64) * num_heads + block * BH) * DIM
    mask = (block * BH + head < num_heads)[:, None] & (channel < DIM)[None, :]
    return first + (head[:, None] * DIM + channel[None, :]), mask


@triton.jit
def load_heads(q, num_heads, row, block, BH: tl.constexpr, DIM: tl.constexpr):
    """A block of a token's heads, as projected."""
    at, mask = _places(num_heads, row, block, BH, DIM)
    return tl.load(q + at, mask=mask, other=0.0)


@triton.jit
def norm_heads(found, eps, DIM: tl.constexpr, ASM: tl.constexpr):
    """The result of `load_heads`, normed without weight."""
    x = found.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
    return narrow(x * inverse[:, None], found.dtype, ASM)


@triton.jit
def turn_heads(
    normed, position, frequencies, BH: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    PAD: tl.constexpr = triton.next_power_of_2(DIM)
    x = rope_tile(normed.to(tl.float32), position, frequencies, 1.0, BH, DIM - ROPE, DIM, PAD)
    return narrow(x, normed.dtype, ASM)


@triton.jit
def store_heads(x, out, num_heads, row, block, BH: tl.constexpr, DIM: tl.constexpr):
    at, mask = _places(num_heads, row, block, BH, DIM)
    tl.store(out + at, x, mask=mask)


@triton.jit
def prepare_heads(
    q, out, positions, frequencies, eps, num_heads, row, block, BH: tl.constexpr,
    DIM: tl.constexpr, ROPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    position = tl.load(positions + row)
    found = load_heads(q, num_heads, row, block, BH, DIM)
    x = norm_heads(found, eps, DIM, ASM)
    x = turn_heads(x, position, frequencies, BH, DIM, ROPE, ASM)
    store_heads(x, out, num_heads, row, block, BH, DIM)


@triton.jit
def index_heads(
    q, out, positions, frequencies, num_heads, row, block, BH: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """FORMAT 0: none, 1: bf16, 3: rotated FP8, 4: rotated FP4."""
    position = tl.load(positions + row)
    at, mask = _places(num_heads, row, block, BH, DIM)
    PAD: tl.constexpr = triton.next_power_of_2(DIM)
    x = widen(tl.load(q + at, mask=mask, other=0.0), ASM)
    x = rope_tile(x, position, frequencies, 1.0, BH, DIM - ROPE, DIM, PAD)
    x = narrow(x, q.dtype.element_ty, ASM)
    if FORMAT == 1:
        x = x.to(tl.bfloat16)
    if FORMAT >= 3:
        GROUP: tl.constexpr = DIM if FORMAT == 3 else 32
        x = narrow(ed.hadamard_tile(widen(x, ASM), BH, DIM), q.dtype.element_ty, ASM)
        x = x.reshape(BH * DIM // GROUP, GROUP)
        amax = tl.max(tl.abs(widen(x, ASM)), axis=1, keep_dims=True)
        x = ed.rounded(x, amax, FORMAT == 3, ASM).reshape(BH, DIM)
    tl.store(out + at, x, mask=mask)


@triton.jit
def rotate_heads(
    q, out, positions, frequencies, num_heads, row, block, BH: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`index_heads` of FORMAT 3 and 4 for one warp: half of the channels at a time up to the last
    sums; rope turns only the second half."""
    HALF: tl.constexpr = DIM // 2
    GROUP: tl.constexpr = DIM if FORMAT == 3 else 32
    DT: tl.constexpr = q.dtype.element_ty
    position = tl.load(positions + row)
    at, mask = _places(num_heads, row, block, BH, DIM, 2)
    low = tl.load(q + at, mask=mask, other=0.0)
    high = widen(tl.load(q + at + HALF, mask=mask, other=0.0), ASM)
    high = rope_tile(high, position, frequencies, 1.0, BH, HALF - ROPE, HALF, HALF)
    u = ed.hadamard_sums(widen(tl.trans(low), ASM), HALF, BH)
    v = ed.hadamard_sums(widen(tl.trans(narrow(high, DT, ASM)), ASM), HALF, BH)
    x = tl.trans(tl.join(u + v, u - v), 2, 0, 1).reshape(DIM // GROUP, GROUP, BH) * ed.unit(DIM)
    amax = tl.max(tl.abs(x), axis=1, keep_dims=True).to(DT).to(tl.float32)
    x = ed.rounded(narrow(x, DT, ASM), amax, FORMAT == 3, ASM).reshape(DIM, BH)
    store_heads(tl.trans(x), out, num_heads, row, block, BH, DIM)


@triton.jit
def _prepare_kernel(
    q, out, positions, frequencies, eps, num_heads, BH: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    prepare_heads(
        q, out, positions, frequencies, eps, num_heads, tl.program_id(0), tl.program_id(1),
        BH, DIM, ROPE, ASM,
    )  # fmt: skip


@triton.jit
def _index_kernel(
    q, out, positions, frequencies, num_heads, BH: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    halves: tl.constexpr = FORMAT >= 3 and max(64, 2 * ROPE) <= DIM
    heads: tl.constexpr = rotate_heads if halves else index_heads
    heads(
        q, out, positions, frequencies, num_heads, tl.program_id(0), tl.program_id(1),
        BH, DIM, ROPE, FORMAT, ASM,
    )  # fmt: skip


def supports(q, positions, frequencies, eps=None, index_format=None) -> str | None:
    if index_format in ("fp4", "fp8") and (not ed.is_power_of_two(q.shape[2]) or q.shape[2] < 32):
        return f"{q.shape[2]} channels, the rotation needs a power of two from 32 on"
    return rope_triton.supports(q, positions, frequencies, inverse=False)


def run(q, positions, frequencies, eps=None, index_format=None):
    """`query_prepare` with `eps`, `index_query` with `index_format`."""
    out = torch.empty_like(q)
    sizes = {"DIM": q.shape[2], "ROPE": 2 * frequencies.shape[0], "ASM": not interpreting()}
    if index_format is None:
        _prepare_kernel[(q.shape[0], triton.cdiv(q.shape[1], HEADS))](
            q, out, positions, frequencies, eps, q.shape[1], BH=HEADS, **sizes, **launch_options(4)
        )
        return out
    _index_kernel[(q.shape[0], triton.cdiv(q.shape[1], INDEX_HEADS))](
        q, out, positions, frequencies, q.shape[1], BH=INDEX_HEADS, **sizes,
        FORMAT=FORMATS[index_format], **launch_options(1, maxnreg=REGISTERS),
    )  # fmt: skip
    return out
