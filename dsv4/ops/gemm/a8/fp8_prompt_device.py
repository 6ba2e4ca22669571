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
FIRST_TURN = gl.constexpr(14)  # hardware barriers of 256 threads; Triton counts its own from 0
_WAIT = gl.constexpr("bar.sync $1, 256; mov.u32 $0, 0;")
_PASS = gl.constexpr("bar.arrive $1, 256; mov.u32 $0, 0;")
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
    direct: bool = False  # FP8 weights are multiplied from shared memory, not from registers
    turns: bool = False  # a warpgroup adds while the other's product runs


class PromptBuffers(NamedTuple):
    """A ring of `stages`: what is multiplied; which buffers are filled, which are free again."""

    rows: object  # by 64
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
    groups: object
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
def sums_layout():
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])


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
    """E4M3 `[64, 128]` in the registers of a product: sizes with their signs."""
    low = gl.inline_asm_elementwise(_LOW_SIGN, "=r,r,r", [low, words], gl.int32, True, 1)
    high = gl.inline_asm_elementwise(_HIGH_SIGN, "=r,r,r", [high, words], gl.int32, True, 1)
    both = gl.join(_four(low), _four(high))
    both = gl.permute(both, [0, 2, 4, 1, 3]).reshape([64, 128])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sums_layout(), 4)
    return gl.convert_layout(both, OPERAND, assert_trivial=True)


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
def _scales(b, slot, PLACE: gl.constexpr):
    scales = b.scales.index(slot).reshape([BLOCK]).slice(PLACE * PIECE, PIECE)
    return scales.load(gl.SliceLayout(0, sums_layout()))


@gluon.jit
def _wait_for_turn(half):
    gl.inline_asm_elementwise(_WAIT, "=r,r", [FIRST_TURN + half], gl.int32, False, 1)


@gluon.jit
def pass_turn(half):
    """The other warpgroup's product may follow those that this one has issued."""
    gl.inline_asm_elementwise(_PASS, "=r,r", [FIRST_TURN + 1 - half], gl.int32, False, 1)


@gluon.jit
def _start(a, b, slot, half, PLACE: gl.constexpr, T: gl.constexpr):
    """The product of a step's weights and of its input rows number PLACE."""
    x = b.rows.index(slot * T.pieces + PLACE).permute((1, 0))
    zero = gl.zeros([64, PIECE], gl.float32, sums_layout())
    if T.turns:
        _wait_for_turn(half)
    product = warpgroup_mma(a, x, zero, use_acc=False, is_async=True)
    if T.turns:
        pass_turn(half)
    return product


@gluon.jit
def _zeros(P: gl.constexpr):
    zeros = ()
    for _ in gl.static_range(P):
        zeros = joined(zeros, gl.zeros([64, PIECE], gl.float32, sums_layout()))
    return zeros


@gluon.jit
def _sums(half, at, scale, b, begin, end, P: gl.constexpr, T: gl.constexpr):
    """fp32 `[64, 64]` per piece, over the steps `begin` to `end`; `half`: which 64 weight rows."""
    FLIGHT: gl.constexpr = T.flight if T.flight < P else P
    sums = _zeros(P)
    if T.fp8:
        next_factor = gl.load(scale + gl.minimum(begin, end - 1))
    for step in range(begin, end):
        slot = at % T.stages
        mbarrier.wait(b.full.index(slot), at // T.stages & 1)
        a = _weights(b, slot, half, T)
        flying = ()
        for i in gl.static_range(FLIGHT):
            flying = joined(flying, _start(a, b, slot, half, i, T))
        if T.fp8:  # on its way during a step: products would wait for it
            factor = next_factor
            next_factor = gl.load(scale + gl.minimum(step + 1, end - 1))
        added = ()
        for i in gl.static_range(P):
            row_scale = _scales(b, slot, i)
            part = warpgroup_mma_wait(outstanding(FLIGHT, P - i), deps=(flying[i],))
            if T.fp8:
                row_scale = row_scale * factor
            if T.turns:  # first, while the other warpgroup's product runs
                added = joined(added, part * gl.expand_dims(row_scale, 0) + sums[i])
            if i + FLIGHT < P:
                flying = joined(flying, _start(a, b, slot, half, i + FLIGHT, T))
            if not T.turns:
                added = joined(added, part * gl.expand_dims(row_scale, 0) + sums[i])
        sums = added
        fence_async_shared()
        mbarrier.arrive(b.empty.index(slot), count=1)
        at += 1
    return sums


@gluon.jit
def _total(half, at, scale, b, job, P: gl.constexpr, T: gl.constexpr):
    """All ranges of K, added in order."""
    if T.ranges == 1:
        return _sums(half, at, scale, b, 0, job.steps, P, T)
    else:
        total = _zeros(P)
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
            to = gl.load(job.groups.sorted_pairs + to, mask=live, other=0)
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
        pair = gl.load(job.groups.sorted_pairs + row + r, mask=r < height, other=0)
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
