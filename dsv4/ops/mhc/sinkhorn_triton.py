# mypy: ignore-errors
"""Sinkhorn: a token's mixing matrix from its logits. Row softmax, then rows and columns in turn.

An iteration on a 4 x 4 matrix is a chain of dependent instructions, so it is kept short. Rows are
not divided by their sums but multiplied by those of the other rows; the column normalisation
removes the common factor. Four reciprocals become one, of the product. Row and column sums are
between 1/4 and 4, so nothing overflows, and eps matters only in the columns, which come last. The
matrix itself is multiplied only every other iteration.
"""

import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import append, times_rounded


@triton.jit
def _reciprocal(x, ASM: tl.constexpr):
    """1 / x, accurate to the last bit but one; a division takes ten instructions per warp."""
    if ASM:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def _others(a, b, c, d):
    """For each of four numbers the product of the other three; and the product of all."""
    ab = a * b
    cd = c * d
    return b * cd, a * cd, d * ab, c * ab, ab * cd


@triton.jit
def _inverses(a, b, c, d, ASM: tl.constexpr):
    p, q, r, s, product = _others(a, b, c, d)
    f = _reciprocal(product, ASM)
    return p * f, q * f, r * f, s * f


@triton.jit
def _dot4(a, b, c, d, p, q, r, s, more):
    """ap + bq + cr + ds + more with explicit FMAs: the same bits wherever it is compiled."""
    return tl.fma(a, p, b * q) + tl.fma(c, r, tl.fma(d, s, more))


@triton.jit
def _columns(m, w0, w1, w2, w3, eps, ASM: tl.constexpr):
    """Row factors from row sums, and the factors of the resulting columns, as two tuples."""
    u0, u1, u2, u3, all_rows = _others(w0, w1, w2, w3)
    least = eps * all_rows
    c0 = _dot4(m[0], m[4], m[8], m[12], u0, u1, u2, u3, least)
    c1 = _dot4(m[1], m[5], m[9], m[13], u0, u1, u2, u3, least)
    c2 = _dot4(m[2], m[6], m[10], m[14], u0, u1, u2, u3, least)
    c3 = _dot4(m[3], m[7], m[11], m[15], u0, u1, u2, u3, least)
    return (u0, u1, u2, u3), _inverses(c0, c1, c2, c3, ASM)


@triton.jit
def _scaled(m, u, v, ASM: tl.constexpr):
    """Rows of `m` multiplied by `u`, columns by `v`."""
    out = ()
    for i in tl.static_range(16):
        out = append(out, times_rounded(m[i] * u[i // 4], v[i % 4], ASM))
    return out


@triton.jit
def _one_turn(m, eps, ASM: tl.constexpr):
    """Rows, then columns."""
    w0 = (m[0] + m[1]) + (m[2] + m[3])
    w1 = (m[4] + m[5]) + (m[6] + m[7])
    w2 = (m[8] + m[9]) + (m[10] + m[11])
    w3 = (m[12] + m[13]) + (m[14] + m[15])
    return _columns(m, w0, w1, w2, w3, eps, ASM)


@triton.jit
def _two_turns(m, eps, ASM: tl.constexpr):
    _, v = _one_turn(m, eps, ASM)
    w0 = tl.fma(m[0], v[0], m[1] * v[1]) + tl.fma(m[2], v[2], m[3] * v[3])
    w1 = tl.fma(m[4], v[0], m[5] * v[1]) + tl.fma(m[6], v[2], m[7] * v[3])
    w2 = tl.fma(m[8], v[0], m[9] * v[1]) + tl.fma(m[10], v[2], m[11] * v[3])
    w3 = tl.fma(m[12], v[0], m[13] * v[1]) + tl.fma(m[14], v[2], m[15] * v[3])
    return _columns(m, w0, w1, w2, w3, eps, ASM)


@triton.jit
def _softmax4(a, b, c, d, eps, ASM: tl.constexpr):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    r = _reciprocal((a + b) + (c + d), ASM)
    return tl.fma(a, r, eps), tl.fma(b, r, eps), tl.fma(c, r, eps), tl.fma(d, r, eps)


@triton.jit
def sinkhorn(logits, out, eps, ITERS: tl.constexpr, ASM: tl.constexpr):
    """An entry is a scalar or a vector over tokens, so sums need no thread exchange."""
    m = ()
    for i in tl.static_range(4):
        row = _softmax4(
            logits[4 * i], logits[4 * i + 1], logits[4 * i + 2], logits[4 * i + 3], eps, ASM
        )
        m = m + row
    _, first = _columns(m, 1.0, 1.0, 1.0, 1.0, eps, ASM)
    m = _scaled(m, (1.0, 1.0, 1.0, 1.0), first, ASM)
    for _ in tl.range(0, (ITERS - 1) // 2):
        u, v = _two_turns(m, eps, ASM)
        m = _scaled(m, u, v, ASM)
    if ITERS % 2 == 0:
        u, v = _one_turn(m, eps, ASM)
        m = _scaled(m, u, v, ASM)
    for i in tl.static_range(16):
        tl.store(out + i, m[i])


@triton.jit(do_not_specialize=["num_tokens"])
def comb_kernel(
    logits, comb, num_tokens, eps,
    RPAD: tl.constexpr, ITERS: tl.constexpr, BM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The mixing matrices of BM tokens, from the logits that `_mix_kernel` stored."""
    token = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    token = tl.minimum(token, num_tokens - 1)  # excess threads repeat the last token
    entries = ()
    for i in tl.static_range(16):
        entries = append(entries, tl.load(logits + token * RPAD + 8 + i))
    sinkhorn(entries, comb + token * 16, eps, ITERS, ASM)
