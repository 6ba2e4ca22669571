# mypy: ignore-errors
"""`query_prepare` and `index_query` on a GPU: a program per token and block of heads."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import from_e4m3, narrow, widen
from dsv4.ops.core.launch import interpreting, launch_options
from dsv4.ops.kv import entry_device as ed
from dsv4.ops.kv import rope_triton
from dsv4.ops.kv.rope_device import rope_tile

HEADS = 16  # per program; fixed, because a head's norm is summed in this tile
INDEX_HEADS = 32  # one per thread of a warp
FORMATS = {"fp32": 0, "bf16": 1, "fp8": 3, "fp4": 4}
REGISTERS = 168  # per such thread: twelve warps per multiprocessor


@triton.jit
def _places(num_heads, row, block, BH: tl.constexpr, DIM: tl.constexpr):
    head = block * BH + tl.arange(0, BH)
    channel = tl.arange(0, triton.next_power_of_2(DIM))
    at = ((row.to(tl.int64) * num_heads + head) * DIM)[:, None] + channel[None, :]
    return at, (head < num_heads)[:, None] & (channel < DIM)[None, :]


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
    ROPE: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """FORMAT 0: none, 1: bf16, 3: rotated FP8, 4: rotated FP4. ALONE: one warp, row per thread."""
    position = tl.load(positions + row)
    at, mask = _places(num_heads, row, block, BH, DIM)
    PAD: tl.constexpr = triton.next_power_of_2(DIM)
    x = widen(tl.load(q + at, mask=mask, other=0.0), ASM)
    x = rope_tile(x, position, frequencies, 1.0, BH, DIM - ROPE, DIM, PAD)
    x = narrow(x, q.dtype.element_ty, ASM)
    if FORMAT >= 3 and ALONE:
        x = ed.hadamard_rows(x, BH, DIM, ASM)
    elif FORMAT >= 3:
        x = narrow(ed.hadamard_tile(widen(x, ASM), BH, DIM), q.dtype.element_ty, ASM)
    x = widen(x, ASM)
    if FORMAT == 1:
        x = x.to(tl.bfloat16).to(tl.float32)
    if FORMAT == 3:
        codes, exponent = ed.fp8_groups(x, tl.arange(0, PAD)[None, :] >= 0)
        x = from_e4m3(codes, tl.float32) * ed.power_of_two(ed.scale_byte(exponent))[:, None]
    if FORMAT == 4:
        x = ed.fp4_rounded(x.reshape(BH * DIM // 32, 32)).reshape(BH, DIM)
    tl.store(out + at, narrow(x, q.dtype.element_ty, ASM), mask=mask)


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
    index_heads(
        q, out, positions, frequencies, num_heads, tl.program_id(0), tl.program_id(1),
        BH, DIM, ROPE, FORMAT, ASM, True,
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
