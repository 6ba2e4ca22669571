# mypy: ignore-errors
"""The mixing matrix of a token from its logits: softmax of rows, then rows and columns in turn."""

import triton
import triton.language as tl

from dsv4.ops.device import times_rounded
from dsv4.ops.kv.entry_triton import append


@triton.jit
def _reciprocal(x, ASM: tl.constexpr):
    """1 / x to the last bit but one; a division would be ten instructions of every warp."""
    if ASM:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def _normal4(a, b, c, d, eps, ASM: tl.constexpr):
    """Four numbers divided by their sum + eps."""
    r = _reciprocal(((a + b) + (c + d)) + eps, ASM)
    a, b = times_rounded(a, r, ASM), times_rounded(b, r, ASM)
    return a, b, times_rounded(c, r, ASM), times_rounded(d, r, ASM)


@triton.jit
def _softmax4(logits, eps, ASM: tl.constexpr):
    a, b, c, d = logits
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    a, b, c, d = _normal4(a, b, c, d, 0.0, ASM)
    return a + eps, b + eps, c + eps, d + eps


@triton.jit
def _store4(out, a, b, c, d):
    tl.store(out, a)
    tl.store(out + 1, b)
    tl.store(out + 2, c)
    tl.store(out + 3, d)


@triton.jit
def sinkhorn4(logits, out, eps, ITERS: tl.constexpr, ASM: tl.constexpr):
    """4 x 4, an entry a number or a vector over tokens: sums need no exchange of threads."""
    a0, a1, a2, a3 = _softmax4(logits[:4], eps, ASM)
    b0, b1, b2, b3 = _softmax4(logits[4:8], eps, ASM)
    c0, c1, c2, c3 = _softmax4(logits[8:12], eps, ASM)
    d0, d1, d2, d3 = _softmax4(logits[12:], eps, ASM)
    a0, b0, c0, d0 = _normal4(a0, b0, c0, d0, eps, ASM)
    a1, b1, c1, d1 = _normal4(a1, b1, c1, d1, eps, ASM)
    a2, b2, c2, d2 = _normal4(a2, b2, c2, d2, eps, ASM)
    a3, b3, c3, d3 = _normal4(a3, b3, c3, d3, eps, ASM)
    for _ in tl.range(0, ITERS - 1):
        a0, a1, a2, a3 = _normal4(a0, a1, a2, a3, eps, ASM)
        b0, b1, b2, b3 = _normal4(b0, b1, b2, b3, eps, ASM)
        c0, c1, c2, c3 = _normal4(c0, c1, c2, c3, eps, ASM)
        d0, d1, d2, d3 = _normal4(d0, d1, d2, d3, eps, ASM)
        a0, b0, c0, d0 = _normal4(a0, b0, c0, d0, eps, ASM)
        a1, b1, c1, d1 = _normal4(a1, b1, c1, d1, eps, ASM)
        a2, b2, c2, d2 = _normal4(a2, b2, c2, d2, eps, ASM)
        a3, b3, c3, d3 = _normal4(a3, b3, c3, d3, eps, ASM)
    _store4(out, a0, a1, a2, a3)
    _store4(out + 4, b0, b1, b2, b3)
    _store4(out + 8, c0, c1, c2, c3)
    _store4(out + 12, d0, d1, d2, d3)


@triton.jit
def sinkhorn(z, row, out, eps, N: tl.constexpr, NP: tl.constexpr, ITERS: tl.constexpr):
    """N x N as a tile; `z` holds entry (j, k) at row 2N + jN + k."""
    j = tl.arange(0, NP)[:, None]
    k = tl.arange(0, NP)[None, :]
    live = (j < N) & (k < N)
    place = 2 * N + j * N + k
    m = tl.sum(tl.where(place[:, :, None] == row[None, None, :], z[None, None, :], 0.0), axis=2)
    m = tl.where(live, m, float("-inf"))
    top = tl.max(m, axis=1)
    m = tl.exp(m - tl.where(tl.arange(0, NP) < N, top, 0.0)[:, None])
    m = tl.where(live, m / tl.maximum(tl.sum(m, axis=1), 1e-30)[:, None] + eps, 0.0)
    m = m / (tl.sum(m, axis=0) + eps)[None, :]
    for _ in tl.range(0, ITERS - 1):
        m = m / (tl.sum(m, axis=1) + eps)[:, None]
        m = m / (tl.sum(m, axis=0) + eps)[None, :]
    tl.store(out + j * N + k, m, mask=live)


@triton.jit(do_not_specialize=["num_tokens"])
def comb_kernel(
    logits, comb, num_tokens, eps,
    RPAD: tl.constexpr, ITERS: tl.constexpr, BM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The mixing matrices of BM tokens from the logits that `_mix_kernel` left."""
    token = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    token = tl.minimum(token, num_tokens - 1)  # the last one again and again, to the same place
    entries = ()
    for i in tl.static_range(16):
        entries = append(entries, tl.load(logits + token * RPAD + 8 + i))
    sinkhorn4(entries, comb + token * 16, eps, ITERS, ASM)
