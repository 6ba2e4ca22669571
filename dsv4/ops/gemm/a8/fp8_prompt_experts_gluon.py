# mypy: ignore-errors
"""MXFP4 experts times a8 rows for prompts on sm_90, in Gluon: warps with different jobs.

A program walks over tiles of 128 weight rows by up to 256 rows of an expert, or, if experts have
few rows, of 256 by 64. One warp copies weights, rows and their scales into a ring of buffers. Two
or four groups of four warps multiply 64 weight rows each; they wait only for buffers, never for
each other, so one unpacks and adds while another multiplies. A step's products have up to 64 input
rows each, fewer in tiles with fewer rows (`heights`); the sums of one leave the tensor core while
the next one is in it.

Copies (TMA) write the ring through another path than loads read it. A load that was issued may
still be waiting when the buffer's barrier is arrived at, and then finds the next step's numbers; so
loads are fenced before a buffer is given back, or it is given back a step later, when all that was
loaded has been used. Products need no fence: their wait ends their reads.

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
from dsv4.ops.core.helpers_device import swiglu, through_bf16
from dsv4.ops.gemm.a8.fp8_product_triton import PAIRS, SWIGLU
from dsv4.ops.gemm.a8.fp8_prompt_gluon import joined, sums_layout, tma_load
from dsv4.ops.gemm.a8.unpack_mxfp4_device import operand, unpack

ROWS = 64  # input rows of one copy
PIECE, WIDTH = gl.constexpr(ROWS), gl.constexpr(128)  # input rows of a copy, columns of a step
PACKED = gl.constexpr(64 * (16 + 1) * 4)  # bytes of MXFP4 in 64 rows and 128 columns
WARPS, COPY_REGISTERS = 4, 24
activated, stored = gluon.jit(swiglu.fn), gluon.jit(through_bf16.fn)


class PieceTile(NamedTuple):
    """Constants of a launch."""

    heights: tuple[tuple[int, ...], ...]  # input rows of a step's products; the least that fits
    groups: int  # that multiply, each by 64 weight rows
    stages: int
    registers: int  # of a multiplying thread
    late: bool  # give a buffer back in the next step, when what was loaded has been used

    @property
    def rows(self) -> int:
        return sum(self.heights[-1])


# by the rows of an expert, with even routing 192 of 8,192 tokens and 48 of 2,048
MANY_HEIGHTS = (
    (64,), (64, 32), (64, 64), (64, 64, 32), (64, 64, 64), (64, 64, 64, 16), (64, 64, 64, 32),
    (64, 64, 64, 64),
)  # fmt: skip
FEW_HEIGHTS = ((32,), (32, 16), (64,))
MANY, FEW = PieceTile(MANY_HEIGHTS, 2, 4, 240, False), PieceTile(FEW_HEIGHTS, 4, 5, 112, True)
FEW_ROWS = 56  # of an expert, up to which tiles are few


class ExpertBuffers(NamedTuple):
    """A ring of stages: what is multiplied; which buffers are filled, which are free again."""

    rows: object
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
def count_of(T, H):
    """How many products a step has, in tiles of height number H."""
    return len(T.heights[H])


@gluon.constexpr_function
def rows_of(T, H, i):
    """Input rows of a step's product number `i`."""
    return T.heights[H][i]


@gluon.constexpr_function
def first_of(T, H, i):
    """Input rows before product number `i`."""
    return sum(T.heights[H][:i])


@gluon.constexpr_function
def most_rows(T, H):
    """Input rows of height number H; of none before the first one."""
    return sum(T.heights[H]) if H >= 0 else 0


@gluon.constexpr_function
def tile_rows(T):
    return sum(T.heights[len(T.heights) - 1])


@gluon.jit
def _work(item, job, T: gl.constexpr):
    """(expert, tile of weight rows, tile of input rows, its first one, how many) of an item; expert
    -1: none."""
    n_tile = item % job.n_tiles
    m_tile = item // job.n_tiles
    expert = gl.load(job.groups.tile_expert + m_tile)
    row = gl.load(job.groups.tile_start + m_tile)
    end = gl.load(job.groups.tile_end + m_tile)
    return expert, n_tile, m_tile, row, gl.minimum(end - row, tile_rows(T))


@gluon.jit
def _is_height(height, H: gl.constexpr, T: gl.constexpr):
    """Whether height number H is the least that holds `height` rows."""
    return (height > most_rows(T, H - 1)) & (height <= most_rows(T, H))


@gluon.jit
def _copy_tile(descs, at, expert, n_tile, m_tile, row, b, job, H: gl.constexpr, T: gl.constexpr):
    steps = job.steps
    GROUPS: gl.constexpr = T.groups
    P: gl.constexpr = (most_rows(T, H) + PIECE - 1) // PIECE
    first = (expert * job.n_tiles + n_tile) * GROUPS * steps
    for step in range(0, steps):
        slot = at % T.stages
        full = b.full.index(slot)
        mbarrier.wait(b.empty.index(slot), (at // T.stages + 1) & 1)
        mbarrier.expect(full, P * PIECE * WIDTH + tile_rows(T) * 4 + GROUPS * PACKED)
        tma_load(descs[1], [m_tile * steps + step, 0], full, b.scales.index(slot))
        for group in gl.static_range(GROUPS):
            tile = first + group * steps + step
            tma_load(descs[2], [tile * 4, 0], full, b.words.index(slot * GROUPS + group))
            tma_load(descs[3], [tile, 0], full, b.shifts.index(slot * GROUPS + group))
        for i in gl.static_range(P):
            place = [row + i * PIECE, step * WIDTH]
            to = b.rows.index(slot).slice(i * PIECE, PIECE, dim=0)
            tma_load(descs[0], place, full, to)
        at += 1


@gluon.jit
def _copy(descs, b, job, T: gl.constexpr):
    """The job of the copying warp."""
    COUNT: gl.constexpr = len(T.heights)
    at = 0
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        expert, n_tile, m_tile, row, height = _work(item, job, T)
        if expert >= 0:
            for i in gl.static_range(COUNT):
                if _is_height(height, i, T):
                    _copy_tile(descs, at, expert, n_tile, m_tile, row, b, job, i, T)
            at += job.steps


@gluon.jit
def _scales(b, slot, FIRST: gl.constexpr, ROWS: gl.constexpr, T: gl.constexpr):
    scales = b.scales.index(slot).reshape([tile_rows(T)]).slice(FIRST, ROWS)
    return scales.load(gl.SliceLayout(0, sums_layout(ROWS)))


@gluon.jit
def _zeros(ROWS: gl.constexpr):
    return gl.zeros([64, ROWS], gl.float32, sums_layout(ROWS))


@gluon.jit
def _start(a, b, slot, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """The product of a step's weights and of some input rows."""
    x = b.rows.index(slot).slice(FIRST, ROWS, dim=0).permute((1, 0))
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sums_layout(ROWS), 4)
    a = gl.convert_layout(a, OPERAND, assert_trivial=True)
    return warpgroup_mma(a, x, _zeros(ROWS), use_acc=False, is_async=True)


@gluon.jit
def _sums(group, at, b, job, H: gl.constexpr, T: gl.constexpr):
    """fp32 `[64, rows]` per product."""
    COUNT: gl.constexpr = count_of(T, H)
    sums = ()
    for i in gl.static_range(COUNT):
        sums = joined(sums, _zeros(rows_of(T, H, i)))
    for step in range(0, job.steps):
        slot = at % T.stages
        mbarrier.wait(b.full.index(slot), at // T.stages & 1)
        if T.late:
            _give_back(at - 1, b, step > 0, T)
        place = slot * T.groups + group
        words, low, high = unpack(b.words.index(place), b.shifts.index(place))
        a = operand(words, low, high)
        product = _start(a, b, slot, 0, rows_of(T, H, 0))
        added = ()
        for i in gl.static_range(COUNT):
            row_scale = _scales(b, slot, first_of(T, H, i), rows_of(T, H, i), T)
            part = warpgroup_mma_wait(0, deps=(product,))
            if i + 1 < COUNT:
                product = _start(a, b, slot, first_of(T, H, i + 1), rows_of(T, H, i + 1))
            added = joined(added, part * gl.expand_dims(row_scale, 0) + sums[i])
        sums = added
        if not T.late:
            fence_async_shared()
            _give_back(at, b, True, T)
        at += 1
    if T.late:
        fence_async_shared()
        _give_back(at - 1, b, True, T)
    return sums


@gluon.jit
def _give_back(at, b, given, T: gl.constexpr):
    mbarrier.arrive(b.empty.index((at + T.stages) % T.stages), count=1, pred=given)


@gluon.jit
def _input_rows(LAYOUT: gl.constexpr, H: gl.constexpr, i: gl.constexpr, T: gl.constexpr):
    return first_of(T, H, i) + gl.arange(0, rows_of(T, H, i), layout=LAYOUT)


@gluon.jit
def _store(sums, factor, n_row, row, height, job, H: gl.constexpr, T: gl.constexpr):
    """A row's result belongs to its pair."""
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    column = n_row + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    for i in gl.static_range(count_of(T, H)):
        r = _input_rows(gl.SliceLayout(0, STORE), H, i, T)
        live = r < height
        pair = gl.load(job.groups.sorted_pairs + (row + r), mask=live, other=0)
        value = gl.convert_layout((sums[i] * factor).to(job.out.dtype.element_ty), STORE)
        at = gl.expand_dims(pair.to(gl.int64) * job.size, 0) + gl.expand_dims(column, 1)
        gl.store(job.out + at, value, mask=gl.expand_dims(live, 0))


@gluon.jit
def _store_swiglu(sums, factor, n_row, row, height, job, H: gl.constexpr, T: gl.constexpr):
    """Of 16 weight rows the first 8 are gates: a thread has both. Rows stay in sorted order."""
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    column = n_row // 2 + gl.arange(0, 32, layout=gl.SliceLayout(1, STORE))
    for i in gl.static_range(count_of(T, H)):
        both = stored(sums[i] * factor, True).reshape([4, 2, 8, rows_of(T, H, i)])
        gate, up = gl.split(gl.permute(both, [0, 2, 3, 1]))
        value = activated(gate, up, job.limit).reshape([32, rows_of(T, H, i)])
        r = _input_rows(gl.SliceLayout(0, value.type.layout), H, i, T)
        pair = gl.load(job.groups.sorted_pairs + row + r, mask=r < height, other=0)
        weight = gl.load(job.token_weights + pair, mask=r < height, other=0.0)
        value = (value * gl.expand_dims(weight, 0)).to(gl.bfloat16)
        r = _input_rows(gl.SliceLayout(0, STORE), H, i, T)
        at = gl.expand_dims((row + r).to(gl.int64) * job.size, 0) + gl.expand_dims(column, 1)
        mask = gl.expand_dims(r < height, 0)
        gl.store(job.out + at, gl.convert_layout(value, STORE), mask=mask)


@gluon.jit
def _multiply_tile(group, at, expert, n_tile, row, height, b, job, H: gl.constexpr,
                   END: gl.constexpr, T: gl.constexpr):  # fmt: skip
    n_row = (n_tile * T.groups + group) * 64
    sums = _sums(group, at, b, job, H, T)
    if END == 1:
        _store_swiglu(sums, gl.load(job.factors + expert), n_row, row, height, job, H, T)
    else:
        _store(sums, gl.load(job.factors + expert), n_row, row, height, job, H, T)


@gluon.jit
def _multiply(group, b, job, END: gl.constexpr, T: gl.constexpr):
    """The job of a multiplying warpgroup."""
    COUNT: gl.constexpr = len(T.heights)
    at = 0
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        expert, n_tile, _, row, height = _work(item, job, T)
        if expert >= 0:
            for i in gl.static_range(COUNT):
                if _is_height(height, i, T):
                    _multiply_tile(
                        group, at, expert, n_tile, row, height, b, job, i, END, T
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
    b = ExpertBuffers(
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, tile_rows(T), 128], SHARED),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, tile_rows(T)], FLAT),
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
    """Like that of fp8_product_triton.py; `rows` are those of sorted pairs, `grouped` tiles of
    `tile.rows`; the sides of `weight` are multiples of 128."""
    shared, flat = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(0, 32, 2)
    n_tiles = weight.shape[-2] // (64 * tile.groups)
    items = grouped.num_tiles * n_tiles
    _a8_prompt_experts_kernel[(min(describe(out.device).multiprocessors, items),)](
        TensorDescriptor.from_tensor(rows.codes, [ROWS, 128], shared),
        TensorDescriptor.from_tensor(rows.scales.view(-1, tile.rows), [1, tile.rows], flat),
        TensorDescriptor.from_tensor(weight.words.view(-1, 256), [4, 256], flat),
        TensorDescriptor.from_tensor(weight.shifts.view(-1, 64), [1, 64], flat),
        weight.factor, out, grouped.groups, out if weights is None else weights, out.shape[1],
        n_tiles, items, rows.num_steps, limit, END=PAIRS if weights is None else SWIGLU, T=tile,
        NUM_COPY_REGISTERS=COPY_REGISTERS, num_warps=WARPS,
    )  # fmt: skip
