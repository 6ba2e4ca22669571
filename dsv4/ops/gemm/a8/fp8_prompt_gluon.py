# mypy: ignore-errors
"""FP8 products of a8 rows for prompts on sm_90, in Gluon: input rows in the tensor core's M slot.

A program walks over tiles of 128 weight rows by 128 or 192 input rows. One warp copies both, and
the scales of input rows, into a ring of buffers; two or three groups of four warps multiply 64
input rows each. A thread's sums belong to two input rows, so it loads two scales of rows a step.
They arrive while the product runs, long before a buffer is given back, so no load has to be fenced.
Results leave through shared memory as copies, which go on while the next tile is multiplied.

Sums and their order are those of fp8_product_triton.py, and `wgmma` gives the same bits with
operands in each other's place. The interpreter does not run Gluon; a GPU test compares both to the
last bit.
"""

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv4.ops.core.gpu import describe
from dsv4.ops.core.helpers_device import append
from dsv4.ops.gemm.split_k import split_k

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
joined = gluon.jit(append.fn)
ROWS, WIDTH = gl.constexpr(64), gl.constexpr(128)  # input rows of a product, weight rows of a tile
COPY_BYTES = 128  # of a row of results
ADD = gl.constexpr("fma.rn.f32 $0, $1, $2, $3;")
WARPS, COPY_REGISTERS = 4, 24
REGISTERS = {2: 240, 3: 160}  # of a multiplying thread, by `groups`


class PromptTile(NamedTuple):
    """Constants of a launch."""

    groups: int  # of four warps that multiply
    stages: int
    band: int  # tiles of weight rows that all rows are multiplied by before others
    ranges: int = 1


MATRIX = PromptTile(3, 4, 32)
RANGES = PromptTile(2, 5, 16)  # a second set of sums in registers


class PromptBuffers(NamedTuple):
    """A ring of `stages`; which buffers are filled, which are free again; results of a group."""

    rows: object
    row_scales: object
    weights: object
    full: object
    empty: object
    results: object
    out: object


class PromptJob(NamedTuple):
    """What is multiplied."""

    scale: object  # of weights
    num_rows: int
    weight_rows: int
    n_tiles: int
    m_tiles: int
    items: int
    steps: int
    per_range: int


@gluon.constexpr_function
def sums_layout(piece):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, piece, 32])


SUMS = gl.constexpr(sums_layout(128))
ROW = gl.constexpr(gl.SliceLayout(1, SUMS))


@gluon.jit
def _work(item, job, T: gl.constexpr):
    """(tile of weight rows, tile of input rows), in bands."""
    band = item // (T.band * job.m_tiles)
    first = band * T.band
    width = gl.minimum(job.n_tiles - first, T.band)
    inside = item - first * job.m_tiles
    return first + inside % width, inside // width


@gluon.jit
def _copy(x_desc, scale_desc, w_desc, b, job, T: gl.constexpr):
    """The job of the copying warp."""
    GROUPS: gl.constexpr = T.groups
    at = 0
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        n_tile, m_tile = _work(item, job, T)
        for step in range(0, job.steps):
            slot = at % T.stages
            full = b.full.index(slot)
            mbarrier.wait(b.empty.index(slot), (at // T.stages + 1) & 1)
            mbarrier.expect(full, (GROUPS * ROWS + WIDTH) * 128 + GROUPS * ROWS * 4)
            for i in gl.static_range(GROUPS):
                row = (m_tile * GROUPS + i) * ROWS
                tma_load(x_desc, [row, step * 128], full, b.rows.index(slot * GROUPS + i))
                tma_load(scale_desc, [step, row], full, b.row_scales.index(slot * GROUPS + i))
            tma_load(w_desc, [n_tile * WIDTH, step * 128], full, b.weights.index(slot))
            at += 1


@gluon.jit
def _load_scale(tile, step, job):
    """A step's scale of weights, for each of a thread's rows: of one number for all threads the
    compiler knows that it is uniform, and waits for it between two products, not where it is used.
    32 steps share a line of the L1 cache."""
    row = gl.arange(0, ROWS, layout=ROW)
    none = (row + job.num_rows) >> 30  # 0, which the compiler does not know
    n = gl.minimum(tile[0] * WIDTH // 128, job.weight_rows // 128 - 1)
    return gl.load(job.scale + n * job.steps + gl.minimum(step, job.steps - 1) + none)


@gluon.jit
def _zeros():
    return gl.zeros([ROWS, WIDTH], gl.float32, SUMS)


@gluon.jit
def add_scaled(part, factor, sums):
    """`part` times its rows' factors, plus `sums`."""
    given = [part, gl.expand_dims(factor, 1), sums]
    return gl.inline_asm_elementwise(ADD, "=f,f,f,f", given, gl.float32, False, 1)


@gluon.jit
def _stay(slot, b, job):
    """Never waits; the compiler does not mix instructions before and after it."""
    if job.num_rows < 0:
        mbarrier.wait(b.full.index(slot), 0)


@gluon.jit
def _step(group, at, old, sums, total, scale, tile, following, b, job, STORE: gl.constexpr,
          T: gl.constexpr):  # fmt: skip
    """(the product, new sums, scale of the tile and step `following`). With STORE results leave.

    The product overwrites `old`, which the compiler must not know to be unused: otherwise it gets
    registers of its own, and what it is added to is added after the next product."""
    slot = at % T.stages
    mbarrier.wait(b.full.index(slot), at // T.stages & 1)
    w = b.weights.index(slot).permute((1, 0))
    place = slot * T.groups + group
    unused = job.num_rows < 0
    part = warpgroup_mma(b.rows.index(place), w, old, use_acc=unused, is_async=True)
    of_rows = b.row_scales.index(place).reshape([ROWS]).load(ROW)
    next_scale = _load_scale(following[0], following[1], job)
    _stay(slot, b, job)
    factor = of_rows * scale
    part = warpgroup_mma_wait(0, deps=(part,))
    mbarrier.arrive(b.empty.index(slot), count=1)
    value = add_scaled(part, factor, sums)
    if STORE:
        row, column = (tile[1] * T.groups + group) * ROWS, tile[0] * WIDTH
        _store(total + value if T.ranges > 1 else value, row, column, group, b, 0)
    return part, value, next_scale


@gluon.jit
def _range(group, at, scale, tile, next_tile, begin, end, total, b, job, STORE: gl.constexpr,
           T: gl.constexpr):  # fmt: skip
    """(fp32 `[64, 128]` over the steps `begin` to `end`, the next step's scale)."""
    part, sums = _zeros(), _zeros()
    for step in range(begin, end - 1):
        following = (tile, step + 1)
        part, sums, scale = _step(
            group, at, part, sums, total, scale, tile, following, b, job, False, T
        )
        at += 1
    following = (next_tile, 0) if STORE else (tile, end)
    _, sums, scale = _step(group, at, part, sums, total, scale, tile, following, b, job, STORE, T)
    return sums, scale


@gluon.jit
def _multiply_tile(group, at, scale, tile, next_tile, b, job, T: gl.constexpr):
    """All ranges of K, added in order; returns the next tile's first scale."""
    total, begin = _zeros(), 0
    if T.ranges > 1:
        for index in range(0, T.ranges - 1):
            begin = index * job.per_range
            sums, scale = _range(
                group, at + begin, scale, tile, tile, begin, begin + job.per_range, total, b, job,
                False, T,
            )  # fmt: skip
            total = total + sums
        begin = (T.ranges - 1) * job.per_range
    _, scale = _range(
        group, at + begin, scale, tile, next_tile, begin, job.steps, total, b, job, True, T
    )
    return scale


@gluon.jit
def _store(value, row, column, group, b, OFFSET: gl.constexpr):
    """Copies a line of 128 bytes wide, from two buffers in turn."""
    COLUMNS: gl.constexpr = value.shape[1]
    CHUNK: gl.constexpr = b.results.shape[2]
    if COLUMNS > CHUNK:
        HALF: gl.constexpr = COLUMNS // 2
        halves = gl.split(gl.permute(value.reshape([ROWS, 2, HALF]), [0, 2, 1]))
        _store(halves[0], row, column, group, b, OFFSET)
        _store(halves[1], row, column, group, b, OFFSET + HALF)
    else:
        value = gl.convert_layout(value, sums_layout(COLUMNS), assert_trivial=True)
        buffer = b.results.index(group * 2 + OFFSET // CHUNK % 2)
        tma.store_wait(1)
        buffer.store(value.to(b.out.dtype))
        fence_async_shared()
        tma_store(b.out, [row, column + OFFSET], buffer)


@gluon.jit
def _multiply(group, b, job, T: gl.constexpr):
    """The job of a multiplying warpgroup."""
    at = 0
    tile = _work(gl.program_id(0), job, T)
    scale = _load_scale(tile, 0, job)
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        next_tile = _work(gl.minimum(item + gl.num_programs(0), job.items - 1), job, T)
        scale = _multiply_tile(group, at, scale, tile, next_tile, b, job, T)
        tile = next_tile
        at += job.steps
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "n_tiles", "m_tiles", "steps", "per_range"])
def _a8_prompt_kernel(
    x_desc, scale_desc, w_desc, out_desc, scale, num_rows, weight_rows, n_tiles, m_tiles, steps,
    per_range, T: gl.constexpr, NUM_REGISTERS: gl.constexpr,
    NUM_COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = T.stages
    ROW_BUFFERS: gl.constexpr = STAGES * T.groups
    CHUNK: gl.constexpr = out_desc.block_shape[1]
    b = PromptBuffers(
        gl.allocate_shared_memory(gl.float8e4nv, [ROW_BUFFERS, ROWS, 128], SHARED),
        gl.allocate_shared_memory(gl.float32, [ROW_BUFFERS, 1, ROWS], scale_desc.layout),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, WIDTH, 128], SHARED),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(out_desc.dtype, [2 * T.groups, ROWS, CHUNK], out_desc.layout),
        out_desc,
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(b.full.index(i), count=1)
        mbarrier.init(b.empty.index(i), count=T.groups)
    job = PromptJob(
        scale, num_rows, weight_rows, n_tiles, m_tiles, n_tiles * m_tiles, steps, per_range
    )  # fmt: skip
    if T.groups == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, b, job, T)), (_multiply, (1, b, job, T)),
                (_copy, (x_desc, scale_desc, w_desc, b, job, T)),
            ],
            [4, 1], [NUM_REGISTERS, NUM_COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, b, job, T)), (_multiply, (1, b, job, T)),
                (_multiply, (2, b, job, T)), (_copy, (x_desc, scale_desc, w_desc, b, job, T)),
            ],
            [4, 4, 1], [NUM_REGISTERS, NUM_REGISTERS, NUM_COPY_REGISTERS],
        )  # fmt: skip


def multiply_rows(rows, weight, out, tile=None) -> None:
    """`out` `[rows, n]` = a8 rows times an FP8 matrix whose sides are multiples of 128."""
    ranges, per_range = split_k(weight)
    tile = (tile or (MATRIX if ranges == 1 else RANGES))._replace(ranges=ranges)
    shared = gl.NVMMASharedLayout(128, 8, 2)
    size = out.dtype.itemsize
    chunk = COPY_BYTES // size
    results = gl.NVMMASharedLayout(COPY_BYTES, 8 * size, 2)
    n_tiles = weight.shape[0] // 128
    m_tiles = triton.cdiv(rows.num_rows, 64 * tile.groups)
    programs = min(describe(out.device).multiprocessors, m_tiles * n_tiles)
    _a8_prompt_kernel[(programs,)](
        TensorDescriptor.from_tensor(rows.codes, [64, 128], shared),
        TensorDescriptor.from_tensor(rows.scales, [1, 64], gl.NVMMASharedLayout(0, 32, 2)),
        TensorDescriptor.from_tensor(weight.data, [128, 128], shared),
        TensorDescriptor.from_tensor(out, [64, chunk], results),
        weight.scale, rows.num_rows, weight.shape[0], n_tiles, m_tiles, rows.num_steps, per_range,
        T=tile, NUM_REGISTERS=REGISTERS[tile.groups], NUM_COPY_REGISTERS=COPY_REGISTERS,
        num_warps=WARPS,
    )  # fmt: skip
