# mypy: ignore-errors
"""The first launch of mHC: the update of the streams and the projection that reads them.

The projection is computed in chunks of CHANNELS channels, all streams of a chunk in one sum. Every
GROUPS-th chunk belongs to the same group; chunks of a group are added in ascending order, then (by
the second launch) the groups. With few tokens each chunk has its own program; with many, a program
loops over a group, concurrently with those of adjacent chunks: same sums, same bits. Updated
streams are bf16, so the product with the fp32 matrix is split into three bf16 products that are
exact together, each with its own accumulator. 16 adjacent channels of one stream share one
tensor-core product, and a chunk's products are ordered by stream, then by channel. The sum of
squares uses the same order.
"""

import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import append, depend

CHANNELS = 32
GROUPS = 8
STAGES = 3  # of the loop over a group


@triton.jit
def _dot_parts(v, f, sums, DT: tl.constexpr):
    """Add `v . f` to `sums`, for `v` of dtype DT and fp32 `f`. bf16: separate sums for the high,
    middle and low part of `f`, three independent chains of exact products."""
    if tl.bfloat16 == DT:
        high = f.to(tl.bfloat16)
        rest = f - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        v = v.to(tl.bfloat16)
        return tl.dot(v, high, sums[0]), tl.dot(v, middle, sums[1]), tl.dot(v, low, sums[2])
    else:
        return tl.dot(v.to(tl.float32), f, sums[0], input_precision="ieee"), sums[1], sums[2]


@triton.jit
def _add_parts(high, middle, low, BM: tl.constexpr, RPAD: tl.constexpr):
    """high + (middle + low). The compiler would fold a plain sum into the start of a chain, but
    only if that chain is a single `tl.dot`: variants would then differ in bits."""
    one = tl.full((BM, RPAD), 1.0, tl.float32)
    return tl.fma(high, one, tl.fma(middle, one, low))


@triton.jit
def _sum_halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum of `x` `[ROWS, COLUMNS, 32]` along the last axis, neighbours first: the same order in
    every thread layout."""
    x = x.reshape(ROWS, COLUMNS, 2, 2, 2, 2, 2)
    for level in tl.static_range(5):
        x = tl.sum(x, axis=6 - level)
    return x


@triton.jit
def _in_tiles(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Permute columns within each 16, which changes no bit of a product: a thread then multiplies
    the four adjacent columns that it loads."""
    x = x.reshape(ROWS, COLUMNS // 16, 4, 2, 2).permute(0, 1, 3, 2, 4)
    return x.reshape(ROWS, COLUMNS)


@triton.jit
def _made_once(x):
    """bf16 `x`, computed once; the compiler would otherwise redo it in the product's layout."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
    )


@triton.jit
def _add_partial_sums(
    values, factor, channel, D: tl.constexpr, PARTIAL_SUMS: tl.constexpr, RANGES: tl.constexpr,
    FACTORS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """`PartialSums.total` of one row's channels: PARTIAL_SUMS groups of RANGES."""
    total = tl.zeros((BD,), tl.float32)
    for group in tl.static_range(PARTIAL_SUMS):
        part = tl.zeros((BD,), tl.float32)
        for index in tl.static_range(RANGES):
            at = (group * RANGES + index) * D + channel
            part += tl.load(values + at, mask=channel < D, other=0.0)
        total += part
    if FACTORS > 0:
        total = total * tl.load(factor + channel // (D // FACTORS), mask=channel < D, other=0.0)
    return total


@triton.jit
def coefficients_of(post, comb, row64, live, N: tl.constexpr):
    """Per token and new stream: the coefficients of the old streams, then the one of `y`."""
    found = ()
    for k in tl.static_range(N):
        for j in tl.static_range(N):
            at = comb + row64 * (N * N) + j * N + k
            found = append(found, tl.load(at, mask=live, other=0.0))
        found = append(found, tl.load(post + row64 * N + k, mask=live, other=0.0))
    return found


@triton.jit
def old_streams(streams, at, mask, N: tl.constexpr, D: tl.constexpr):
    old = ()
    for j in tl.static_range(N):
        old = append(old, tl.load(streams + at + j * D, mask=mask, other=0.0).to(tl.float32))
    return old


@triton.jit
def new_row(
    y, factor, row64, channel, mask, D: tl.constexpr, PARTIAL_SUMS: tl.constexpr,
    RANGES: tl.constexpr, FACTORS: tl.constexpr, BD: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The half-block's result, rounded to DT, in fp32; PARTIAL_SUMS > 0: of one token."""
    if PARTIAL_SUMS == 0:
        at = (row64 * D)[:, None] + channel[None, :]
        return tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    else:
        whole = _add_partial_sums(y, factor, channel, D, PARTIAL_SUMS, RANGES, FACTORS, BD)
        return tl.where(mask, whole.to(DT).to(tl.float32)[None, :], 0.0)


@triton.jit
def new_stream(
    old, new, coefficients, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    v = tl.zeros((BM, BD), tl.float32)
    for j in tl.static_range(N):
        m = coefficients[K * (N + 1) + j]
        v = tl.fma(old[j], m[:, None].broadcast_to(BM, BD), v)
    q = coefficients[K * (N + 1) + N]
    return tl.fma(new, q[:, None].broadcast_to(BM, BD), v)


@triton.jit(do_not_specialize=["num_tokens"])
def few_update_kernel(
    streams, y, factor, post, comb, fn, out, partials, num_tokens,
    N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, RPAD: tl.constexpr,
    UPDATE: tl.constexpr, PARTIAL_SUMS: tl.constexpr, RANGES: tl.constexpr, FACTORS: tl.constexpr,
    TM: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, DT: tl.constexpr, ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One chunk of TM tokens (1 or BM), four bf16 streams; same result as `update_kernel`.

    All streams form one product with K = 4 BD. A thread multiplies the part of `fn` that it loads;
    only the new streams go through shared memory, once. A single token has one thread per stream
    and channel.
    """
    K: tl.constexpr = N * BD
    WIDTH: tl.constexpr = K if TM == 1 else BD
    chunk = tl.program_id(0)
    token = tl.program_id(1) * BM + tl.arange(0, TM)
    live = token < num_tokens
    row64 = token.to(tl.int64)
    # [row, group of 16 columns, 16]: a warp loads eight rows, four threads each
    row = tl.arange(0, RPAD)[:, None, None]
    group = tl.arange(0, K // 16)[None, :, None]
    place = tl.arange(0, 16)[None, None, :]
    f_channel = chunk * BD + group % (BD // 16) * 16 + place
    f_at = fn + row * (N * D) + group // (BD // 16) * D + f_channel
    f = tl.load(f_at, mask=(row < ROWS) & (f_channel < D), other=0.0)
    depend(DEPENDENT)
    column = tl.arange(0, WIDTH)
    channel = chunk * BD + column % BD
    mask = live[:, None] & (channel < D)[None, :]
    at = (row64 * (N * D))[:, None] + channel[None, :]
    v = old_streams(streams, at, mask, N, D)
    if UPDATE:
        old = v
        new = new_row(y, factor, row64, channel, mask, D, PARTIAL_SUMS, RANGES, FACTORS, WIDTH, DT)
        coefficients = coefficients_of(post, comb, row64, live, N)
        tl.debug_barrier()  # otherwise loads of `fn` would wait for the streams
        v = ()
        for k in tl.static_range(N):
            v = append(v, new_stream(old, new, coefficients, k, N, TM, WIDTH).to(DT))
    if TM == 1:
        stream = (column // BD)[None, :]
        low = tl.where(stream == 0, v[0], v[1])
        both = tl.where(stream < 2, low, tl.where(stream == 2, v[2], v[3])).to(DT)
        if UPDATE:
            tl.store(out + at + stream * D, both, mask=mask)
    else:
        if UPDATE:
            for k in tl.static_range(N):
                tl.store(out + at + k * D, v[k], mask=mask)
        both = tl.join(tl.join(v[0].to(DT), v[1].to(DT)), tl.join(v[2].to(DT), v[3].to(DT)))
        both = both.permute(0, 3, 2, 1).reshape(TM, K)
    if ONCE:
        both = _made_once(both)
    both = _in_tiles(both, TM, K).broadcast_to(BM, K)
    zero = tl.zeros((BM, RPAD), tl.float32)
    f = tl.trans(_in_tiles(f.reshape(RPAD, K), RPAD, K))
    high, middle, low = _dot_parts(both, f, (zero, zero, zero), DT)
    squares = tl.zeros((TM, WIDTH), tl.float32)
    for k in tl.static_range(N):
        squares = tl.fma(v[k].to(tl.float32), v[k].to(tl.float32), squares)
    squares = _sum_halves(squares.reshape(TM, WIDTH // BD, BD), TM, WIDTH // BD)
    part64 = chunk.to(tl.int64) * num_tokens
    first = tl.arange(0, WIDTH // BD)[None, :]  # all equal
    at = partials + (part64 + row64)[:, None] * RPAD + ROWS + first * 0
    tl.store(at, squares, mask=live[:, None] & (first == 0))
    rows = tl.arange(0, RPAD)
    token = tl.program_id(1) * BM + tl.arange(0, BM)
    at = (part64 + token.to(tl.int64))[:, None] * RPAD + rows[None, :]
    mask = (token < num_tokens)[:, None] & (rows < ROWS)[None, :]
    tl.store(partials + at, _add_parts(high, middle, low, BM, RPAD), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def update_kernel(
    streams, y, factor, post, comb, fn, out, partials, num_tokens,
    N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, RPAD: tl.constexpr,
    UPDATE: tl.constexpr, PARTIAL_SUMS: tl.constexpr, RANGES: tl.constexpr, FACTORS: tl.constexpr,
    COUNT: tl.constexpr, STRIDE: tl.constexpr, STAGES: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, DT: tl.constexpr, ONCE: tl.constexpr
):  # fmt: skip
    """Process COUNT chunks: write new streams to `out`, and the projection with (in the next
    column) the sum of squares to `partials`."""
    part = tl.program_id(0)
    token = tl.program_id(1) * BM + tl.arange(0, BM)
    live = token < num_tokens
    rows = tl.arange(0, RPAD)
    row64 = token.to(tl.int64)
    total = tl.zeros((BM, RPAD), tl.float32)
    total_squares = tl.zeros((BM,), tl.float32)
    coefficients = ()
    if UPDATE:
        coefficients = coefficients_of(post, comb, row64, live, N)
    for chunk in tl.range(part, part + COUNT * STRIDE, STRIDE, num_stages=STAGES):
        channel = chunk * BD + tl.arange(0, BD)
        inside = channel < D
        mask = live[:, None] & inside[None, :]
        at = (row64 * (N * D))[:, None] + channel[None, :]
        zero = tl.zeros((BM, RPAD), tl.float32)
        high, middle, low = zero, zero, zero
        squares = tl.zeros((BM, BD), tl.float32)
        old = old_streams(streams, at, mask, N, D)
        if UPDATE:
            new = new_row(y, factor, row64, channel, mask, D, PARTIAL_SUMS, RANGES, FACTORS, BD, DT)
        for k in tl.static_range(N):
            f_at = rows[None, :] * (N * D) + k * D + channel[:, None]
            f_mask = inside[:, None] & (rows < ROWS)[None, :]
            f = tl.load(fn + f_at, mask=f_mask, other=0.0)
            v = old[k]
            if UPDATE:
                v = new_stream(old, new, coefficients, k, N, BM, BD).to(DT)
                if ONCE:
                    v = _made_once(v)
                tl.store(out + at + k * D, v, mask=mask)
                v = v.to(tl.float32)
            squares = tl.fma(v, v, squares)
            high, middle, low = _dot_parts(v, f, (high, middle, low), DT)
        total = total + _add_parts(high, middle, low, BM, RPAD)
        total_squares = total_squares + _sum_halves(squares.reshape(BM, 1, BD), BM, 1).reshape(BM)
    at = (part.to(tl.int64) * num_tokens + row64) * RPAD
    tl.store(partials + at + ROWS, total_squares, mask=live)
    used = live[:, None] & (rows < ROWS)[None, :]
    tl.store(partials + at[:, None] + rows[None, :], total, mask=used)
