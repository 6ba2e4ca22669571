# mypy: ignore-errors
"""Device code for rotary embeddings; the caller rounds where the reference rounds."""

import triton
import triton.language as tl


@triton.jit
def sin_cos(angle):
    """fp32 angles -> sin, cos. The angle is reduced in fp64, accurate even at a million radians."""
    wide = angle.to(tl.float64)
    turns = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = (wide - turns * 1.5707963267948966).to(tl.float32)
    quadrant = turns.to(tl.int32) & 3
    z = r * r
    s = tl.fma(z, -1.9515295891e-4, 8.3321608736e-3)
    s = tl.fma(s, z, -1.6666654611e-1)
    s = tl.fma(s * z, r, r)
    c = tl.fma(z, 2.443315711809948e-5, -1.388731625493765e-3)
    c = tl.fma(c, z, 4.166664568298827e-2)
    c = tl.fma(c * z, z, tl.fma(z, -0.5, 1.0))
    swap = (quadrant & 1) == 1
    sine = tl.where(swap, c, s)
    cosine = tl.where(swap, s, c)
    sine = tl.where(quadrant >= 2, -sine, sine)
    cosine = tl.where((quadrant == 1) | (quadrant == 2), -cosine, cosine)
    return sine, cosine


@triton.jit
def rope_angles(
    pair, position, frequencies, SIGN: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr
):
    """A mask of the rotated pairs, channels FIRST to DIM; their sin and cos."""
    live = (pair >= FIRST // 2) & (pair < DIM // 2)
    frequency = tl.load(frequencies + pair - FIRST // 2, mask=live, other=0.0)
    sine, cosine = sin_cos(position.to(tl.float32) * frequency)
    return live, sine * SIGN, cosine


@triton.jit
def rotate(x, live, sine, cosine, R: tl.constexpr, PAD: tl.constexpr):
    """Rotate interleaved pairs of fp32 `[R, PAD]` by the angles of `rope_angles`, if `live`."""
    u, v = tl.split(x.reshape(R, PAD // 2, 2))
    # explicit FMAs: the compiler's contraction differs from kernel to kernel
    sine = sine[None, :].broadcast_to(R, PAD // 2)
    cosine = cosine[None, :].broadcast_to(R, PAD // 2)
    turned_u = tl.fma(u, cosine, -(v * sine))
    turned_v = tl.fma(v, cosine, u * sine)
    u = tl.where(live[None, :], turned_u, u)
    v = tl.where(live[None, :], turned_v, v)
    return tl.join(u, v).reshape(R, PAD)


@triton.jit
def rope_tile(
    x, position, frequencies, SIGN: tl.constexpr, R: tl.constexpr, FIRST: tl.constexpr,
    DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Rotate channels FIRST to DIM of fp32 `[R, PAD]` at one position, interleaved pairs."""
    pair = tl.arange(0, PAD // 2)
    live, sine, cosine = rope_angles(pair, position, frequencies, SIGN, FIRST, DIM)
    return rotate(x, live, sine, cosine, R, PAD)
