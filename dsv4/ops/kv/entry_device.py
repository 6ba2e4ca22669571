# mypy: ignore-errors
"""Device code for cache entries: Hadamard rotation, rounding, storage; pools as arguments.

Every function takes fp32 values already rounded to the activation dtype where the reference rounds
them. Nothing here depends on how many rows a launch has.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import to_e4m3
from dsv4.ops.kv.rope_device import rope_tile

FP32, BF16, FP8, INDEX_FP8, INDEX_FP4 = 0, 1, 2, 3, 4


@triton.constexpr_function
def _rounds(dim):
    return dim.bit_length() - 1


@triton.constexpr_function
def unit(dim):
    return 1.0 / math.sqrt(dim)


@triton.jit
def hadamard_tile(x, R: tl.constexpr, DIM: tl.constexpr):
    """Orthonormal rotation of fp32 `[R, DIM]`, with the reference's sums.

    Each round moves the lowest index bit to the top; after the last one the order is restored.
    """
    for _ in tl.static_range(_rounds(DIM)):
        u, v = tl.split(x.reshape(R, DIM // 2, 2))
        x = tl.trans(tl.join(u + v, u - v), 0, 2, 1).reshape(R, DIM)
    return x * unit(DIM)


@triton.jit
def hadamard_sums(y, DIM: tl.constexpr, R: tl.constexpr):
    """`hadamard_tile` of transposed fp32 `[DIM, R]`, without its factor. With one warp each sum is
    one of a thread's registers: data leaves them once, on the way."""
    for _ in tl.static_range(_rounds(DIM)):
        u, v = tl.split(tl.trans(y.reshape(DIM // 2, 2, R), 0, 2, 1))
        y = tl.trans(tl.join(u + v, u - v), 2, 0, 1).reshape(DIM, R)
    return y


@triton.jit
def ceil_exponent(amax, LIMIT_BITS: tl.constexpr):
    """The smallest k with amax <= limit * 2^k, from the bits of both."""
    bits = amax.to(tl.int32, bitcast=True)
    above = (bits & 0x7FFFFF) > (LIMIT_BITS & 0x7FFFFF)
    return (bits >> 23) - (LIMIT_BITS >> 23) + above.to(tl.int32)


@triton.jit
def scale_byte(exponent):
    return tl.minimum(tl.maximum(exponent + 127, 0), 254)


@triton.jit
def power_of_two(byte):
    """fp32 2^(byte - 127) for E8M0 bytes 0 to 254."""
    return tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_groups(x, live):
    """`[groups, channels]` fp32 -> E4M3 of the scaled values, exponents `[groups]`."""
    amax = tl.max(tl.where(live, tl.abs(x), 0.0), axis=1)
    exponent = ceil_exponent(tl.maximum(amax, 1e-4), 0x43E00000)  # 448
    y = x * power_of_two(scale_byte(-exponent))[:, None]
    return to_e4m3(tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)), exponent


@triton.jit
def _fp4_exponent(amax):
    return ceil_exponent(tl.maximum(amax, 7.052966104933725e-38), 0x40C00000)  # 6 * 2^-126; 6


@triton.jit
def fp4_groups(x):
    """`[groups, channels]` fp32 -> E2M1 codes (int32), exponents `[groups]`."""
    exponent = _fp4_exponent(tl.max(tl.abs(x), axis=1))
    y = x * power_of_two(scale_byte(-exponent))[:, None]
    m = tl.abs(y)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32)
    code += (m >= 1.75).to(tl.int32) + (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32)
    code += (m > 5.0).to(tl.int32)
    sign = (y.to(tl.int32, bitcast=True) >> 28) & 8
    return code | sign, exponent


@triton.jit
def rounded(x, amax, FP8: tl.constexpr, ASM: tl.constexpr):
    """`x` rounded to scaled E4M3 or E2M1; `amax`, fp32, of its groups, broadcasts.

    E4M3 keeps three bits after the leading one, and steps of 2^-9 below 2^-6; E2M1 one bit, and
    steps of a half below 2: adding and subtracting 1.5 times a suitable power of two rounds to
    these. bf16 has room for that, and instructions for two values."""
    exponent = ceil_exponent(tl.maximum(amax, 1e-4), 0x43E00000) if FP8 else _fp4_exponent(amax)
    down, up = power_of_two(scale_byte(-exponent)), power_of_two(scale_byte(exponent))
    if ASM and x.dtype == tl.bfloat16:
        LEAST: tl.constexpr = "0x3C803C80" if FP8 else "0x3F803F80"
        STEPS: tl.constexpr = "0x02400240" if FP8 else "0x03400340"
        return tl.inline_asm_elementwise(
            "{ .reg .b32 signs, minus, least, y, large; mov.b32 signs, 0x80008000;"
            "mov.b32 minus, 0xBF80BF80; mov.b32 least, " + LEAST + ";"
            "fma.rn.bf16x2 y, $1, $2, signs; and.b32 large, y, 0x7F807F80;"
            "max.bf16x2 large, large, least; add.u32 large, large, " + STEPS + ";"
            "fma.rn.bf16x2 $0, $1, $2, large; fma.rn.bf16x2 $0, large, minus, $0;"
            "lop3.b32 $0, $0, y, signs, 0xF8; fma.rn.bf16x2 $0, $0, $3, signs; }",
            "=&r,r,r,r", [x, down.to(tl.bfloat16), up.to(tl.bfloat16)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    y = x.to(tl.float32) * down
    bits = y.to(tl.int32, bitcast=True)
    large = tl.maximum(bits & 0x7F800000, 0x3C800000 if FP8 else 0x3F800000)
    large = (large + (0x0A400000 if FP8 else 0x0B400000)).to(tl.float32, bitcast=True)
    value = ((y + large) - large).to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return (value.to(tl.float32, bitcast=True) * up).to(x.dtype)


class EntryPool(NamedTuple):
    """A pool's tensors as kernel arguments; FP8 as bytes, a dummy for a missing part."""

    data: torch.Tensor
    tail: torch.Tensor
    scale: torch.Tensor


class EntryFormat(NamedTuple):
    """Constants of a kernel that stores entries."""

    kind: int
    nope: int
    dim: int
    pad: int
    scales: int
    rope: int
    dtype: tl.dtype  # of the activations


@triton.jit
def _store_kv_fp8(x, pool, slot, F: tl.constexpr):
    channel = tl.arange(0, F.pad // 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    live = channel < F.nope
    groups = x.reshape(F.pad // 64, 64)
    codes, exponent = fp8_groups(groups, live)
    tl.store(pool.data + slot * F.nope + channel, codes.to(tl.uint8, bitcast=True), mask=live)
    tail_ptrs = pool.tail + slot * (F.dim - F.nope) + channel - F.nope
    tl.store(tail_ptrs, groups.to(tl.bfloat16), mask=(channel >= F.nope) & (channel < F.dim))
    group = tl.arange(0, F.pad // 64)
    NUM: tl.constexpr = (F.nope + 63) // 64
    scales = pool.scale + slot * F.scales
    tl.store(scales + group, scale_byte(exponent).to(tl.uint8), mask=group < NUM)
    pad = tl.arange(0, 8) + F.scales - 8
    tl.store(scales + pad, (pad * 0).to(tl.uint8), mask=pad >= NUM)


@triton.jit
def store_entry(x, pool, slot, F: tl.constexpr):
    """Write one row, fp32 `[1, pad]` rounded to F.dtype, as entry `slot` (int64) of a pool."""
    if F.kind == 0 or F.kind == 1:
        channel = tl.arange(0, F.pad)[None, :]
        out = pool.data + slot * F.dim + channel
        tl.store(out, x.to(pool.data.dtype.element_ty), mask=channel < F.dim)
    elif F.kind == 2:
        _store_kv_fp8(x, pool, slot, F)
    else:
        x = hadamard_tile(x, 1, F.dim).to(F.dtype).to(tl.float32)
        if F.kind == 3:
            channel = tl.arange(0, F.dim)[None, :]
            codes, exponent = fp8_groups(x, channel >= 0)
            tl.store(pool.data + slot * F.dim + channel, codes.to(tl.uint8, bitcast=True))
            one = tl.arange(0, 1)
            tl.store(pool.scale + slot + one, power_of_two(scale_byte(exponent)))
        else:
            codes, exponent = fp4_groups(x.reshape(F.dim // 32, 32))
            low, high = tl.split(codes.reshape(F.dim // 2, 2))
            packed = (low | (high << 4)).to(tl.uint8)
            tl.store(pool.data + slot * (F.dim // 2) + tl.arange(0, F.dim // 2), packed)
            group = tl.arange(0, F.dim // 32)
            scales = pool.scale + slot * (F.dim // 32)
            tl.store(scales + group, scale_byte(exponent).to(tl.uint8))


@triton.jit
def entry_slot(table, table_width, seq, entry, page_entries):
    """Offset (int64) of entry `entry` of a sequence from the pool's start, in entries."""
    entry = entry.to(tl.int32)
    column = (entry // page_entries) % table_width
    page = tl.load(table + seq.to(tl.int64) * table_width + column).to(tl.int64)
    return page * page_entries + entry % page_entries


@triton.jit
def finish_entry(x, norm, frequencies, position, eps, pool, slot, F: tl.constexpr):
    """Norm with weight, rope at `position`, storage; `x` fp32 `[1, pad]`, zero past the entry."""
    channel = tl.arange(0, F.pad)
    weight = tl.load(norm + channel, mask=channel < F.dim, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / F.dim + eps)
    x = (x * inverse[:, None] * weight[None, :]).to(F.dtype).to(tl.float32)
    x = rope_tile(x, position, frequencies, 1.0, 1, F.dim - F.rope, F.dim, F.pad)
    store_entry(x.to(F.dtype).to(tl.float32), pool, slot, F)


def pool_format(pool) -> int:
    if pool.format in ("fp32", "bf16"):
        return FP32 if pool.format == "fp32" else BF16
    if not pool.is_index:
        return FP8
    return INDEX_FP4 if pool.format == "fp4" else INDEX_FP8


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def pool_reason(pool) -> str | None:
    """Why the kernels do not support a pool, or None."""
    for name, part in pool.parts.items():
        if not part.is_contiguous():
            return f"pool part {name} has strides {part.stride()}, kernels need it contiguous"
    if pool.is_index and pool.format in ("fp4", "fp8") and not is_power_of_two(pool.dim):
        return f"index keys of {pool.dim} numbers, the rotation needs a power of two"
    if pool.is_index and pool.format == "fp4" and pool.dim < 32:
        return f"FP4 index keys of {pool.dim} numbers, kernels need at least 32"
    if pool.dim % 2:
        return f"entries of {pool.dim} numbers, kernels need an even number"
    return None


def entry_pool(pool) -> EntryPool:
    data = pool.data
    if data.dtype == torch.float8_e4m3fn:
        data = data.view(torch.uint8)
    return EntryPool(data, pool.parts.get("tail", data), pool.parts.get("scale", data))


def nope_dim(pool) -> int:
    """Channels before the tail, if it is stored separately."""
    return pool.data.shape[-1] if "tail" in pool.parts else pool.dim


def entry_format(pool, frequencies, dtype: torch.dtype) -> EntryFormat:
    dim, pad = pool.dim, triton.next_power_of_2(pool.dim)
    return EntryFormat(
        kind=pool_format(pool),
        nope=nope_dim(pool),
        dim=dim,
        pad=pad if pool.is_index else max(pad, 64),
        scales=pool.parts["scale"].shape[-1] if "scale" in pool.parts else 0,
        rope=2 * frequencies.shape[0],
        dtype=getattr(tl, str(dtype).removeprefix("torch.")),
    )


def index_tensors_reason(**tensors) -> str | None:
    """Why kernels cannot read one of the index tensors, or None."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int64, torch.int32) or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} with strides {tensor.stride()}, kernels read integers"
    return None
