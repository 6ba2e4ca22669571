# mypy: ignore-errors
"""MXFP4 experts times a8 rows for prompts on sm_90, in Gluon: warps with different jobs.

A program walks over tiles of 128 weight rows by up to 256 rows of an expert, or, if experts have
few rows, of 256 by 64. One warp copies weights, rows and their scales into a ring of buffers. Two
or four groups of four warps multiply 64 weight rows each; they wait only for buffers, never for
each other, so one unpacks and adds while another multiplies. The sums of 64 columns of 64 rows
leave the tensor core while the next rows are in it. As many pieces of 64 rows are read as the
expert has.

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
PIECE, WIDTH = gl.constexpr(ROWS), gl.constexpr(128)  # input rows of a product, columns of a step
PACKED = gl.constexpr(64 * (16 + 1) * 4)  # bytes of MXFP4 in 64 rows and 128 columns
WARPS, COPY_REGISTERS = 4, 24
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


class PieceTile(NamedTuple):
    """Constants of a launch."""

    pieces: int  # of ROWS input rows, at most
    groups: int  # that multiply, each by 64 weight rows
    stages: int
    registers: int  # of a multiplying thread

    @property
    def rows(self) -> int:
        return self.pieces * ROWS


MANY, FEW = PieceTile(4, 2, 4, 240), PieceTile(1, 4, 5, 112)
FEW_ROWS = 56  # of an expert, up to which tiles are few


class ExpertBuffers(NamedTuple):
    """A ring of stages: what is multiplied; which buffers are filled, which are free again."""

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
def _work(item, job, T: gl.constexpr):
    """(expert, tile of weight rows, first input row, rows) of an item; expert -1: none."""
    n_tile = item % job.n_tiles
    m_tile = item // job.n_tiles
    expert = gl.load(job.groups.tile_expert + m_tile)
    row = gl.load(job.groups.tile_start + m_tile)
    end = gl.load(job.groups.tile_end + m_tile)
    return expert, n_tile, row, gl.minimum(end - row, T.pieces * PIECE)


@gluon.jit
def _is_height(height, P: gl.constexpr):
    """Whether P pieces are the fewest that hold `height` rows."""
    return (height > (P - 1) * PIECE) & (height <= P * PIECE)


@gluon.jit
def _copy_tile(descs, at, expert, n_tile, row, b, job, P: gl.constexpr, T: gl.constexpr):
    """Copies begin at multiples of 16 bytes: of four copies of the scales, one does."""
    steps = job.steps
    GROUPS: gl.constexpr = T.groups
    first = (expert * job.n_tiles + n_tile) * GROUPS * steps
    for step in range(0, steps):
        slot = at % T.stages
        full = b.full.index(slot)
        mbarrier.wait(b.empty.index(slot), (at // T.stages + 1) & 1)
        mbarrier.expect(full, P * PIECE * WIDTH + T.pieces * PIECE * 4 + GROUPS * PACKED)
        tma_load(descs[1], [(row & 3) * steps + step, row & -4], full, b.scales.index(slot))
        for group in gl.static_range(GROUPS):
            tile = first + group * steps + step
            tma_load(descs[2], [tile * 4, 0], full, b.words.index(slot * GROUPS + group))
            tma_load(descs[3], [tile, 0], full, b.shifts.index(slot * GROUPS + group))
        for i in gl.static_range(P):
            place = [row + i * PIECE, step * WIDTH]
            tma_load(descs[0], place, full, b.rows.index(slot * T.pieces + i))
        at += 1


@gluon.jit
def _copy(descs, b, job, T: gl.constexpr):
    """The job of the copying warp."""
    PIECES: gl.constexpr = T.pieces
    at = 0
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        expert, n_tile, row, height = _work(item, job, T)
        if expert >= 0:
            for i in gl.static_range(PIECES):
                if _is_height(height, i + 1):
                    _copy_tile(descs, at, expert, n_tile, row, b, job, i + 1, T)
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
def _scales(b, slot, PLACE: gl.constexpr, T: gl.constexpr):
    scales = b.scales.index(slot).reshape([T.pieces * PIECE]).slice(PLACE * PIECE, PIECE)
    return scales.load(gl.SliceLayout(0, sums_layout()))


@gluon.jit
def _start(a, b, slot, PLACE: gl.constexpr, T: gl.constexpr):
    """The product of a step's weights and of its input rows number PLACE."""
    x = b.rows.index(slot * T.pieces + PLACE).permute((1, 0))
    zero = gl.zeros([64, PIECE], gl.float32, sums_layout())
    return warpgroup_mma(a, x, zero, use_acc=False, is_async=True)


@gluon.jit
def _sums(group, at, b, job, P: gl.constexpr, T: gl.constexpr):
    """fp32 `[64, 64]` per piece."""
    sums = ()
    for _ in gl.static_range(P):
        sums = joined(sums, gl.zeros([64, PIECE], gl.float32, sums_layout()))
    for _ in range(0, job.steps):
        slot = at % T.stages
        mbarrier.wait(b.full.index(slot), at // T.stages & 1)
        words, low, high = _unpack(b, slot * T.groups + group)
        a = _operand(words, low, high)
        product = _start(a, b, slot, 0, T)
        added = ()
        for i in gl.static_range(P):
            row_scale = _scales(b, slot, i, T)
            part = warpgroup_mma_wait(0, deps=(product,))
            if i + 1 < P:
                product = _start(a, b, slot, i + 1, T)
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
def _multiply_tile(group, at, expert, n_tile, row, height, b, job, P: gl.constexpr,
                   END: gl.constexpr, T: gl.constexpr):  # fmt: skip
    n_row = (n_tile * T.groups + group) * 64
    sums = _sums(group, at, b, job, P, T)
    if END == 1:
        _store_swiglu(sums, gl.load(job.factors + expert), n_row, row, height, job, P)
    else:
        _store(sums, gl.load(job.factors + expert), n_row, row, height, job, P)


@gluon.jit
def _multiply(group, b, job, END: gl.constexpr, T: gl.constexpr):
    """The job of a multiplying warpgroup."""
    PIECES: gl.constexpr = T.pieces
    at = 0
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        expert, n_tile, row, height = _work(item, job, T)
        if expert >= 0:
            for i in gl.static_range(PIECES):
                if _is_height(height, i + 1):
                    _multiply_tile(
                        group, at, expert, n_tile, row, height, b, job, i + 1, END, T
                    )  # fmt: skip
            at += job.steps


@gluon.jit(do_not_specialize=["n_tiles", "items", "steps"])
def _a8_prompt_experts_kernel(
    x_desc, scale_desc, w_desc, shift_desc, factors, out, groups, token_weights, size, n_tiles,
    items, steps, limit, END: gl.constexpr, T: gl.constexpr, NUM_COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = T.stages
    GROUPS: gl.constexpr = T.groups
    PIECES: gl.constexpr = T.pieces
    b = ExpertBuffers(
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PIECES, 64, 128], SHARED),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, PIECES * PIECE], FLAT),
        gl.allocate_shared_memory(gl.int32, [GROUPS * STAGES, 4, 256], FLAT),
        gl.allocate_shared_memory(gl.int32, [GROUPS * STAGES, 1, 64], FLAT),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(b.full.index(i), count=1)
        mbarrier.init(b.empty.index(i), count=GROUPS)
    job = ExpertJob(factors, out, groups, token_weights, size, n_tiles, items, steps, limit)
    descs = (x_desc, scale_desc, w_desc, shift_desc)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, b, job, END, T)), (_multiply, (1, b, job, END, T)),
                (_copy, (descs, b, job, T)),
            ],
            [4, 1], [T.registers, NUM_COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, b, job, END, T)), (_multiply, (1, b, job, END, T)),
                (_multiply, (2, b, job, END, T)), (_multiply, (3, b, job, END, T)),
                (_copy, (descs, b, job, T)),
            ],
            [4, 4, 4, 1], [T.registers, T.registers, T.registers, NUM_COPY_REGISTERS],
        )  # fmt: skip


def choose_tile(num_pairs: int, *weights) -> PieceTile:
    """By the rows of an expert under even routing."""
    whole = all(weight.shape[-2] % 256 == 0 for weight in weights)
    return FEW if whole and num_pairs <= FEW_ROWS * weights[0].shape[0] else MANY


def multiply_experts(rows, weight, out, grouped, tile, *, weights=None, limit=0.0) -> None:
    """Like that of fp8_product_triton.py; `rows` has a row per sorted pair and four copies of its
    scales, `grouped` tiles of `tile.rows`; the sides of `weight` are multiples of 128."""
    shared, flat = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(0, 32, 2)
    n_tiles = weight.shape[-2] // (64 * tile.groups)
    items = grouped.num_tiles * n_tiles
    _a8_prompt_experts_kernel[(min(describe(out.device).multiprocessors, items),)](
        TensorDescriptor.from_tensor(rows.codes, [ROWS, 128], shared),
        TensorDescriptor.from_tensor(rows.scales, [1, tile.rows], flat),
        TensorDescriptor.from_tensor(weight.words.view(-1, 256), [4, 256], flat),
        TensorDescriptor.from_tensor(weight.shifts.view(-1, 64), [1, 64], flat),
        weight.factor, out, grouped.groups, out if weights is None else weights, out.shape[1],
        n_tiles, items, rows.num_steps, limit, END=PAIRS if weights is None else SWIGLU, T=tile,
        NUM_COPY_REGISTERS=COPY_REGISTERS, num_warps=WARPS,
    )  # fmt: skip
