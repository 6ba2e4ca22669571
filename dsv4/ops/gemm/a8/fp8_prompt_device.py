# mypy: ignore-errors
"""One tile of fp8_prompt_gluon.py: 64 weight rows by up to 64 * `pieces` input rows, in Gluon.

Copies (TMA) write the ring through another path than loads read it. A load that was issued may
still be waiting when the buffer's barrier is arrived at, and then finds the next step's numbers; so
loads are fenced before a buffer is given back. Products need no fence: their wait ends their reads.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.ops.core.helpers_device import append, swiglu

ROWS = 64  # input rows of one product
PIECE, WIDTH, BLOCK = gl.constexpr(ROWS), gl.constexpr(128), gl.constexpr(4 * ROWS)
_LOW_SIZE = gl.constexpr("{ .reg .b32 s; and.b32 s, $1, 0x77777777; prmt.b32 $0, $2, $3, s; }")
_HIGH_SIZE = gl.constexpr(
    "{ .reg .b32 s; and.b32 s, $1, 0x77777777; shr.u32 s, s, 16; prmt.b32 $0, $2, $3, s; }"
)
_LOW_SIGN = gl.constexpr("lop3.b32 $0, $1, $2, 0x80808080, 0xF8;")
_HIGH_SIGN = gl.constexpr(
    "{ .reg .b32 u; shl.b32 u, $2, 4; lop3.b32 $0, $1, u, 0x80808080, 0xF8; }"
)
NEWER = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # than triton 3.6
joined, activated = gluon.jit(append.fn), gluon.jit(swiglu.fn)


class PromptTile(NamedTuple):
    """Constants of a launch."""

    pieces: int
    stages: int
    flight: int  # products in the tensor core while another's sums are added
    fp8: bool  # FP8 weights, otherwise MXFP4 experts
    ranges: int
    end: int  # PLAIN, SWIGLU or PAIRS
    wide: bool = False  # products of 128 input rows where there are as many
    ahead: bool = False  # weights of the next step are made while products run
    direct: bool = False  # FP8 weights are multiplied from shared memory, not from registers


class PromptBuffers(NamedTuple):
    """A ring of `stages`: what is multiplied; which buffers are filled, which are free again."""

    rows: object  # by 64, or by 128 if products are wide
    odd: object  # the last 64 of an odd number, if products are wide
    scales: object
    weights: object
    words: object
    shifts: object
    full: object
    empty: object


class PromptJob(NamedTuple):
    """What is multiplied, and where results go."""

    scale: object  # of FP8 weights
    factors: object  # of MXFP4 experts
    out: object
    route: object
    token_weights: object
    num_rows: int
    size: int  # of a result row
    n_tiles: int
    items: int
    steps: int
    per_range: int
    limit: float


@gluon.constexpr_function
def words_layout():
    """Words `[rows, q, s]` of 64 rows as a warpgroup's threads multiply them."""
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, 4, 4])


@gluon.constexpr_function
def sums_layout(rows=ROWS):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 32])


@gluon.constexpr_function
def piece_rows(P, wide):
    """(first input row, rows) of each product."""
    width = 2 * ROWS if wide else ROWS
    return [(first, min(width, P * ROWS - first)) for first in range(0, P * ROWS, width)]


@gluon.constexpr_function
def outstanding(flight, left):
    """Products that may go on when the first of `left` is awaited."""
    return max(min(flight, left) - 1, 0)


@gluon.jit
def _viewed(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    if NEWER:
        return buffer.reinterpret(dtype, shape, layout)
    else:
        return buffer._reinterpret(dtype, shape, layout)


@gluon.jit
def _unpack(b, place):
    """MXFP4 of 64 rows from the ring -> int32 `[64, q, s]`, four E4M3 codes each: low columns, high
    ones."""
    L: gl.constexpr = words_layout()
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    words = _viewed(b.words.index(place), gl.int32, [64, 4, 4], LINEAR).load(L)
    shifts = b.shifts.index(place).reshape([64]).load(gl.SliceLayout(1, gl.SliceLayout(1, L)))
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
def _operand(words, low, high):
    """E4M3 `[64, 128]` in the registers of a product: sizes with their signs. Signs come last, so
    that the next step's sizes have registers of their own."""
    low = gl.inline_asm_elementwise(_LOW_SIGN, "=r,r,r", [low, words], gl.int32, True, 1)
    high = gl.inline_asm_elementwise(_HIGH_SIGN, "=r,r,r", [high, words], gl.int32, True, 1)
    both = gl.join(_four(low), _four(high))
    both = gl.permute(both, [0, 2, 4, 1, 3]).reshape([64, 128])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sums_layout(), 4)
    return gl.convert_layout(both, OPERAND, assert_trivial=True)


@gluon.jit
def _await(b, at, T: gl.constexpr):
    slot = at % T.stages
    mbarrier.wait(b.full.index(slot), at // T.stages & 1)
    return slot


@gluon.jit
def _weights(b, slot, half, T: gl.constexpr):
    """E4M3 `[64, 128]`: in shared memory, or in registers."""
    if T.direct:
        return b.weights.index(slot).slice(half * 64, 64)
    elif T.fp8:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, sums_layout(), 4)
        return b.weights.index(slot).slice(half * 64, 64).load(OPERAND)
    else:
        words, low, high = _unpack(b, slot * 2 + half)
        return _operand(words, low, high)


@gluon.jit
def _zero(N: gl.constexpr):
    return gl.zeros([64, N], gl.float32, sums_layout(N))


@gluon.jit
def _scales(b, slot, FIRST: gl.constexpr, N: gl.constexpr):
    scales = b.scales.index(slot).reshape([BLOCK]).slice(FIRST, N)
    return scales.load(gl.SliceLayout(0, sums_layout(N)))


@gluon.jit
def input_rows(b, slot, FIRST: gl.constexpr, N: gl.constexpr, T: gl.constexpr):
    """The buffer of N input rows of a step, from its row FIRST on."""
    if not T.wide:
        return b.rows.index(slot * T.pieces + FIRST // PIECE)
    elif T.pieces % 2 == 1 and (T.pieces - 1) * PIECE == FIRST:
        return b.odd.index(slot)
    else:
        SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
        rows = b.rows.index(slot * (T.pieces // 2) + FIRST // (2 * PIECE))
        return _viewed(rows, gl.float8e4nv, [N, WIDTH], SHARED)


@gluon.jit
def _start(a, b, slot, FIRST: gl.constexpr, N: gl.constexpr, T: gl.constexpr):
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sums_layout(N), 4)
    x = input_rows(b, slot, FIRST, N, T)
    if not T.direct:
        a = gl.convert_layout(a, OPERAND, assert_trivial=True)
    return warpgroup_mma(a, x.permute((1, 0)), _zero(N), use_acc=False, is_async=True)


@gluon.jit
def _zeros(P: gl.constexpr, WIDE: gl.constexpr):
    PIECES: gl.constexpr = piece_rows(P, WIDE)
    zeros = ()
    for i in gl.static_range(len(PIECES)):
        zeros = joined(zeros, _zero(PIECES[i][1]))
    return zeros


@gluon.jit
def _narrow(sums):
    """`[64, 128]` as two of `[64, 64]`; no number moves."""
    narrow = ()
    for i in gl.static_range(len(sums)):
        if sums[i].shape[1] > PIECE:
            both = gl.permute(sums[i].reshape([64, 2, PIECE]), [0, 2, 1])
            first, second = gl.split(both)
            first = gl.convert_layout(first, sums_layout(), assert_trivial=True)
            second = gl.convert_layout(second, sums_layout(), assert_trivial=True)
            narrow = joined(joined(narrow, first), second)
        else:
            narrow = joined(narrow, sums[i])
    return narrow


@gluon.jit
def _sums(half, at, scale, b, begin, end, P: gl.constexpr, T: gl.constexpr):
    """fp32 `[64, 64]` per piece, over the steps `begin` to `end`; `half`: which 64 weight rows."""
    PIECES: gl.constexpr = piece_rows(P, T.wide)
    NUM: gl.constexpr = len(PIECES)
    FLIGHT: gl.constexpr = T.flight if T.flight < NUM else NUM
    sums = _zeros(P, T.wide)
    last = at + end - begin - 1
    if T.ahead:
        words, low, high = _unpack(b, _await(b, at, T) * 2 + half)
    for step in range(begin, end):
        if T.fp8:
            factor = gl.load(scale + step)
        if T.ahead:  # no loop may stand between products and their wait
            slot = at % T.stages
            following = _await(b, gl.minimum(at + 1, last), T)
            a = _operand(words, low, high)
        else:
            slot = _await(b, at, T)
            a = _weights(b, slot, half, T)
        flying = ()
        for i in gl.static_range(FLIGHT):
            flying = joined(flying, _start(a, b, slot, PIECES[i][0], PIECES[i][1], T))
        if T.ahead:  # at the end the last step's again: they are still there
            words, low, high = _unpack(b, following * 2 + half)
        added = ()
        for i in gl.static_range(NUM):
            if FLIGHT == 0:
                flying = joined(flying, _start(a, b, slot, PIECES[i][0], PIECES[i][1], T))
            row_scale = _scales(b, slot, PIECES[i][0], PIECES[i][1])
            part = warpgroup_mma_wait(outstanding(FLIGHT, NUM - i), deps=(flying[i],))
            if FLIGHT > 0 and i + FLIGHT < NUM:
                next_product = _start(a, b, slot, PIECES[i + FLIGHT][0], PIECES[i + FLIGHT][1], T)
                flying = joined(flying, next_product)
            if T.fp8:
                row_scale = row_scale * factor
            added = joined(added, part * gl.expand_dims(row_scale, 0) + sums[i])
        sums = added
        fence_async_shared()
        mbarrier.arrive(b.empty.index(slot), count=1)
        at += 1
    return _narrow(sums)


@gluon.jit
def _total(half, at, scale, b, job, P: gl.constexpr, T: gl.constexpr):
    """All ranges of K, added in order."""
    if T.ranges == 1:
        return _sums(half, at, scale, b, 0, job.steps, P, T)
    else:
        total = _zeros(P, False)
        for index in range(0, T.ranges):
            begin = index * job.per_range
            end = gl.minimum(begin + job.per_range, job.steps)
            sums = _sums(half, at + begin, scale, b, begin, end, P, T)
            added = ()
            for i in gl.static_range(P):
                added = joined(added, total[i] + sums[i])
            total = added
        return total


@gluon.jit
def _store(sums, factor, n_row, row, height, job, P: gl.constexpr, T: gl.constexpr):
    """Results `[rows, size]`, at the rows themselves or at their pairs."""
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    column = n_row + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    for i in gl.static_range(P):
        r = i * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(0, STORE))
        live = r < height
        to = row + r
        value = sums[i]
        if T.end == 2:
            to = gl.load(job.route.sorted_pairs + to, mask=live, other=0)
            value = value * factor
        value = gl.convert_layout(value.to(job.out.dtype.element_ty), STORE)
        at = gl.expand_dims(to.to(gl.int64) * job.size, 0) + gl.expand_dims(column, 1)
        gl.store(job.out + at, value, mask=gl.expand_dims(live, 0))


@gluon.jit
def _store_swiglu(sums, factor, n_row, row, height, job, P: gl.constexpr):
    """Of 16 weight rows the first 8 are gates: a thread has both. Rows stay in sorted order."""
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    column = n_row // 2 + gl.arange(0, 32, layout=gl.SliceLayout(1, STORE))
    for i in gl.static_range(P):
        both = (sums[i] * factor).reshape([4, 2, 8, PIECE])
        gate, up = gl.split(gl.permute(both, [0, 2, 3, 1]))
        value = activated(gate, up, job.limit).reshape([32, PIECE])
        r = i * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(0, value.type.layout))
        pair = gl.load(job.route.sorted_pairs + row + r, mask=r < height, other=0)
        weight = gl.load(job.token_weights + pair, mask=r < height, other=0.0)
        value = (value * gl.expand_dims(weight, 0)).to(gl.bfloat16)
        r = i * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(0, STORE))
        at = gl.expand_dims((row + r).to(gl.int64) * job.size, 0) + gl.expand_dims(column, 1)
        mask = gl.expand_dims(r < height, 0)
        gl.store(job.out + at, gl.convert_layout(value, STORE), mask=mask)


@gluon.jit
def multiply_tile(half, at, expert, n_tile, row, height, b, job, P: gl.constexpr, T: gl.constexpr):
    n_row = n_tile * WIDTH + half * 64
    total = _total(half, at, job.scale + n_tile * job.steps, b, job, P, T)
    if T.fp8:
        _store(total, 1.0, n_row, row, height, job, P, T)
    elif T.end == 1:
        _store_swiglu(total, gl.load(job.factors + expert), n_row, row, height, job, P)
    else:
        _store(total, gl.load(job.factors + expert), n_row, row, height, job, P, T)
