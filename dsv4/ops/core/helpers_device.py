# mypy: ignore-errors
"""Device code for tuples, rounding and conversion that several families share."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.ops.core.gpu import describe


@triton.jit
def append(values, value):
    return values + (value,)  # noqa: RUF005 - the compiler does not know unpacking


@triton.jit
def narrow(x, DT: tl.constexpr, ASM: tl.constexpr):
    """fp32 `x` as DT; bf16 is converted in pairs. If the compiler saw a later conversion to fp32,
    it would convert one value at a time, in a slow unit."""
    if ASM and tl.bfloat16 == DT:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return x.to(DT)


@triton.jit
def widen(x, ASM: tl.constexpr):
    """`x` as fp32; one instruction per bf16 value."""
    if ASM and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=f,=f,r", [x],
            dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(tl.float32)


@triton.jit
def through_bf16(x, ASM: tl.constexpr):
    """fp32 `x`, rounded to bf16; see `narrow`."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; "
            "shl.b32 $0, t, 16; and.b32 $1, t, 0xFFFF0000; }",
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def times_rounded(x, factor, ASM: tl.constexpr):
    """fp32 `x * factor`, rounded; never contracted into an FMA with a following addition."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, factor], dtype=tl.float32, is_pure=True, pack=1
        )
    return x * factor


@triton.jit
def swiglu(gate, up, limit):
    gate = tl.minimum(gate, limit, tl.PropagateNan.ALL)  # otherwise NaN would become the limit
    up = tl.minimum(tl.maximum(up, -limit, tl.PropagateNan.ALL), limit, tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def depend(DEPENDENT: tl.constexpr):
    """Programs that started early wait for the previous launch to complete; then the next launch
    may start. Before this call a kernel may read weights and data written two launches ago, and
    must not write."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


def converts_e4m3(_semantic=None):
    """Whether the target GPU converts E4M3 in hardware (sm_89 and newer)."""
    if _semantic is None:  # Triton's interpreter
        return describe(torch.device("cpu")).converts_fp8
    return tl.constexpr("fp8e4nv" in _semantic.builder.options.supported_fp8_dtypes)


converts_e4m3.__triton_builtin__ = True


@triton.jit
def from_e4m3(codes, DT: tl.constexpr):
    """E4M3 codes (uint8, or the result of `to_e4m3`) as DT, exactly."""
    if converts_e4m3():
        return codes.to(tl.float8e4nv, bitcast=True).to(DT)
    else:
        return e4m3_bits_to_half(codes).to(DT)


@triton.jit
def to_e4m3(x):
    """fp32 to E4M3, rounded to nearest, ties to even, saturating at 448; uint8 codes if the GPU
    lacks the type."""
    if converts_e4m3():
        return x.to(tl.float8e4nv)
    else:
        return e4m3_bits(x)


@triton.jit
def e4m3_bits_to_half(codes):
    """All 256 codes to fp16: its subnormals cover those of E4M3, 2^8 times smaller."""
    bits = codes.to(tl.int16)
    size = bits & 0x7F
    value = (((bits & 0x80) << 8) | (size << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where(size == 0x7F, float("nan"), value)


@triton.jit
def e4m3_bits(x):
    """`to_e4m3` with operations that every GPU has. Below 2^-6 all steps are 2^-9, the last place
    of 2^14 in fp32, so adding 2^14 rounds."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # exponents 120 lower
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
