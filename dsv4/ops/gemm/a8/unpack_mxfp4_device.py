# mypy: ignore-errors
"""MXFP4 as tiled for a8 rows -> E4M3 in the registers of a product, 64 rows and 128 columns at a
time, in Gluon: two lookups of four codes each (weights/a8.py), then signs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4.ops.gemm.a8.fp8_prompt_gluon import sums_layout

_LOW_SIZE = gl.constexpr("{ .reg .b32 s; and.b32 s, $1, 0x77777777; prmt.b32 $0, $2, $3, s; }")
_HIGH_SIZE = gl.constexpr(
    "{ .reg .b32 s; and.b32 s, $1, 0x77777777; shr.u32 s, s, 16; prmt.b32 $0, $2, $3, s; }"
)
_LOW_SIGN = gl.constexpr("lop3.b32 $0, $1, $2, 0x80808080, 0xF8;")
_HIGH_SIGN = gl.constexpr(
    "{ .reg .b32 u; shl.b32 u, $2, 4; lop3.b32 $0, $1, u, 0x80808080, 0xF8; }"
)
NEWER = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # than triton 3.6


@gluon.constexpr_function
def words_layout():
    """Words `[rows, q, s]` of 64 rows as a warpgroup's threads multiply them."""
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, 4, 4])


@gluon.jit
def viewed(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    if NEWER:
        return buffer.reinterpret(dtype, shape, layout)
    else:
        return buffer._reinterpret(dtype, shape, layout)


@gluon.jit
def unpack(words, shifts):
    """Words and shifts of 64 rows, in shared memory -> the words, and the sizes of low columns and
    of high ones: int32 `[64, q, s]`, four E4M3 codes each."""
    L: gl.constexpr = words_layout()
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    words = viewed(words, gl.int32, [64, 4, 4], LINEAR).load(L)
    shifts = shifts.reshape([64]).load(gl.SliceLayout(1, gl.SliceLayout(1, L)))
    even = gl.join(shifts & 255, (shifts >> 16) & 255)
    odd = gl.join((shifts >> 8) & 255, (shifts >> 24) & 255)
    shift = gl.join(even, odd).reshape([64, 4])
    shift = gl.convert_layout(shift, gl.SliceLayout(1, L), assert_trivial=True)
    shift = gl.expand_dims(shift, 1) | (words & 0)
    given = [words, 0x6C686000 - shift * 0x08080800, 0x7C787470 - shift * 0x08080808]
    low = gl.inline_asm_elementwise(_LOW_SIZE, "=r,r,r,r", given, gl.int32, True, 1)
    high = gl.inline_asm_elementwise(_HIGH_SIZE, "=r,r,r,r", given, gl.int32, True, 1)
    return words, low, high


@gluon.jit
def _four(codes):
    """int32 `[64, q, s]` -> E4M3 `[64, q, s, column]`; four share a register."""
    codes = gl.join(codes, codes)
    four = gl.join(codes, codes).reshape([64, 4, 4, 4])
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [four], gl.float8e4nv, True, 4
    )


@gluon.jit
def operand(words, low, high):
    """E4M3 `[64, 128]` in the registers of a product: sizes with their signs."""
    low = gl.inline_asm_elementwise(_LOW_SIGN, "=r,r,r", [low, words], gl.int32, True, 1)
    high = gl.inline_asm_elementwise(_HIGH_SIGN, "=r,r,r", [high, words], gl.int32, True, 1)
    both = gl.join(_four(low), _four(high))
    both = gl.permute(both, [0, 2, 4, 1, 3]).reshape([64, 128])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sums_layout(64), 4)
    return gl.convert_layout(both, OPERAND, assert_trivial=True)
