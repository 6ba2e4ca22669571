# mypy: ignore-errors
"""MXFP4 experts times a8 rows for prompts on sm_90, in Gluon: warps with different jobs.

A program walks over tiles of 128 weight rows by up to 256 rows of an expert. One warp copies
weights, rows and their scales into a ring of buffers. Two groups of four warps multiply 64 weight
rows each; they wait only for buffers, never for each other, so one unpacks and adds while the other
multiplies. The sums of 64 columns of 64 rows leave the tensor core while the next rows are in it.
As many pieces of 64 rows are read as the expert has.

Copies (TMA) write the ring through another path than loads read it. A load that was issued may
still be waiting when the buffer's barrier is arrived at, and then finds the next step's numbers; so
loads are fenced before a buffer is given back. Products need no fence: their wait ends their reads.

Sums and their order are those of fp8_product_triton.py, so bits are equal. Weights are in the M
slot, unlike those of fp8_prompt_gluon.py: with few rows per expert that is faster.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv4.ops.core.gpu import describe
from dsv4.ops.core.helpers_device import swiglu
from dsv4.ops.gemm.a8.fp8_product_triton import PAIRS, SWIGLU
from dsv4.ops.gemm.a8.fp8_prompt_gluon import joined, tma_load

ROWS = 64  # input rows of one product
PIECE, WIDTH, BLOCK = gl.constexpr(ROWS), gl.constexpr(128), gl.constexpr(4 * ROWS)
PACKED = gl.constexpr(2 * 64 * (16 + 1) * 4)  # bytes of MXFP4 in 128 rows and columns
PIECES, STAGES = gl.constexpr(4), gl.constexpr(4)  # of a tile at most, of the ring
MOST_ROWS = 4 * ROWS  # of a tile
WARPS, REGISTERS, COPY_REGISTERS = 4, 240, 24  # of a multiplying thread, of a copying one
_LOW_SIZE = gl.constexpr("{ .reg .b32 s; and.b32 s, $1, 0x77777777; prmt.b32 $0, $2, $3, s; }")
_HIGH_SIZE = gl.constexpr(
    "{ .reg .b32 s; and.b32 s, $1, 0x77777777; shr.u32 s, s, 16; prmt.b32 $0, $2, $3, s; }"
)
_LOW_SIGN = gl.constexpr("lop3.b32 $0, $1, $2, 0x80808080, 0xF8;")
_HIGH_SIGN = gl.constexpr(
    "{ .reg .b32 u; shl.b32 u, $2, 4; lop3.b32 $0, $1, u, 0x80808080, 0xF8; }"
)
NEWER = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # than triton 3.6
activated = gluon.jit(swiglu.fn)


class ExpertBuffers(NamedTuple):
    """A ring of STAGES: what is multiplied; which buffers are filled, which are free again."""

    rows: object  # by 64
    scales: object
    words: object
    shifts: object
    full: object
    empty: object


class ExpertJob(NamedTuple):
    """What is multiplied, and where results go."""

    factors: object
    out: object
    groups: object
    token_weights: object
    size: int  # of a result row
    n_tiles: int
    items: int
    steps: int
    limit: float


@gluon.constexpr_function
def sums_layout():
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])


@gluon.jit
def _work(item, job):
    """(expert, tile of weight rows, first input row, rows) of an item; expert -1: none."""
    n_tile = item % job.n_tiles
    m_tile = item // job.n_tiles
    expert = gl.load(job.groups.tile_expert + m_tile)
    row = gl.load(job.groups.tile_start + m_tile)
    end = gl.load(job.groups.tile_end + m_tile)
    return expert, n_tile, row, gl.minimum(end - row, PIECES * PIECE)


@gluon.jit
def _copy_tile(descs, at, expert, n_tile, row, b, job, P: gl.constexpr):
    """Copies begin at multiples of 16 bytes: of four copies of the scales, one does."""
    steps = job.steps
    first = (expert * job.n_tiles + n_tile) * 2 * steps
    for step in range(0, steps):
        slot = at % STAGES
        full = b.full.index(slot)
        mbarrier.wait(b.empty.index(slot), (at // STAGES + 1) & 1)
        mbarrier.expect(full, P * PIECE * WIDTH + BLOCK * 4 + PACKED)
        tma_load(descs[1], [(row & 3) * steps + step, row & -4], full, b.scales.index(slot))
        for half in gl.static_range(2):
            tile = first + half * steps + step
            tma_load(descs[2], [tile * 4, 0], full, b.words.index(slot * 2 + half))
            tma_load(descs[3], [tile, 0], full, b.shifts.index(slot * 2 + half))
        for i in gl.static_range(P):
            place = [row + i * PIECE, step * WIDTH]
            tma_load(descs[0], place, full, b.rows.index(slot * PIECES + i))
        at += 1


@gluon.jit
def _copy(descs, b, job):
    """The job of the copying warp."""
    at = 0
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        expert, n_tile, row, height = _work(item, job)
        if expert >= 0:
            if height <= PIECE:
                _copy_tile(descs, at, expert, n_tile, row, b, job, 1)
            elif height <= 2 * PIECE:
                _copy_tile(descs, at, expert, n_tile, row, b, job, 2)
            elif height <= 3 * PIECE:
                _copy_tile(descs, at, expert, n_tile, row, b, job, 3)
            else:
                _copy_tile(descs, at, expert, n_tile, row, b, job, 4)
            at += job.steps


@gluon.constexpr_function
def words_layout():
    """Words `[rows, q, s]` of 64 rows as a warpgroup's threads multiply them."""
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, 4, 4])


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
def _scales(b, slot, PLACE: gl.constexpr):
    scales = b.scales.index(slot).reshape([BLOCK]).slice(PLACE * PIECE, PIECE)
    return scales.load(gl.SliceLayout(0, sums_layout()))


@gluon.jit
def _start(a, b, slot, PLACE: gl.constexpr):
    """The product of a step's weights and of its input rows number PLACE."""
    x = b.rows.index(slot * PIECES + PLACE).permute((1, 0))
    zero = gl.zeros([64, PIECE], gl.float32, sums_layout())
    return warpgroup_mma(a, x, zero, use_acc=False, is_async=True)


@gluon.jit
def _sums(half, at, b, job, P: gl.constexpr):
    """fp32 `[64, 64]` per piece; `half`: which 64 weight rows."""
    sums = ()
    for _ in gl.static_range(P):
        sums = joined(sums, gl.zeros([64, PIECE], gl.float32, sums_layout()))
    for _ in range(0, job.steps):
        slot = at % STAGES
        mbarrier.wait(b.full.index(slot), at // STAGES & 1)
        words, low, high = _unpack(b, slot * 2 + half)
        a = _operand(words, low, high)
        product = _start(a, b, slot, 0)
        added = ()
        for i in gl.static_range(P):
            row_scale = _scales(b, slot, i)
            part = warpgroup_mma_wait(0, deps=(product,))
            if i + 1 < P:
                product = _start(a, b, slot, i + 1)
            added = joined(added, part * gl.expand_dims(row_scale, 0) + sums[i])
        sums = added
        fence_async_shared()
        mbarrier.arrive(b.empty.index(slot), count=1)
        at += 1
    return sums


@gluon.jit
def _store(sums, factor, n_row, row, height, job, P: gl.constexpr):
    """A row's result belongs to its pair."""
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    column = n_row + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    for i in gl.static_range(P):
        r = i * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(0, STORE))
        live = r < height
        pair = gl.load(job.groups.sorted_pairs + (row + r), mask=live, other=0)
        value = gl.convert_layout((sums[i] * factor).to(job.out.dtype.element_ty), STORE)
        at = gl.expand_dims(pair.to(gl.int64) * job.size, 0) + gl.expand_dims(column, 1)
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
def _multiply_tile(half, at, expert, n_tile, row, height, b, job, P: gl.constexpr,
                   END: gl.constexpr):  # fmt: skip
    n_row = n_tile * WIDTH + half * 64
    sums = _sums(half, at, b, job, P)
    if END == 1:
        _store_swiglu(sums, gl.load(job.factors + expert), n_row, row, height, job, P)
    else:
        _store(sums, gl.load(job.factors + expert), n_row, row, height, job, P)


@gluon.jit
def _multiply(half, b, job, END: gl.constexpr):
    """The job of a multiplying warpgroup."""
    at = 0
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        expert, n_tile, row, height = _work(item, job)
        if expert >= 0:
            if height <= PIECE:
                _multiply_tile(half, at, expert, n_tile, row, height, b, job, 1, END)
            elif height <= 2 * PIECE:
                _multiply_tile(half, at, expert, n_tile, row, height, b, job, 2, END)
            elif height <= 3 * PIECE:
                _multiply_tile(half, at, expert, n_tile, row, height, b, job, 3, END)
            else:
                _multiply_tile(half, at, expert, n_tile, row, height, b, job, 4, END)
            at += job.steps


@gluon.jit(do_not_specialize=["num_rows", "n_tiles", "items", "steps", "per_range"])
def _a8_prompt_experts_kernel(
    x_desc, scale_desc, w_desc, shift_desc, scale, factors, out, groups, token_weights, num_rows,
    size, n_tiles, items, steps, per_range, limit, END: gl.constexpr,
    NUM_REGISTERS: gl.constexpr, NUM_COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    # `scale`, `num_rows` and `per_range` are not used: the machine code is the one that was timed
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    b = ExpertBuffers(
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PIECES, 64, 128], SHARED),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK], FLAT),
        gl.allocate_shared_memory(gl.int32, [2 * STAGES, 4, 256], FLAT),
        gl.allocate_shared_memory(gl.int32, [2 * STAGES, 1, 64], FLAT),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(b.full.index(i), count=1)
        mbarrier.init(b.empty.index(i), count=2)
    job = ExpertJob(factors, out, groups, token_weights, size, n_tiles, items, steps, limit)
    gl.warp_specialize(
        [
            (_multiply, (0, b, job, END)),
            (_multiply, (1, b, job, END)),
            (_copy, ((x_desc, scale_desc, w_desc, shift_desc), b, job)),
        ],
        [4, 1],
        [NUM_REGISTERS, NUM_COPY_REGISTERS],
    )


def multiply_experts(rows, weight, out, grouped, *, weights=None, limit=0.0) -> None:
    """Like that of fp8_product_triton.py; `rows` has a row per sorted pair and four copies of its
    scales, `grouped` tiles of MOST_ROWS; the sides of `weight` are multiples of 128."""
    shared, flat = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(0, 32, 2)
    n_tiles = weight.shape[-2] // 128
    items = grouped.num_tiles * n_tiles
    _a8_prompt_experts_kernel[(min(describe(out.device).multiprocessors, items),)](
        TensorDescriptor.from_tensor(rows.codes, [ROWS, 128], shared),
        TensorDescriptor.from_tensor(rows.scales, [1, 4 * ROWS], flat),
        TensorDescriptor.from_tensor(weight.words.view(-1, 256), [4, 256], flat),
        TensorDescriptor.from_tensor(weight.shifts.view(-1, 64), [1, 64], flat),
        weight.factor, weight.factor, out, grouped.groups, out if weights is None else weights,
        rows.num_rows, out.shape[1], n_tiles, items, rows.num_steps, rows.num_steps, limit,
        END=PAIRS if weights is None else SWIGLU, NUM_REGISTERS=REGISTERS,
        NUM_COPY_REGISTERS=COPY_REGISTERS, num_warps=WARPS,
    )  # fmt: skip
