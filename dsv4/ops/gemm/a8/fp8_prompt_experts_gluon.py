# mypy: ignore-errors
"""MXFP4 experts times a8 rows for prompts on sm_90, with input rows in the tensor core's M slot.

As in fp8_prompt_gluon.py, but weights arrive packed: four more warps unpack 128 weight rows and
columns to E4M3 in shared memory, two steps ahead at most. Each of two multiplying groups has every
other 64 of up to 256 rows of an expert, and skips those that are not there.
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
from dsv4.ops.gemm.a8.fp8_prompt_gluon import add_scaled, joined, sums_layout, tma_load
from dsv4.ops.gemm.a8.unpack_mxfp4_device import unpacked

activated = gluon.jit(swiglu.fn)
ROWS, SUMS = gl.constexpr(64), gl.constexpr(sums_layout(128))  # of a product
STAGES, UNPACKED = gl.constexpr(4), gl.constexpr(2)  # of rows and packed weights; of unpacked ones
PACKED = gl.constexpr(2 * 64 * (16 + 1) * 4)  # bytes of MXFP4 in 128 rows and columns
MOST_ROWS = 256  # of a tile
WARPS, REGISTERS = 4, (216, 48, 32)  # to multiply, unpack, copy


class ExpertBuffers(NamedTuple):
    """Rings: rows and packed weights, unpacked weights; which are filled, which are free."""

    rows: object
    words: object
    shifts: object
    weights: object
    full: object
    empty: object
    unpacked: object
    used: object


class ExpertJob(NamedTuple):
    """What is multiplied, and where results go."""

    row_scales: object  # [steps, stride]
    stride: int
    factors: object
    out: object
    groups: object
    token_weights: object
    num_rows: int
    size: int  # of a result row
    n_tiles: int
    items: int
    steps: int
    limit: float


@gluon.jit
def _work(item, job):
    """(expert, tile of weight rows, first input row, rows) of an item. Expert -1: none, and none
    follows, as the last tiles are empty."""
    m_tile = gl.minimum(item, job.items - 1) // job.n_tiles
    expert = gl.load(job.groups.tile_expert + m_tile)
    expert = gl.where(item < job.items, expert, -1)
    row = gl.load(job.groups.tile_start + m_tile)
    end = gl.load(job.groups.tile_end + m_tile)
    return expert, item % job.n_tiles, row, gl.minimum(end - row, 4 * ROWS)


@gluon.jit
def _copy_tile(descs, at, work, b, job, COUNT: gl.constexpr):
    first = (work[0] * job.n_tiles + work[1]) * 2 * job.steps
    for step in range(0, job.steps):
        slot = at % STAGES
        full = b.full.index(slot)
        mbarrier.wait(b.empty.index(slot), (at // STAGES + 1) & 1)
        mbarrier.expect(full, COUNT * ROWS * 128 + PACKED)
        for half in gl.static_range(2):
            place = first + half * job.steps + step
            to = slot * 2 + half
            tma_load(descs[1], [place * 4, 0], full, b.words.index(to))
            tma_load(descs[2], [place, 0], full, b.shifts.index(to))
        for i in gl.static_range(COUNT):
            place = [work[2] + i * ROWS, step * 128]
            tma_load(descs[0], place, full, b.rows.index(slot * 4 + i))
        at += 1


@gluon.jit
def _copy(descs, b, job):
    """The job of the copying warp."""
    at = 0
    item = gl.program_id(0)
    work = _work(item, job)
    while work[0] >= 0:
        if work[3] <= ROWS:
            _copy_tile(descs, at, work, b, job, 1)
        elif work[3] <= 2 * ROWS:
            _copy_tile(descs, at, work, b, job, 2)
        elif work[3] <= 3 * ROWS:
            _copy_tile(descs, at, work, b, job, 3)
        else:
            _copy_tile(descs, at, work, b, job, 4)
        at += job.steps
        item += gl.num_programs(0)
        work = _work(item, job)


@gluon.jit
def _unpack_all(b, job):
    """The job of the unpacking group. A step's rows are given back when its weights are."""
    at = 0
    item = gl.program_id(0)
    work = _work(item, job)
    while work[0] >= 0:
        for _ in range(0, job.steps):
            slot = at % STAGES
            to = at % UNPACKED
            mbarrier.wait(b.full.index(slot), at // STAGES & 1)
            for half in gl.static_range(2):
                codes = unpacked(b.words.index(slot * 2 + half), b.shifts.index(slot * 2 + half))
                if half == 0:
                    mbarrier.wait(b.used.index(to), (at // UNPACKED + 1) & 1)
                    before = (at + STAGES - UNPACKED) % STAGES
                    mbarrier.arrive(b.empty.index(before), count=1, pred=at >= UNPACKED)
                b.weights.index(to).slice(half * 64, 64).store(codes)
            fence_async_shared()
            mbarrier.arrive(b.unpacked.index(to), count=1)
            at += 1
        item += gl.num_programs(0)
        work = _work(item, job)


@gluon.jit
def _load_scales(group, row, step, job):
    """Of both 64 rows of a group; rows of other experts are not stored."""
    step = gl.minimum(step, job.steps - 1)
    found = ()
    for f in gl.static_range(2):
        r = row + (2 * f + group) * ROWS
        r += gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
        r = gl.minimum(r, job.num_rows - 1)
        found = joined(found, gl.load(job.row_scales + step * job.stride + r))
    return found


@gluon.jit
def _step(group, at, part, sums, scales, b, job, LIVE: gl.constexpr):
    """(registers of the last product, new sums)."""
    slot = at % STAGES
    w_slot = at % UNPACKED
    mbarrier.wait(b.full.index(slot), at // STAGES & 1)
    mbarrier.wait(b.unpacked.index(w_slot), at // UNPACKED & 1)
    added = ()
    for i in gl.static_range(LIVE):
        rows = b.rows.index(slot * 4 + 2 * i + group)
        w = b.weights.index(w_slot).permute((1, 0))
        # into the same registers each time: the compiler must not know that it overwrites them
        part = warpgroup_mma(rows, w, part, use_acc=job.num_rows < 0, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        if i == LIVE - 1:
            mbarrier.arrive(b.used.index(w_slot), count=1)
        added = joined(added, add_scaled(part, scales[i], sums[i]))
        if i < LIVE - 1 and job.num_rows < 0:  # never: what is around it is not mixed
            mbarrier.wait(b.full.index(slot), 0)
    return part, added


@gluon.jit
def _pairs(group, work, job, LIVE: gl.constexpr):
    """Of the rows of each 64."""
    found = ()
    for f in gl.static_range(LIVE):
        r = (2 * f + group) * ROWS
        r += gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
        pair = gl.load(job.groups.sorted_pairs + work[2] + r, mask=r < work[3], other=0)
        found = joined(found, pair)
    return found


@gluon.jit
def _multiply_tile(group, at, work, next_row, scales, b, job, LIVE: gl.constexpr,
                   END: gl.constexpr):  # fmt: skip
    """Returns the next tile's first scales. What results need is loaded before the last step."""
    part = gl.zeros([ROWS, 128], gl.float32, SUMS)
    sums = ()
    for _ in gl.static_range(LIVE):
        sums = joined(sums, gl.zeros([ROWS, 128], gl.float32, SUMS))
    factor = gl.load(job.factors + work[0])
    if END == 1:
        pairs = _pairs(group, work, job, LIVE)
    for step in range(0, job.steps - 1):
        next_scales = _load_scales(group, work[2], step + 1, job)
        part, sums = _step(group, at, part, sums, scales, b, job, LIVE)
        scales = next_scales
        at += 1
    next_scales = _load_scales(group, next_row, 0, job)
    weights = ()
    if END == 1:
        for f in gl.static_range(LIVE):
            weights = joined(weights, gl.load(job.token_weights + pairs[f]))
    else:
        pairs = _pairs(group, work, job, LIVE)
    part, sums = _step(group, at, part, sums, scales, b, job, LIVE)
    for i in gl.static_range(LIVE):
        r = (2 * i + group) * ROWS
        if END == 1:
            _store_swiglu(sums[i] * factor, weights[i], work[2], r, work[3], work[1] * 128, job)
        else:
            _store(sums[i] * factor, pairs[i], r, work[3], work[1] * 128, job)
    return next_scales


@gluon.jit
def _store(value, pair, first, height, column, job):
    """A row's result belongs to its pair. Four threads store 32 adjacent bytes."""
    LAYOUT: gl.constexpr = value.type.layout
    r = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    c = column + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(pair.to(gl.int64) * job.size, 1) + gl.expand_dims(c, 0)
    mask = gl.expand_dims(r < height, 1)
    gl.store(job.out + at, value.to(job.out.dtype.element_ty), mask=mask)


@gluon.jit
def _store_swiglu(value, weight, row, first, height, column, job):
    """Of 16 weight rows the first 8 are gates: a thread has both. Rows stay in sorted order."""
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    HALF: gl.constexpr = value.shape[1] // 2
    both = gl.permute(value.reshape([ROWS, HALF // 8, 2, 8]), [0, 1, 3, 2])
    gate, up = gl.split(both)
    value = activated(gate, up, job.limit).reshape([ROWS, HALF])
    weight = gl.convert_layout(weight, gl.SliceLayout(1, value.type.layout), assert_trivial=True)
    value = (value * gl.expand_dims(weight, 1)).to(gl.bfloat16)
    r = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
    c = column // 2 + gl.arange(0, HALF, layout=gl.SliceLayout(0, STORE))
    at = gl.expand_dims((row + r).to(gl.int64) * job.size, 1) + gl.expand_dims(c, 0)
    mask = gl.expand_dims(r < height, 1)
    gl.store(job.out + at, gl.convert_layout(value, STORE), mask=mask)


@gluon.jit
def _pass_tile(at, b, job):
    """A group without rows gives weights back."""
    for _ in range(0, job.steps):
        w_slot = at % UNPACKED
        mbarrier.wait(b.unpacked.index(w_slot), at // UNPACKED & 1)
        mbarrier.arrive(b.used.index(w_slot), count=1)
        at += 1


@gluon.jit
def _multiply(group, b, job, END: gl.constexpr):
    """The job of a multiplying group."""
    at = 0
    item = gl.program_id(0)
    work = _work(item, job)
    scales = _load_scales(group, work[2], 0, job)
    while work[0] >= 0:
        item += gl.num_programs(0)
        new = _work(item, job)
        if work[3] > (2 + group) * ROWS:
            scales = _multiply_tile(group, at, work, new[2], scales, b, job, 2, END)
        elif work[3] > group * ROWS:
            scales = _multiply_tile(group, at, work, new[2], scales, b, job, 1, END)
        else:
            _pass_tile(at, b, job)
            scales = _load_scales(group, new[2], 0, job)
        at += job.steps
        work = new


@gluon.jit(do_not_specialize=["num_rows", "stride", "n_tiles", "items", "steps"])
def _a8_prompt_experts_kernel(
    x_desc, w_desc, shift_desc, row_scales, stride, factors, out, groups, token_weights, num_rows,
    size, n_tiles, items, steps, limit, END: gl.constexpr, NUM_REGISTERS: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    b = ExpertBuffers(
        gl.allocate_shared_memory(gl.float8e4nv, [4 * STAGES, ROWS, 128], SHARED),
        gl.allocate_shared_memory(gl.int32, [2 * STAGES, 4, 256], FLAT),
        gl.allocate_shared_memory(gl.int32, [2 * STAGES, 1, 64], FLAT),
        gl.allocate_shared_memory(gl.float8e4nv, [UNPACKED, 128, 128], SHARED),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [UNPACKED, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [UNPACKED, 1], BARRIER),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(b.full.index(i), count=1)
        mbarrier.init(b.empty.index(i), count=1)
    for i in gl.static_range(UNPACKED):
        mbarrier.init(b.unpacked.index(i), count=1)
        mbarrier.init(b.used.index(i), count=2)
    job = ExpertJob(
        row_scales, stride, factors, out, groups, token_weights, num_rows, size, n_tiles, items,
        steps, limit,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (0, b, job, END)),
            (_multiply, (1, b, job, END)),
            (_unpack_all, (b, job)),
            (_copy, ((x_desc, w_desc, shift_desc), b, job)),
        ],
        [4, 4, 1],
        NUM_REGISTERS,
    )


def multiply_experts(rows, weight, out, grouped, *, weights=None, limit=0.0) -> None:
    """Like that of fp8_product_triton.py; `rows` has a row per sorted pair, `grouped` tiles of
    MOST_ROWS; the sides of `weight` are multiples of 128."""
    shared, flat = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(0, 32, 2)
    n_tiles = weight.shape[-2] // 128
    items = grouped.num_tiles * n_tiles
    _a8_prompt_experts_kernel[(min(describe(out.device).multiprocessors, items),)](
        TensorDescriptor.from_tensor(rows.codes, [64, 128], shared),
        TensorDescriptor.from_tensor(weight.words.view(-1, 256), [4, 256], flat),
        TensorDescriptor.from_tensor(weight.shifts.view(-1, 64), [1, 64], flat),
        rows.scales, rows.scales.stride(0), weight.factor, out, grouped.groups,
        out if weights is None else weights, rows.num_rows, out.shape[1], n_tiles, items,
        rows.num_steps, limit, END=PAIRS if weights is None else SWIGLU, NUM_REGISTERS=REGISTERS,
        num_warps=WARPS,
    )  # fmt: skip
