# mypy: ignore-errors
"""Device code for tuples, rounding and conversion that several families share."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def append(values, value):
    return values + (value,)  # noqa: RUF005 - the compiler does not know unpacking


@triton.jit
def narrow(x, DT: tl.constexpr, ASM: tl.constexpr):
    """fp32 `x` in DT; to bf16 in pairs. If the compiler sees a later conversion to fp32, it
    converts one by one in a slow unit."""
    if ASM and tl.bfloat16 == DT:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return x.to(DT)


@triton.jit
def widen(x, ASM: tl.constexpr):
    """`x` in fp32; from bf16 with one instruction each."""
    if ASM and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=f,=f,r", [x],
            dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(tl.float32)


@triton.jit
def times_rounded(x, factor, ASM: tl.constexpr):
    """fp32 `x * factor`, rounded; never contracted into an FMA with a following addition."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, factor], dtype=tl.float32, is_pure=True, pack=1
        )
    return x * factor


@triton.jit
def depend(DEPENDENT: tl.constexpr):
    """Programs that started early wait until the launch before theirs is complete, then the next
    launch may start. Before this call a kernel may read weights and what was written two launches
    ago, and it writes nothing."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
